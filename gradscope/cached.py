"""Full-width negatives on a small device: embed all micro-batches, one loss over all of them, replay (GradCache, Gao et al., 2021).

    1. embed every micro-batch without a graph; the last one with its graph         O(one micro-batch) activations
    2. one loss over the B x accumulate embeddings, whose gradient stops at the embeddings; the scale's gradient is taken here, once
    3. the last micro-batch's backward from its kept graph, then embed each of the others again and hand its slice to the towers

Same gradient as one batch of the full width, to rounding. With a backward that costs two forwards, k micro-batches take
(4 k - 1) / (3 k) of one wide batch's work: 1.29 at k = 8. The graph that is kept is as large as the one that each replay holds, so it
raises no peak but by what the loss itself takes. A tower that is frozen and rests passes each micro-batch once: its rows are kept.

Random numbers (dropout of units, attention, patches or paths) are the same in both passes: the state of the generators is noted ahead
of each micro-batch and put back for its replay. Afterwards it is where one pass had left it. A layer whose output depends on the other
rows (BatchNorm) cannot be replayed in pieces and is refused; so is, at the first step, any encoder whose replay differs for another
reason (``check_drift``), as one that draws from Python's or numpy's generator.

Memory: the pictures of all micro-batches are decoded once and held for the replay, 4 x 3 x H x W bytes each (fp32: 77 MB for 128 of
224 x 224), and the embeddings and their gradient, 8 (D_image + D_text) bytes a row; with a token term 8 D (P + L) more.

Several ranks: each embeds and replays its own rows; the loss between the two sees all of them. Nothing waits for a GPU: all work of
both passes is queued one piece after the other.

How it can mislead: under fp16 or bf16 the towers' weight gradient is a sum of k rounded pieces, one wide batch's is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.freeze import Tower, image_tower, text_tower_parts
from gradscope.types import Batch, Embeddings

Embed = Callable[..., Embeddings]  # (batch), or (batch, rows that are known)
Before = Callable[[Embeddings, slice], None]
Quiet = Callable[[], AbstractContextManager[Any]]
#: The tensors of Embeddings that the towers make, one row per record.
_BY_TOWER = {"image": ("image", "image_tokens"), "text": ("text", "text_tokens")}
_ROWS = tuple(name for names in _BY_TOWER.values() for name in names)
#: How far a replayed unit row may be from the first pass's: kernels that are not deterministic differ by less, dropout by more.
DRIFT = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 3e-2}


def check_replayable(encoder: DualEncoder) -> None:
    """Raises ValueError for encoders whose replay in pieces would differ from one wide batch."""
    if encoder.has_batch_norm():
        raise ValueError(
            f"encoder '{encoder.name}' has BatchNorm, whose output depends on the micro-batch: --accumulate-mode cached would not "
            "equal one wide batch; use --accumulate-mode narrow"
        )


def check_drift(encoder: DualEncoder, drift: Tensor, precision: str) -> None:
    """Raises ValueError where ``replay`` said that rows came out otherwise than in the first pass. Waits for the device."""
    if float(drift) > DRIFT[precision]:  # not a number is for the loss to report
        raise ValueError(
            f"encoder '{encoder.name}' embeds the same micro-batch differently the second time (a row is {float(drift):.2g} off): "
            "--accumulate-mode cached would not equal one wide batch; use --accumulate-mode narrow"
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """The micro-batches of a step as one batch."""
    return Batch(
        ids=tuple(i for batch in batches for i in batch.ids),
        images={},  # the full-width batch is never held in pixels
        texts={"full": torch.cat([batch.texts["full"] for batch in batches])},
        lengths=torch.cat([batch.lengths for batch in batches]),
        captions=tuple(c for batch in batches for c in batch.captions),
    )


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """Where the generators of the host and of one device stood."""

    host: Tensor
    device: Tensor | None
    place: torch.device

    @classmethod
    def of(cls, place: torch.device) -> RandomState:
        # Both states live on the host: reading one does not wait for the device.
        own = None if place.type == "cpu" else torch.get_device_module(place).get_rng_state(*_number(place))
        return cls(host=torch.get_rng_state(), device=own, place=place)

    def put_back(self) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.get_device_module(self.place).set_rng_state(self.device, *_number(self.place))


def _number(place: torch.device) -> tuple[torch.device, ...]:
    return () if place.type == "mps" else (place,)  # Apple's has one device, and no argument for it


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """What the loss and the replay need: leaves of the full width, and how each micro-batch was embedded."""

    embeddings: Embeddings
    embed: Embed
    batches: Sequence[Batch]
    states: Sequence[RandomState]  # ahead of each micro-batch, and behind the last
    last: Embeddings  # of the last micro-batch, with its graph
    quiet: Quiet
    resting: Sequence[str] = ()

    def replay(self, before: Before | None = None) -> Tensor:
        """Step 3, after the loss was propagated to ``embeddings``.

        Args:
            before: sees each live micro-batch and its rows ahead of its backward.

        Returns:
            [] the largest distance of a replayed row from the first pass's, for ``check_drift``; 0 with one micro-batch.
        """
        drift = torch.zeros((), device=self.embeddings.image.device)
        count, ends = len(self.batches), self._ends()
        for number in (count - 1, *range(count - 1)):  # the kept graph first: only one at a time
            rows = slice(ends[number] - len(self.batches[number]), ends[number])
            final = number == max(count - 2, 0)
            with nullcontext() if final else self.quiet():
                live = self._again(number, rows)
                drift = torch.maximum(drift, _distance(live, self.embeddings, rows))
                if before:
                    before(live, rows)
                _hand_over(live, self.embeddings, rows)
        self.states[-1].put_back()
        return drift

    def _again(self, number: int, rows: slice) -> Embeddings:
        if number == len(self.batches) - 1:
            return self.last
        self.states[number].put_back()
        names = [name for tower in self.resting for name in _BY_TOWER[tower] if getattr(self.embeddings, name) is not None]
        known = {name: getattr(self.embeddings, name).detach()[rows] for name in names}
        return self.embed(self.batches[number], known=known) if known else self.embed(self.batches[number])

    def _ends(self) -> list[int]:
        sizes = torch.tensor([len(batch) for batch in self.batches])
        ends: list[int] = sizes.cumsum(0).tolist()
        return ends


def resting_towers(encoder: DualEncoder) -> tuple[str, ...]:
    """Those of which nothing trains and nothing is drawn: a second pass would give the same rows, and a backward would end there."""
    towers = image_tower(encoder.model), text_tower_parts(encoder.model)
    return tuple(tower.name for tower in towers if not _moves(tower))


def _moves(tower: Tower) -> bool:
    modules = (inner for module in tower.modules for inner in module.modules())
    return any(p.requires_grad for p in tower.parameters()) or any(module.training for module in modules)


def first_pass(
    embed: Embed,
    batches: Sequence[Batch],
    scale: Tensor,
    token_scale: Tensor | None = None,
    quiet: Quiet = nullcontext,
    resting: Sequence[str] = (),
) -> FirstPass:
    """Step 1: leaves of the full width, with the live scales.

    Args:
        embed: the towers; called once for the last micro-batch and twice for the others.
        scale, token_scale: [] with their graph, so that the loss reaches them once.
        quiet: entered around each forward and backward but the final one, e.g. ``DistributedDataParallel.no_sync``.
        resting: the towers of ``resting_towers``, which pass each micro-batch once; ``embed`` is then called again with their rows.
    """
    place = batches[0].texts["full"].device
    states, parts = [RandomState.of(place)], []
    with torch.no_grad():
        for batch in batches[:-1]:
            parts.append(embed(batch))
            states.append(RandomState.of(place))
    with quiet() if len(batches) > 1 else nullcontext():
        last = embed(batches[-1])
    states.append(RandomState.of(place))
    full = replace(_leaves([*parts, last]), scale=scale, token_scale=token_scale)
    return FirstPass(embeddings=full, embed=embed, batches=batches, states=states, last=last, quiet=quiet, resting=resting)


def _leaves(parts: Sequence[Embeddings]) -> Embeddings:
    rows: dict[str, Any] = {}
    for name in (*_ROWS, "text_valid"):
        pieces = [getattr(part, name) for part in parts]
        rows[name] = None if pieces[0] is None else torch.cat([piece.detach() for piece in pieces])
        if name in _ROWS and rows[name] is not None:
            rows[name].requires_grad_()
    return replace(parts[0], **rows)


def _hand_over(live: Embeddings, full: Embeddings, rows: slice) -> None:
    """The slice of the loss's gradient, through the towers."""
    names = [name for name in _ROWS if getattr(live, name) is not None and getattr(live, name).requires_grad]
    torch.autograd.backward([getattr(live, name) for name in names], [getattr(full, name).grad[rows] for name in names])


def _distance(live: Embeddings, full: Embeddings, rows: slice) -> Tensor:
    pairs = [(live.image, full.image), (live.text, full.text)]
    return torch.stack([(now.detach() - then.detach()[rows]).norm(dim=-1).max() for now, then in pairs]).max().to(full.image.dtype)
