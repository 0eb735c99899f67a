"""Records -> batches, in an order that is a pure function of (seed, epoch): no state to save, exact to resume in mid-epoch.

Captions are tokenized once. Pictures are decoded again each epoch, by ``workers`` processes. The last records of an epoch that do
not fill a step are left out of it; ``left_out`` says how many (another shuffle leaves out others).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gradscope.data.images import load_rgb
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
    """Record number -> preprocessed picture, float32 [3, H, W]."""

    def __init__(self, records: Sequence[Record], transform: Any) -> None:
        self.paths = [record.image for record in records]
        self.transform = transform
        for record in records:
            if record.image is None:
                raise ValueError(f"record '{record.id}' has no image; training and retrieval need one for each caption")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        path = self.paths[index]
        assert path is not None
        pixels: Tensor = self.transform(load_rgb(path))
        return pixels


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The training stream: each step is ``accumulate`` micro-batches of ``batch_size`` records with their first caption."""

    records: Sequence[Record]
    encoder: DualEncoder
    batch_size: int
    accumulate: int
    seed: int
    workers: int = 0

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"a step takes {self.batch_size} x {self.accumulate} = {self.per_step} records, the training split has "
                f"{len(self.records)}; lower --batch-size or --accumulate"
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

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """Micro-batches of steps ``first`` to ``last``, both included."""
        plan = [micro for step in range(first, last + 1) for micro in self.indices(step)]
        pixels = Pixels(self.records, self.encoder.preprocess())
        own = torch.Generator()  # the loader draws a seed when it starts; a resumed run must not draw one more than an unbroken one
        loader = DataLoader(pixels, batch_sampler=plan, num_workers=self.workers, generator=own)
        step: list[Batch] = []
        for micro, images in zip(plan, loader, strict=True):
            step.append(self._batch(micro, images))
            if len(step) == self.accumulate:
                yield step
                step = []

    def _batch(self, micro: list[int], images: Tensor) -> Batch:
        device = self.encoder.device
        return Batch(
            ids=tuple(self.records[i].id for i in micro),
            images={"full": images.to(device, non_blocking=True)},
            texts={"full": self.tokenized.ids[micro].to(device, non_blocking=True)},
            lengths=self.tokenized.lengths[micro],
            captions=tuple(self.records[i].captions[0] for i in micro),
        )
