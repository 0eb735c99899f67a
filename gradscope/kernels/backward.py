"""Backward pass over a strip: the products of A_ij = w_i exp(X_ij - R_i) + u_j exp(X_ij - C_j), block by block, A never stored.

In base 2, with hi and lo the largest and smallest of the R and C of a block and m = hi - 80:
    shared   A = 2^(x - m) (w_i 2^(m - R_i) + u_j 2^(m - C_j))          one exp per cell
    safe     A = w_i 2^(x - R_i) + u_j 2^(x - C_j)                      two
x is at most hi, so 2^(x - m) <= 2^80. What underflows there is below 2^-126, so below 2^(-206 + hi - lo) as a probability: where
hi - lo <= 57 that is under the smallest number of fp32, and nothing was lost that the safe form would have kept. The check is made
before the block is formed, from the logs alone. Both forms take the rounding of a shift to fp32 into the weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradscope.kernels.blocks import LN2, Blocks
from gradscope.kernels.cells import Cells
from gradscope.kernels.strip import Products, Weights, masked_cells

_LIFT = 80.0
_LARGEST_SPREAD = 57.0
#: Under a weight this small (2^-40) its product with 2^-80 leaves the range of fp32.
_SMALLEST_WEIGHT = 2.0**-40


def backward_strip(
    cells: Cells, scale: Tensor, strip: slice, weights: Weights, *, form: str = "shared", rows: bool = True, columns: bool = True
) -> Products:
    """``rows``, ``columns``: which products are wanted. ``form`` is one of ``strip.FORMS``."""
    blocks = Blocks(cells, scale, strip)
    sides = _Sides(weights, blocks, strip, form)
    image = cells.image
    across = image.new_empty(strip.stop - strip.start, image.shape[1]) if rows else None
    down = torch.zeros_like(image) if columns else None
    along = image.new_zeros((), dtype=torch.float64)
    filled = torch.zeros((), dtype=torch.int64, device=image.device)
    for number, block in enumerate(blocks.rows):
        queries = blocks.queries(block)
        product = torch.zeros_like(queries)
        for column_number, column in enumerate(blocks.columns):
            a = sides.cells(blocks.logits(queries, block, column), number, column_number)
            filled += sides.filled(a)
            if rows:
                product.addmm_(a, cells.keys[column])
            if down is not None:
                down[column].addmm_(a.t(), image[block])
        if across is not None:
            across[block.start - strip.start : block.stop - strip.start] = product[:, : image.shape[1]]
            along += product.mul_(cells.queries(block)).sum(dim=1).double().sum()
    # No fewer than none: a nan on a masked cell is counted as filled.
    zeros = ((strip.stop - strip.start) * len(cells) - masked_cells(cells, strip) - filled).clamp_(min=0)
    return Products(rows=across, columns=down, along=along if rows else None, zeros=zeros, shared=sides.share())


class _Sides:
    """The weights of rows and columns, and by block which form they allow."""

    def __init__(self, weights: Weights, blocks: Blocks, strip: slice, form: str) -> None:
        self._passed: list[bool] = []
        self._blocks, self._start, self._form = blocks, strip.start, form
        self._logs = (weights.row_logs / LN2, weights.column_logs / LN2)
        self._weights = (weights.rows, weights.columns)
        if form == "shared":
            own = [slice(block.start - strip.start, block.stop - strip.start) for block in blocks.rows]
            self._ranges = [_ranges(logs, spans) for logs, spans in zip(self._logs, (own, blocks.columns), strict=True)]
            sizes = torch.cat(self._weights).abs()
            self._heavy = not bool(((sizes > 0) & (sizes < _SMALLEST_WEIGHT)).any())
            self._positive = min(float(side.min()) for side in self._weights) > 0

    def cells(self, x: Tensor, row: int, column: int) -> Tensor:
        """x -> A of one block; x is overwritten."""
        rows, columns = self._blocks.rows[row], self._blocks.columns[column]
        own = slice(rows.start - self._start, rows.stop - self._start)
        logs = self._logs[0][own], self._logs[1][columns]
        weights = self._weights[0][own], self._weights[1][columns]
        spare = self._blocks.buffer(1, rows, columns)
        if self._form == "safe":
            return _safe(x, logs, weights, spare)
        bounds = (*self._ranges[0][row], *self._ranges[1][column])
        passed = self._heavy and math.isfinite(sum(bounds)) and max(bounds) - min(bounds) <= _LARGEST_SPREAD
        self._passed.append(passed)
        return _shared(x, logs, weights, spare, max(bounds) - _LIFT) if passed else _safe(x, logs, weights, spare)

    def filled(self, a: Tensor) -> Tensor | int:
        """How many cells of A are not 0. Of positive ones the smallest says it first, in a quarter of the time of counting."""
        if self._form == "shared" and self._positive and bool(a.amin() > 0):
            return a.numel()
        return torch.count_nonzero(a)

    def share(self) -> Tensor:
        """[] share of the blocks that were shared so far."""
        return torch.tensor(sum(self._passed) / max(len(self._passed), 1))


def _shared(x: Tensor, logs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], spare: Tensor, shift: float) -> Tensor:
    shift = float(torch.tensor(shift, dtype=x.dtype))  # as it will be subtracted
    a, b = ((weight * (shift - log).exp2()).to(x.dtype) for weight, log in zip(weights, logs, strict=True))
    return x.sub_(shift).exp2_().mul_(torch.add(a[:, None], b, out=spare))


def _safe(x: Tensor, logs: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], spare: Tensor) -> Tensor:
    rounded = [log.to(x.dtype) for log in logs]
    a, b = ((weight * (near - log).exp2()).to(x.dtype) for weight, near, log in zip(weights, rounded, logs, strict=True))
    e = torch.sub(x, rounded[0][:, None], out=spare).exp2_().mul_(a[:, None])
    return e.addcmul_(x.sub_(rounded[1]).exp2_(), b)


def _ranges(logs: Tensor, spans: list[slice]) -> list[tuple[float, float]]:
    """(largest, smallest) by block; nan where a log is."""
    return [(float(logs[span].max()), float(logs[span].min())) for span in spans]
