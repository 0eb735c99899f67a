"""Records -> batches, in an order that is a pure function of (seed, epoch): no state to save, exact to resume in mid-epoch.

Captions are tokenized once. Pictures are decoded again each epoch, by ``workers`` processes. A picture that cannot be decoded ends
the run with its name; pictures that shall be skipped are left out before (see ``gradscope.data.usable``). The last records of an
epoch that do not fill a step are left out of it; ``left_out`` says how many (another shuffle leaves out others).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from gradscope.data.ahead import ahead
from gradscope.data.pixels import pixel_path
from gradscope.types import Batch, Record

if TYPE_CHECKING:
    from gradscope.encoders.dual import DualEncoder
    from gradscope.encoders.tokenizer import Tokenized


def generator(*purpose: object) -> torch.Generator:
    """A generator of its own for each purpose, e.g. ``generator(seed, "order", epoch)``."""
    digest = hashlib.sha256("/".join(map(str, purpose)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@lru_cache(maxsize=2)
def epoch_order(records: int, seed: int, epoch: int) -> list[int]:
    """The shuffle of an epoch (1-based)."""
    return torch.randperm(records, generator=generator(seed, "order", epoch)).tolist()


class Pixels(Dataset):
    """Record number -> preprocessed picture, float32 [3, H, W].

    Args:
        records: each with an image; ValueError naming the record otherwise.
        read: path -> picture, usually from ``gradscope.data.pixels.pixel_path``.
    """

    def __init__(self, records: Sequence[Record], read: Callable[[str], Tensor]) -> None:
        self.paths: list[str] = []
        self.read = read
        for record in records:
            if record.image is None:
                raise ValueError(f"record '{record.id}' has no image; training and retrieval need one for each caption")
            self.paths.append(record.image)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return self.read(self.paths[index])


def decoded(pixels: Pixels, plan: list[list[int]], *, workers: int = 0, pin: bool = False) -> Iterator[Tensor]:
    """The pictures of each batch of the plan, [B, 3, H, W], in its order whatever the number of ``workers``.

    ``pin`` is for a GPU: they are put where it copies from without waiting, and without ``workers`` a thread makes the next ones while
    it computes. Raises ValueError naming the first picture that cannot be decoded.
    """
    own = torch.Generator()  # the loader draws a seed when it starts; a resumed run must not draw one more than an unbroken one
    loader = DataLoader(_OrReason(pixels), batch_sampler=plan, num_workers=workers, collate_fn=_together, generator=own, pin_memory=pin)
    for images in ahead(loader) if pin and workers == 0 else loader:
        if isinstance(images, str):
            raise ValueError(images)
        yield images


class _OrReason(Dataset):
    """A picture, or in words why there is none: an exception would leave a worker process wrapped in that process's traceback."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            return self.pixels[index]
        except ValueError as error:
            return str(error)


def _together(items: list[Tensor | str]) -> Tensor | str:
    reasons = [item for item in items if isinstance(item, str)]
    return reasons[0] if reasons else default_collate(items)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The training stream: each step is ``accumulate`` micro-batches of ``batch_size`` records with their first caption.

    ``decode`` says how pictures are read: fast, exact or scaled (see ``gradscope.data.pixels``).

    Of several ranks each decodes its consecutive part of every micro-batch; order, width and steps are those of one process.
    """

    records: Sequence[Record]
    encoder: DualEncoder
    batch_size: int
    accumulate: int
    seed: int
    workers: int = 0
    decode: str = "fast"
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.batch_size % self.ranks:
            below = self.batch_size // self.ranks * self.ranks
            fitting = f"{below} or {below + self.ranks}" if below else f"{self.ranks} at least"
            raise ValueError(
                f"--batch-size {self.batch_size} is the width of one softmax over all processes and cannot be dealt evenly to "
                f"{self.ranks} of them; use {fitting}, or another number of processes"
            )
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"a step takes {self.batch_size} x {self.accumulate} = {self.per_step} records, and {len(self.records)} are there "
                f"to train on, without those held out for validation; lower --batch-size or --accumulate"
            )

    @property
    def per_step(self) -> int:
        return self.batch_size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        return len(self.records) // self.per_step

    @property
    def left_out(self) -> int:
        """Records per epoch that do not fill a step."""
        return len(self.records) - self.steps_per_epoch * self.per_step

    @cached_property
    def tokenized(self) -> Tokenized:
        return self.encoder.tokenize([record.captions[0] for record in self.records])

    def epoch_of(self, step: int) -> int:
        """The 1-based epoch that contains step ``step`` (1-based)."""
        return (step - 1) // self.steps_per_epoch + 1

    def indices(self, step: int) -> list[list[int]]:
        """Record numbers of the micro-batches of a step."""
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        order = epoch_order(len(self.records), self.seed, epoch + 1)
        start = within * self.per_step
        return [order[start + k * self.batch_size : start + (k + 1) * self.batch_size] for k in range(self.accumulate)]

    def steps(self, first: int, last: int, read: Callable[[str], Tensor] | None = None) -> Iterator[list[Batch]]:
        """Micro-batches of steps ``first`` to ``last``, both included. ``read``: path -> picture, where not ``decode`` says how."""
        plan = [self._share(micro, self.rank) for step in range(first, last + 1) for micro in self.indices(step)]
        pixels = Pixels(self.records, read or pixel_path(self.encoder.config["preprocess_cfg"], self.decode))
        stream = decoded(pixels, plan, workers=self.workers, pin=self.encoder.device.type == "cuda")
        step: list[Batch] = []
        for micro, images in zip(plan, stream, strict=True):
            step.append(self._batch(micro, images))
            if len(step) == self.accumulate:
                yield step
                step = []

    def of_all_ranks(self, step: int, own: list[Batch], *, wide: bool) -> list[Batch]:
        """What the softmaxes of a step are over: the micro-batches of all ranks without pixels, which each rank knows from the plan.

        Args:
            own: this rank's micro-batches; on one process they are the answer.
            wide: one softmax over the whole step: one batch, in the order in which ranks are gathered.
        """
        if self.ranks == 1:
            return own
        planned = self.indices(step)
        if wide:
            planned = [[i for rank in range(self.ranks) for micro in planned for i in self._share(micro, rank)]]
        return [self._batch(micro, None) for micro in planned]

    def _share(self, micro: list[int], rank: int) -> list[int]:
        each = self.batch_size // self.ranks
        return micro[rank * each : (rank + 1) * each]

    def _batch(self, micro: list[int], images: Tensor | None) -> Batch:
        device = self.encoder.device
        return Batch(
            ids=tuple(self.records[i].id for i in micro),
            images={} if images is None else {"full": images.to(device, non_blocking=True)},
            texts={"full": self.tokenized.ids[micro].to(device, non_blocking=True)},
            lengths=self.tokenized.lengths[micro],
            captions=tuple(self.records[i].captions[0] for i in micro),
        )
