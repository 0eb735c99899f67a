"""Caption rows that do not move during a run: the initial encoder's, and those of an external encoder that makes the margin.

Both are computed once over all training captions and kept in the run, so that a resumed run reads the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.data.batching import Batches
from gradscope.distributed import from_first, rank, shared
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.text import load_text_encoder
from gradscope.evaluate import embed_captions
from gradscope.frameworks.clip import Clip
from gradscope.recipe import Recipe
from gradscope.runlog import Run, RunLog
from gradscope.silent_log import SilentLog
from gradscope.types import Batch, Record


@dataclass(frozen=True, kw_only=True)
class FixedCaptions:
    """Rows of all training captions by two encoders; None where nothing asks for them.

    ``initial`` [records, D] is what the drift of G is measured against, and what a frozen margin is made of; ``external``
    [records, D0] is what an external margin is made of.
    """

    place: dict[str, int]  # record id -> row
    initial: Tensor | None
    external: Tensor | None
    margin: str

    def initial_text(self, batch: Batch) -> Tensor | None:
        """[B, D] of a batch."""
        return self._rows(self.initial, batch)

    def margin_text(self, batch: Batch) -> Tensor | None:
        """[B, D0] of a batch, of the encoder that a frozen or external margin names."""
        return self._rows({"frozen": self.initial, "external": self.external}.get(self.margin), batch)

    def _rows(self, rows: Tensor | None, batch: Batch) -> Tensor | None:
        return None if rows is None else rows[[self.place[i] for i in batch.ids]]


def fixed_captions(
    recipe: Recipe, framework: Clip, encoder: DualEncoder, batches: Batches, log: RunLog | SilentLog, say: Callable[[str], None]
) -> FixedCaptions:
    """Computes the rows that this run needs, or reads those of the run that is resumed.

    Args:
        encoder: at the initial weights unless the run is resumed.
        say: receives a line on captions that the external encoder cut.
    """
    margin = recipe.objective.margin
    needs_initial = recipe.probe.log_grads or (framework.objective.needs_margin_text and margin == "frozen")
    return FixedCaptions(
        place={record.id: i for i, record in enumerate(batches.records)},
        initial=_kept("initial_captions", log, lambda: embed_captions(encoder, batches.tokenized.ids), encoder)
        if needs_initial
        else None,
        external=_kept("margin_captions", log, lambda: _external(recipe, batches.records, encoder, say), encoder)
        if margin == "external"
        else None,
        margin=margin,
    )


def _kept(name: str, log: RunLog | SilentLog, compute: Callable[[], Tensor], encoder: DualEncoder) -> Tensor:
    """The rows in the run, or new ones. The first rank looks; the others need not see its disk."""
    there = shared(None if rank() else (log.path / "arrays" / f"{name}.npz").is_file())
    if there:
        stored = None if rank() else torch.from_numpy(Run(log.path).array(f"arrays/{name}.npz")).to(encoder.device)
        return from_first(stored, encoder.device)
    rows = compute()
    log.save_array(name, rows.cpu().numpy())
    return rows


def _external(recipe: Recipe, records: Sequence[Record], encoder: DualEncoder, say: Callable[[str], None]) -> Tensor:
    """By the first rank, which has the encoder to itself."""
    return from_first(None if rank() else _outside_rows(recipe, records, encoder, say), encoder.device)


def _outside_rows(recipe: Recipe, records: Sequence[Record], encoder: DualEncoder, say: Callable[[str], None]) -> Tensor:
    name = recipe.objective.margin_encoder
    outside = load_text_encoder(name, device=str(encoder.device))
    rows, truncated = outside.embed([record.captions[0] for record in records])
    say(f"margin from {name}: {truncated} of {len(records)} captions cut at its {outside.context} tokens")
    return rows.to(encoder.device)
