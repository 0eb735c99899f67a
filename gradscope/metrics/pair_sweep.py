"""One pass over all pairs of N rows, in blocks: histogram, hardest neighbour and near neighbours, in O(N) memory.

Each pair i < j is multiplied once, in fp32; from a block come
    counts    the integer histogram of <t_i, t_j> over [-1, 1]
    best      h_i = max_{j != i} <t_i, t_j>, and the span of rows that holds it (the earliest on a tie), for rows and for columns
    near      how many neighbours are at ``NEAR`` or above
A maximum with its index costs more than the product itself, so the index is found afterwards, in the one span of rows known to hold it.
Nothing here makes a GPU wait for the host.

Over several processes the block pairs are dealt out in turn; counts add up, and of two hardest neighbours the larger wins, then the
earlier span: the answer is that of one process.

How it can mislead: fp32 rounds, so a cosine within 1e-6 of the edge of a bin may be counted in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope import distributed

BINS = 200  # below 256, so that two cells make one small number
NEAR = 0.9  # "a near neighbour"

_CELLS = 256  # the bins, one for what rounding pushed past 1, and the last to fill up with
_SKIPPED = _CELLS - 1


def default_block(device: torch.device) -> int:
    """Rows per block: on a CPU 4 MB of fp32, which stay in cache; a GPU needs more work at a time."""
    return 8192 if device.type == "cuda" else 1024


def block_pairs(n: int, block: int) -> Iterator[tuple[int, int]]:
    """(first row, first column) of every block of the upper triangle, diagonal blocks included."""
    for i in range(0, n, block):
        for j in range(i, n, block):
            yield i, j


def number_of_pairs(n: int, block: int) -> int:
    """How many ``block_pairs`` gives."""
    blocks = math.ceil(n / block)
    return blocks * (blocks + 1) // 2


@dataclass(kw_only=True, eq=False)
class Sweep:
    """What the block pairs seen so far gave."""

    unit: Tensor  # float32 [N, D]
    block: int
    counts: Tensor  # int64 [BINS]
    best: Tensor  # float32 [N], hardest cosine so far
    winner: Tensor  # int64 [N], first row of the span that holds it
    near: Tensor  # int64 [N]
    memory: _Memory

    @property
    def span(self) -> int:
        """Rows among which the hardest neighbour is known to be: a part of a block, so that little is multiplied again."""
        return max(1, self.block // 4)

    @classmethod
    def of(cls, unit: Tensor, block: int) -> Sweep:
        """Nothing seen yet."""
        n, device = len(unit), unit.device
        return cls(
            unit=unit,
            block=block,
            counts=torch.zeros(BINS, dtype=torch.int64, device=device),
            best=torch.full((n,), -math.inf, device=device),
            winner=torch.zeros(n, dtype=torch.int64, device=device),
            near=torch.zeros(n, dtype=torch.int64, device=device),
            memory=_Memory(min(block, n), device),
        )

    def add(self, i: int, j: int) -> None:
        """One block pair, i <= j, each once, and those of one row of blocks from left to right."""
        rows, columns = self.unit[i : i + self.block], self.unit[j : j + self.block]
        cosine = torch.mm(rows, columns.T, out=self.memory.product(len(rows), len(columns)))
        self.counts += self._histogram(cosine, same=i == j)
        if i == j:
            cosine.fill_diagonal_(-math.inf)
        best, part = _hardest(cosine.split(self.span, dim=1), dim=1)
        self._update(i, best, j + part * self.span)
        if i != j:
            other, part = _hardest(cosine.split(self.span), dim=0)
            self._update(j, other, i + part * self.span)
        if cosine.is_cuda or bool(best.max() >= NEAR):
            self._add_near(i, j, cosine)

    def _histogram(self, cosine: Tensor, same: bool) -> Tensor:
        """int64 [BINS]; values a rounding error outside [-1, 1] go to the outer bins; in a block with itself a pair counts once."""
        scaled = torch.add(cosine.new_tensor(BINS / 2), cosine, alpha=BINS / 2, out=self.memory.scratch(*cosine.shape))
        if same:
            scaled.triu_(1)  # the others count in the first bin, and are taken off again
        self.memory.cells(*cosine.shape).copy_(scaled)  # towards zero, so that a little below -1 is in the first bin
        found = _cell_counts(self.memory.cells_in_line(cosine.numel()))
        found[0] -= len(cosine) * (len(cosine) + 1) // 2 if same else 0
        found[BINS - 1] += found[BINS]
        return found[:BINS]

    def _update(self, at: int, best: Tensor, winner: Tensor) -> None:
        part = slice(at, at + len(best))
        self.winner[part] = torch.where(best > self.best[part], winner, self.winner[part])
        torch.maximum(self.best[part], best, out=self.best[part])

    def _add_near(self, i: int, j: int, cosine: Tensor) -> None:
        near = torch.ge(cosine, NEAR, out=self.memory.scratch(*cosine.shape))  # 0 or 1 in fp32: faster than bool, to make and to add
        self.near[i : i + len(near)] += near.sum(1).long()
        if i != j:
            self.near[j : j + near.shape[1]] += near.sum(0).long()

    def merge(self) -> None:
        """Join what the processes of torch.distributed saw; a collective, after which each holds the whole."""
        if distributed.world() == 1:
            return
        best = distributed.largest(self.best)
        mine = torch.where(self.best == best, self.winner, len(self.unit))
        self.winner = -distributed.largest(-mine)
        self.best = best
        self.counts, self.near = distributed.summed(self.counts), distributed.summed(self.near)

    def hardest_index(self) -> Tensor:
        """int64 [N]: each row's hardest neighbour, the first on a tie, from the span known to hold it."""
        order = self.winner.argsort(stable=True)
        starts, sizes = self.winner[order].unique_consecutive(return_counts=True)
        index = torch.empty_like(order)
        for start, rows in zip(starts.tolist(), order.split(sizes.tolist()), strict=True):
            for some in rows.split(self.block):
                index[some] = self._hardest_of(some, start)
        return index

    def _hardest_of(self, rows: Tensor, start: int) -> Tensor:
        cosine = self.unit[rows] @ self.unit[start : start + self.span].T
        inside = torch.nonzero((rows >= start) & (rows < start + self.span))[:, 0]
        cosine[inside, rows[inside] - start] = -math.inf
        return start + cosine.argmax(1)


class _Memory:
    """Room for one block in each form it takes; every block uses it again."""

    def __init__(self, block: int, device: torch.device) -> None:
        self._numbers = torch.empty(2, block * block, device=device)
        self._cells = torch.empty(block * block + 1, dtype=torch.int32, device=device)

    def product(self, rows: int, columns: int) -> Tensor:
        return self._numbers[0, : rows * columns].view(rows, columns)

    def scratch(self, rows: int, columns: int) -> Tensor:
        return self._numbers[1, : rows * columns].view(rows, columns)

    def cells(self, rows: int, columns: int) -> Tensor:
        return self._cells[: rows * columns].view(rows, columns)

    def cells_in_line(self, n: int) -> Tensor:
        """The first n cells, and one that is skipped where n is odd."""
        self._cells[n : n + n % 2] = _SKIPPED
        return self._cells[: n + n % 2]


def _hardest(parts: Sequence[Tensor], dim: int) -> tuple[Tensor, Tensor]:
    """Largest along ``dim`` over all parts, and the number of the part that holds it."""
    best = torch.stack([part.amax(dim) for part in parts])  # [parts, rows]
    value, at = best.max(0)
    return value, at


def _cell_counts(cells: Tensor) -> Tensor:
    """int64 [256] of an even number of int32 cells, each 0 ... 255.

    On a CPU two cells are looked up at once: one counter that is hit again and again has to wait for itself, which a narrow cone, with
    all its cosines in a few bins, would make the rule. On a GPU bincount waits for the host; histc counts in the type it is given.
    """
    if cells.is_cuda:
        return torch.histc(cells, bins=_CELLS, min=0, max=_CELLS).long()
    first, second = cells.view(2, -1)
    both = torch.bincount(torch.add(first, second, alpha=_CELLS, out=first), minlength=_CELLS**2).view(_CELLS, _CELLS)
    return both.sum(0) + both.sum(1)
