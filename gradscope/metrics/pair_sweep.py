"""One pass over all pairs of N rows, in blocks: histogram, hardest neighbour and near neighbours, in O(N) memory.

Each pair i < j is multiplied once, in fp32; from a block come
    counts    the integer histogram of <t_i, t_j> over [-1, 1]
    best      h_i = max_{j != i} <t_i, t_j>, and the span of rows that holds it (the earliest on a tie), for rows and for columns
    near      how many neighbours are at ``NEAR`` or above
A maximum with its index costs more than the product itself, so the index is found afterwards, in the one span of rows known to hold it.
On a CPU each thread keeps a block from the product to the counts (``gradscope.tile_threads``), in place. Nothing here makes a GPU wait
for the host.

Over several processes the block pairs are dealt out in turn; counts add up, and of two hardest neighbours the larger wins, then the
earlier span: the answer is that of one process.

How it can mislead: fp32 rounds, so a cosine within 1e-6 of the edge of a bin may be counted in the next one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope import distributed
from gradscope.tile_threads import in_order

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What one block pair gave: O(block) numbers for its rows, and for its columns where they are other rows."""

    i: int
    j: int
    counts: Tensor  # int64 [BINS]
    hardest: tuple[tuple[Tensor, Tensor], ...]  # (cosine, number of the span that holds it), of the rows and of the columns
    near: tuple[Tensor, ...]  # int64, likewise; empty where there is none


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
            best=torch.full((n,), -math.inf, dtype=torch.float32, device=device),
            winner=torch.zeros(n, dtype=torch.int64, device=device),
            near=torch.zeros(n, dtype=torch.int64, device=device),
            memory=_Memory(min(block, n), device),
        )

    @contextmanager
    def seen(self, pairs: Iterable[tuple[int, int]]) -> Iterator[Iterator[Seen]]:
        """What each of the block pairs i <= j gives, in their order, to be taken by ``take``."""
        with in_order(self._look, pairs, self.unit.device) as found:
            yield found

    def take(self, seen: Seen) -> None:
        """Adds one block pair, each once, and those of one row of blocks from left to right."""
        self.counts += seen.counts
        for at, other, (best, part) in zip((seen.i, seen.j), (seen.j, seen.i), seen.hardest, strict=False):
            self._update(at, best, other + part * self.span)
        for at, near in zip((seen.i, seen.j), seen.near, strict=False):
            self.near[at : at + len(near)] += near

    def _update(self, at: int, best: Tensor, winner: Tensor) -> None:
        part = slice(at, at + len(best))
        self.winner[part] = torch.where(best > self.best[part], winner, self.winner[part])
        torch.maximum(self.best[part], best, out=self.best[part])

    def _look(self, pair: tuple[int, int]) -> Seen:
        """One block pair; several threads may look at a time."""
        i, j = pair
        rows, columns = self.unit[i : i + self.block], self.unit[j : j + self.block]
        cosine = torch.mm(rows, columns.T, out=self.memory.tile(len(rows), len(columns)))
        if i == j:
            cosine.fill_diagonal_(-math.inf)
        dims = (1,) if i == j else (1, 0)
        hardest = tuple(_hardest(cosine, self.span, dim) for dim in dims)
        near = _near(cosine, hardest[0][0], dims)
        return Seen(i=i, j=j, counts=self._histogram(cosine, same=i == j), hardest=hardest, near=near)

    def _histogram(self, cosine: Tensor, same: bool) -> Tensor:
        """int64 [BINS]; values a rounding error outside [-1, 1] go to the outer bins; in a block with itself a pair counts once.

        Takes the tile's memory for the cells.
        """
        torch.add(cosine.new_full((), BINS / 2), cosine, alpha=BINS / 2, out=cosine)
        if same:
            cosine.triu_(1)  # the others count in the first bin, and are taken off again
        found = _cell_counts(self.memory.cells(cosine))
        found[0] -= len(cosine) * (len(cosine) + 1) // 2 if same else 0
        found[BINS - 1] += found[BINS]
        return found[:BINS]

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
        spans = zip(starts.tolist(), order.split(sizes.tolist()), strict=True)
        jobs = [(start, some) for start, rows in spans for some in rows.split(self.block)]
        index = torch.empty_like(order)
        with in_order(self._hardest_of, jobs, self.unit.device) as found:
            for (_, rows), place in zip(jobs, found, strict=True):
                index[rows] = place
        return index

    def _hardest_of(self, job: tuple[int, Tensor]) -> Tensor:
        start, rows = job
        cosine = self.unit.index_select(0, rows) @ self.unit[start : start + self.span].T
        inside = torch.nonzero((rows >= start) & (rows < start + self.span))[:, 0]
        cosine[inside, rows[inside] - start] = -math.inf
        return start + cosine.argmax(1)


class _Memory(threading.local):
    """Room for one block in each thread; every block uses it again."""

    def __init__(self, block: int, device: torch.device) -> None:
        self._numbers = torch.empty(block * block + 1, dtype=torch.float32, device=device)

    def tile(self, rows: int, columns: int) -> Tensor:
        return self._numbers[: rows * columns].view(rows, columns)

    def cells(self, tile: Tensor) -> Tensor:
        """The tile's numbers as int32 in its own place, towards zero (a little below -1 is in the first bin), and one that is skipped
        where they are odd in number."""
        n = tile.numel()
        cells = self._numbers.view(torch.int32)[: n + n % 2]
        cells[:n].copy_(tile.view(-1))
        cells[n:] = _SKIPPED
        return cells


def _hardest(cosine: Tensor, span: int, dim: int) -> tuple[Tensor, Tensor]:
    """Largest along ``dim``, and the number of the span that holds it, the first on a tie."""
    size = cosine.shape[dim]
    whole = size // span * span
    best = cosine.narrow(dim, 0, whole).unflatten(dim, (whole // span, span)).amax(dim + 1)  # the spans stand along ``dim``
    if whole < size:
        best = torch.cat([best, cosine.narrow(dim, whole, size - whole).amax(dim, keepdim=True)], dim=dim)
    value, at = best.max(dim)
    return value, at


def _near(cosine: Tensor, best: Tensor, dims: Sequence[int]) -> tuple[Tensor, ...]:
    """How many are at ``NEAR`` or above, along each of ``dims``. A CPU looks only at rows with one; a GPU would have to wait."""
    if cosine.is_cuda:
        return tuple((cosine >= NEAR).sum(dim) for dim in dims)
    some = torch.nonzero(best >= NEAR)[:, 0]
    if len(some) == 0:
        return ()
    near = cosine[some].ge_(NEAR)  # 0 or 1 in fp32: faster than bool, to make and to add
    rows = torch.zeros_like(best, dtype=torch.int64).index_copy_(0, some, near.sum(1).long())
    return (rows, near.sum(0).long())[: len(dims)]


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
