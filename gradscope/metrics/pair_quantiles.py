"""Quantiles of the cosines of all pairs: the ceil(q M)-th smallest of M, to within a bin, or exactly by further passes.

How it can mislead: the exact ones are exact for the fp32 products, which are within 1e-6 of the cosines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from gradscope import distributed
from gradscope.metrics.pair_sweep import BINS, block_pairs

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BIN_WIDTH = 2.0 / BINS
_CELLS = 1 << 18  # one refinement pass: more cells than fp32 numbers in a 0.01 bin of |cosine| >= 0.5


def binned_quantiles(counts: Tensor) -> dict[float, float]:
    """Quantiles by linear interpolation inside the bin that holds the order statistic: right to within one bin width."""
    cumulative = np.cumsum(counts.cpu().numpy())
    total = int(cumulative[-1])
    found = {}
    for q in QUANTILES:
        rank = max(1, math.ceil(q * total))
        cell = int(np.searchsorted(cumulative, rank))
        before = int(cumulative[cell - 1]) if cell else 0
        found[q] = -1.0 + BIN_WIDTH * (cell + (rank - before - 0.5) / int(cumulative[cell] - before))
    return found


def refined_quantiles(unit: Tensor, counts: Tensor, block: int, *, part: tuple[int, int]) -> dict[float, float]:
    """The exact order statistic of the fp32 cosines, for each of QUANTILES.

    Each pass counts how many cosines lie below a range and in each of its cells (cells of equal numbers of fp32 numbers,
    through the integer key that sorts as the floats do), then narrows the range to the cell of the wanted rank: O(1) memory
    beside the block, one pass for |cosine| >= 0.5, at most two near zero. ``part``: (number of this
    process, number of processes); with several it is a collective.
    """
    total = int(counts.sum())
    ranks = {q: max(1, math.ceil(q * total)) for q in QUANTILES}
    cumulative = np.cumsum(counts.cpu().numpy())
    ranges = {}
    for q, rank in ranks.items():
        low = -1.0 + BIN_WIDTH * int(np.searchsorted(cumulative, rank))
        # Binning rounds, and the outer bins hold what rounding pushed past +-1: widen before the exact count.
        ends = torch.tensor([low - 1e-5, low + BIN_WIDTH + 1e-5], dtype=torch.float32)
        first, last = _sort_key(ends).tolist()
        ranges[q] = (first, last + 1)
    while any(stop - first > 1 for first, stop in ranges.values()):
        below, cells = _count_ranges(unit, ranges, block, part)
        ranges = {q: _narrow(ranges[q], ranks[q] - below[q], cells[q]) for q in ranges}
    return {q: float(_from_sort_key(torch.tensor(first, dtype=torch.int32))) for q, (first, _) in ranges.items()}


def _count_ranges(
    unit: Tensor, ranges: dict[float, tuple[int, int]], block: int, part: tuple[int, int]
) -> tuple[dict[float, int], dict[float, np.ndarray]]:
    below = torch.zeros(len(ranges), dtype=torch.int64, device=unit.device)
    cells = torch.zeros(len(ranges), _CELLS, dtype=torch.int64, device=unit.device)
    for cosine in _pair_cosines(unit, block, part):
        key = _sort_key(cosine)
        for k, (first, stop) in enumerate(ranges.values()):
            below[k] += (key < first).sum()
            inside = key[(key >= first) & (key < stop)].long() - first
            cells[k] += torch.bincount(inside // _cell_size((first, stop)), minlength=_CELLS)
    if part[1] > 1:
        below, cells = distributed.summed(below), distributed.summed(cells)
    return dict(zip(ranges, below.tolist(), strict=True)), dict(zip(ranges, cells.cpu().numpy(), strict=True))


def _pair_cosines(unit: Tensor, block: int, part: tuple[int, int]) -> Iterator[Tensor]:
    """The cosines of each block pair that is this process's, flat, every pair of rows once."""
    for i, j in islice(block_pairs(len(unit), block), part[0], None, part[1]):
        cosine = unit[i : i + block] @ unit[j : j + block].T
        yield cosine[torch.ones_like(cosine, dtype=torch.bool).triu_(1)] if i == j else cosine.flatten()


def _cell_size(span: tuple[int, int]) -> int:
    return max(1, math.ceil((span[1] - span[0]) / _CELLS))


def _narrow(span: tuple[int, int], rank: int, cells: np.ndarray) -> tuple[int, int]:
    assert 1 <= rank <= cells.sum(), "the order statistic lies inside its range"
    size = _cell_size(span)
    first = span[0] + int(np.searchsorted(np.cumsum(cells), rank)) * size
    return first, min(first + size, span[1])


def _sort_key(value: Tensor) -> Tensor:
    """int32 keys that sort as the fp32 values do."""
    bits = value.contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _from_sort_key(key: Tensor) -> Tensor:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)
