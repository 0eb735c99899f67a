"""Forward pass over a strip: log of the sums of exp by row and by column, with one exp per cell where that is safe.

Of a block x (base-2 logits), with r_i the largest of row i and h_i = r_i - 32 in fp32:
    e_ij = 2^(x_ij - h_i)            row sum = 2^h_i sum_j e_ij           column sum = 2^max(h) sum_i 2^(h_i - max(h)) e_ij
The row sums are always safe: the shift is the row's own. A column may live on cells far below the maxima of their rows: there the
difference x - h is rounded coarsely, and at last e is 0. A cell up to 64 below its row's maximum has a difference of at most 32, so
a relative error under 7e-7; all others together add at most 2^(U - 64) to a column of the block column, U = log2 sum_i 2^r_i.
The check: U - 62 <= the column's log2 sum, for every column of the block column (the others then hold under a quarter of it). Where it
fails, the columns of that block column are formed again with a shift of their own, and a second exp. The "safe" form does so at once.

How it can mislead: fp32 sums over at most 1024 cells, 128 at a time for columns, then float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradscope.kernels.blocks import LN2, LOWEST, Blocks
from gradscope.kernels.cells import Cells
from gradscope.kernels.largest import Largest
from gradscope.kernels.strip import Sums

_LIFT = 32.0
_LARGEST_GAP = 62.0
#: fp32 sums down a column are cut into so many rows, since a product adds them one after the other.
_RUN = 128


def forward_strip(cells: Cells, scale: Tensor, strip: slice, *, top: int = 0, form: str = "shared") -> Sums:
    """The sums of one strip of rows; ``top`` > 0 also keeps each row's largest logits. ``form`` is one of ``strip.FORMS``."""
    blocks = Blocks(cells, scale, strip)
    found = _Running(blocks, top)
    for rows in blocks.rows:
        found.open(rows)
        queries = blocks.queries(rows)
        for columns in blocks.columns:
            x = blocks.logits(queries, rows, columns)
            found.look(x, columns)
            if form == "shared":
                found.shared(x, columns)
            else:
                found.safe(x, rows, columns)
        found.close()
    if form == "shared":
        found.check()
    return found.sums(scale)


class _Running:
    """What the blocks have said so far, logs in base 2."""

    def __init__(self, blocks: Blocks, top: int) -> None:
        image = blocks.cells.image
        count = len(blocks.cells)
        self._blocks, self._top = blocks, top
        self._columns = image.new_full((count,), -math.inf, dtype=torch.float64)
        self._hardest = image.new_full((count,), -math.inf)
        self._ceiling = image.new_full((len(blocks.columns),), -math.inf, dtype=torch.float64)  # U of each block column
        self._done: list[tuple[Tensor, Tensor, Tensor]] = []
        self._passed = 0

    def open(self, rows: slice) -> None:
        """A new block row begins."""
        size = rows.stop - rows.start
        self._rows = self._columns.new_full((size,), -math.inf)
        self._row_hardest = self._hardest.new_full((size,), -math.inf)
        self._best = Largest(self._top)

    def look(self, x: Tensor, columns: slice) -> None:
        """Maxima and the K largest, before x is overwritten."""
        self._row_max = self._best.add(x) if self._top else x.amax(dim=1)
        self._column_max = x.amax(dim=0)
        self._row_hardest = torch.maximum(self._row_hardest, self._row_max)
        self._hardest[columns] = torch.maximum(self._hardest[columns], self._column_max)

    def shared(self, x: Tensor, columns: slice) -> None:
        """Both directions from one exp."""
        shift = self._row_max.clamp_min(LOWEST) - _LIFT
        e = x.sub_(shift[:, None]).exp2_()
        self._rows = torch.logaddexp2(self._rows, e.sum(dim=1).double().log2() + shift.double())
        highest = shift.double().max()
        weights = (shift.double() - highest).exp2()
        self._add(columns, _weighted_sum(weights.to(e.dtype), e).log2() + highest)
        number = columns.start // (self._blocks.columns[0].stop)
        self._ceiling[number] = torch.logaddexp2(self._ceiling[number], weights.sum().log2() + highest + _LIFT)

    def safe(self, x: Tensor, rows: slice, columns: slice) -> None:
        """An exp for each direction."""
        shift = self._row_max.clamp_min(LOWEST)
        e = torch.sub(x, shift[:, None], out=self._blocks.buffer(1, rows, columns)).exp2_()
        self._rows = torch.logaddexp2(self._rows, e.sum(dim=1).double().log2() + shift.double())
        self._add(columns, _column_logs(x, self._column_max))

    def close(self) -> None:
        """The block row is complete."""
        best = self._best.found() if self._top else self._row_hardest[:, None]
        self._done.append((self._rows, self._row_hardest, best))

    def check(self) -> None:
        """Forms again the block columns that the shared shift may have got wrong."""
        for number, columns in enumerate(self._blocks.columns):
            passed = bool((self._ceiling[number] - self._columns[columns] <= _LARGEST_GAP).all())
            self._passed += passed
            if not passed:
                self._again(columns)

    def _again(self, columns: slice) -> None:
        self._columns[columns] = -math.inf
        for rows in self._blocks.rows:
            x = self._blocks.logits(self._blocks.queries(rows), rows, columns)
            self._add(columns, _column_logs(x, x.amax(dim=0)))

    def _add(self, columns: slice, logs: Tensor) -> None:
        self._columns[columns] = torch.logaddexp2(self._columns[columns], logs)

    def sums(self, scale: Tensor) -> Sums:
        """In natural logs."""
        rows, hardest, best = (torch.cat(parts) for parts in zip(*self._done, strict=True))
        to_cosine = LN2 / scale.double()
        return Sums(
            rows=rows * LN2,
            columns=self._columns * LN2,
            hardest_rows=hardest.double() * to_cosine,
            hardest_columns=self._hardest.double() * to_cosine,
            top=best.double() * LN2 if self._top else None,
            shared=torch.tensor(self._passed / len(self._blocks.columns)),
        )


def _weighted_sum(weights: Tensor, e: Tensor) -> Tensor:
    """sum_i weights_i e_ij in runs of rows, the runs added in float64: [m]."""
    runs = -(-len(weights) // _RUN)
    spread = weights.new_zeros(runs, runs * _RUN)
    spread.view(runs, runs, _RUN).diagonal().copy_(
        torch.nn.functional.pad(weights, (0, runs * _RUN - len(weights))).view(runs, _RUN).t()
    )
    return (spread[:, : len(weights)] @ e).double().sum(dim=0)


def _column_logs(x: Tensor, highest: Tensor) -> Tensor:
    """log2 of the column sums of 2^x, float64 [m]; x is overwritten."""
    shift = highest.clamp_min(LOWEST)
    return x.sub_(shift).exp2_().sum(dim=0).double().log2() + shift.double()
