"""A strip of rows against all columns: the two passes that every kernel (torch here, Triton elsewhere) answers in the same way.

X = scale * q k^t, the logits of the negatives less a constant (``cells``); positive cells are -inf.
    forward     the log of the sum of exp(X) by row and by column of the strip, and the largest q.k
    backward    A = w_i exp(X_ij - R_i) + u_j exp(X_ij - C_j), never stored; A k by row, A^t v by column (v, not q: the margin
                has no gradient), and how many negatives' cells of A are exactly 0 in fp32

One process has one strip: all rows. Under torch.distributed each rank has its own; column sums are then partial sums over its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.kernels.cells import Cells

BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Of a strip of n rows: float64, -inf where there is no negative."""

    rows: Tensor  # [n] log of the sum over the columns of exp(X)
    columns: Tensor  # [N] log of the sum over the strip's rows
    hardest_rows: Tensor  # [n] largest q.k
    hardest_columns: Tensor  # [N]
    top: Tensor | None = None  # [n, K] the largest X of each row in falling order, -inf past the last negative; None: not asked for
    shared: Tensor | None = None  # [] share of the blocks that needed one exp per cell only


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the backward multiplies exp(X) by: w_i exp(-R_i) + u_j exp(-C_j)."""

    row_logs: Tensor  # [n] R, float64
    column_logs: Tensor  # [N] C, float64
    rows: Tensor  # [n] w, float64
    columns: Tensor  # [N] u, float64


@dataclass(frozen=True, kw_only=True)
class Products:
    """Of a strip of n rows, not multiplied by the scale."""

    rows: Tensor | None  # [n, D] A t: the first D columns of A k
    columns: Tensor | None  # [N, D] A^t v, the sum over the strip's rows
    along: Tensor | None  # [] float64, <A, q k^t> over the strip: formed as <A k, q>
    zeros: Tensor  # int64 [] negatives' cells of A that are exactly 0


def forward_strip(cells: Cells, scale: Tensor, strip: slice, *, top: int = 0, form: str = "shared") -> Sums:
    """``form``: "shared" (one exp per cell, where a check allows it) or "safe" (two)."""
    n = len(cells)
    rows, hard_r = [], []
    columns = cells.image.new_full((n,), -math.inf, dtype=torch.float64)
    hard_c = cells.image.new_full((n,), -math.inf)
    best = []
    for i in range(strip.start, strip.stop, BLOCK):
        block = slice(i, min(i + BLOCK, strip.stop))
        x = (scale.to(cells.image.dtype) * cells.queries(block)) @ cells.keys.T
        x = _masked(x, cells, block)
        rows.append(torch.logsumexp(x.double(), 1))
        columns = torch.logaddexp(columns, torch.logsumexp(x.double(), 0))
        hard_r.append(x.amax(1))
        hard_c = torch.maximum(hard_c, x.amax(0))
        best.append(x.topk(min(top, n), dim=1).values)
    s = scale.double()
    return Sums(
        rows=torch.cat(rows), columns=columns, hardest_rows=torch.cat(hard_r).double() / s, hardest_columns=hard_c.double() / s,
        top=torch.cat(best).double() if top else None, shared=torch.ones((), device=x.device),
    )  # fmt: skip


def backward_strip(
    cells: Cells, scale: Tensor, strip: slice, weights: Weights, *, form: str = "shared", rows: bool = True, columns: bool = True
) -> Products:
    """``rows``, ``columns``: which of the two products are wanted."""
    down = torch.zeros_like(cells.image)
    zeros = torch.zeros((), dtype=torch.int64, device=down.device)
    across = []
    for i in range(strip.start, strip.stop, BLOCK):
        block = slice(i, min(i + BLOCK, strip.stop))
        own = slice(block.start - strip.start, block.stop - strip.start)
        x = _masked((scale.to(cells.image.dtype) * cells.queries(block)) @ cells.keys.T, cells, block)
        a = weights.rows[own, None] * (x - weights.row_logs[own, None]).exp() + weights.columns * (x - weights.column_logs).exp()
        a = a.to(down.dtype)
        zeros += ((a == 0) & (x > -math.inf)).sum()
        across.append(a @ cells.keys)
        down.addmm_(a.T, cells.image[block])
    product = torch.cat(across)
    along = (product.double() * cells.queries(strip)).sum()
    return Products(rows=product[:, : cells.image.shape[1]], columns=down, along=along, zeros=zeros)


def _masked(x: Tensor, cells: Cells, block: slice) -> Tensor:
    index = torch.arange(len(cells), device=x.device)
    number = index if cells.groups is None else cells.groups
    return x.masked_fill(number[block, None] == number, -math.inf)
