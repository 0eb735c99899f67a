"""Blocks of the product: rows x columns, formed in one buffer that stays in the cache, in base 2.

    x = (scale log2(e)) q k^t,  -inf on positive cells
Base 2, because torch's exp2 on the CPU takes a quarter of the time of its exp (2026-11-30, torch 2.14.1, AVX-512: .08 against .31 ns
a cell) and is as accurate. The factor goes into q in float64, so its rounding is that of single numbers, not of all logits at once.
How it can mislead: the buffer is used again by the next block; whoever wants to keep numbers must copy them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradscope.kernels.cells import Cells

#: Rows and columns of a block: 4 MB in fp32, inner products long enough for the matrix library.
BLOCK = 1024
LN2 = math.log(2.0)
#: Takes the place of -inf in shifts, so that -inf - shift is no nan.
LOWEST = -1e30


class Blocks:
    """Base-2 logits of the negatives, block by block."""

    def __init__(self, cells: Cells, scale: Tensor, strip: slice) -> None:
        self.cells = cells
        self.rows = list(spans(strip.start, strip.stop, BLOCK))
        self.columns = list(spans(0, len(cells), BLOCK))
        self._factor = scale.double() / LN2
        self._buffers: list[Tensor] = []
        self._size = min(BLOCK, strip.stop - strip.start) * min(BLOCK, len(cells))

    def queries(self, rows: slice) -> Tensor:
        """The scaled left side of some rows: [n, E]."""
        q = self.cells.queries(rows)
        return (q.double() * self._factor).to(q.dtype)

    def logits(self, queries: Tensor, rows: slice, columns: slice) -> Tensor:
        """x [n, m] of a block, in the first buffer."""
        x = self.buffer(0, rows, columns)
        torch.mm(queries, self.cells.keys[columns].t(), out=x)
        groups = self.cells.groups
        offset = rows.start - columns.start
        if groups is not None:
            x.masked_fill_(groups[rows, None] == groups[columns], -math.inf)
        elif -x.shape[0] < offset < x.shape[1]:
            x.diagonal(offset).fill_(-math.inf)
        return x

    def buffer(self, number: int, rows: slice, columns: slice) -> Tensor:
        """One of the buffers, made when first asked for, cut to the shape of a block."""
        while len(self._buffers) <= number:
            self._buffers.append(self.cells.image.new_empty(self._size))
        n, m = rows.stop - rows.start, columns.stop - columns.start
        return self._buffers[number][: n * m].view(n, m)


def spans(start: int, stop: int, block: int) -> Iterator[slice]:
    return (slice(i, min(i + block, stop)) for i in range(start, stop, block))
