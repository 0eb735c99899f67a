"""A strip of rows against all columns: the two passes that every kernel answers in the same way (torch here, Triton on a GPU).

X = scale * q k^t, the logits of the negatives less a constant (``cells``); positive cells are -inf.
    forward_strip    the log of the sum of exp(X) by row and by column of the strip, and the largest q.k
    backward_strip   A_ij = w_i exp(X_ij - R_i) + u_j exp(X_ij - C_j), never stored: A t by row, A^t v by column (v, not q: the margin
                     has no gradient), <A, q k^t>, and how many negatives' cells of A are exactly 0 in fp32

One process has one strip: all rows. Under torch.distributed each rank has its own; what is by column is then a partial sum.
All logs here are natural. How it can mislead: nothing here knows the positives; ``stream`` adds their part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.kernels.cells import Cells

#: "shared": one exp per cell serves both directions wherever a check allows it; "safe": each direction has its own.
FORMS = ("shared", "safe")


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
    """Of a strip of n rows, not multiplied by the scale; None where it was not wanted."""

    rows: Tensor | None  # [n, D] A t: the first D columns of A k
    columns: Tensor | None  # [N, D] A^t v, the sum over the strip's rows
    along: Tensor | None  # [] float64, <A, q k^t> over the strip, formed as <A k, q>; comes with ``rows``
    zeros: Tensor  # int64 [] negatives' cells of A that are exactly 0
    shared: Tensor | None = None  # [] as in ``Sums``


def masked_cells(cells: Cells, strip: slice) -> Tensor:
    """How many cells of the strip are no negatives: int64 []."""
    if cells.groups is None:
        return torch.full((), strip.stop - strip.start, dtype=torch.int64, device=cells.image.device)
    sizes = torch.zeros_like(cells.groups).index_add_(0, cells.groups, torch.ones_like(cells.groups))
    return sizes[cells.groups[strip]].sum()
