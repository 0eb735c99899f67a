"""Caption geometry: how close the captions of a data set are to each other, over every pair, in O(N) memory.

For unit rows t_1 ... t_N (the caption embeddings) and all N(N-1)/2 pairs i < j:
    mean      (|sum_i t_i|^2 - sum_i |t_i|^2) / (N(N-1))      closed form in float64, no pair loop
    hardest   h_i = max_{j != i} <t_i, t_j>                    value and index, self never counted
    counts    integer histogram of <t_i, t_j> over [-1, 1]
Source: HN-CLIP, Figure 1 and Figure A6 (arXiv 2608.18521).

How it can mislead: the numbers belong to the ENCODER as much as to the captions (another encoder, another cone); a truncated
caption is compared by its beginning only; an exact duplicate has a hardest neighbour of 1 and is not a hard negative but a
false one. h_i grows with N, so hardest means of data sets of different size are not comparable: compare them at one batch
width (`gradscope.metrics.batch_hardness`).
How to read it: the distance between the mean and 1 is what the easy negatives leave; the distance between the hardest and 1
is what decides R@1.

Accuracy: pairs are multiplied once, in fp32 blocks, and binned there, so a cosine within 1e-6 of a bin edge may land in the
neighbouring bin (2026-11-30, 5,100 sentence embeddings of width 384: 42 of 13.0 M pairs did). The mean, the hardest cosines
and the most similar pairs are taken again in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BINS = 200  # at most 256: cells are counted through uint8, which is twice as fast as int64
BIN_WIDTH = 2.0 / BINS
BLOCK = 1024  # a 4 MB fp32 block stays in cache
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
THRESHOLDS = (0.8, 0.9, 0.95)
NEAR = 0.9  # "a near neighbour" in the width curve
_CELLS = 1 << 18  # one refinement pass: more cells than fp32 numbers in a 0.01 bin of |cosine| >= 0.5

_FP32_ERROR = 3e-6  # rounding of fp32 sums stays below 1e-6 at usual widths; TF32 and bf16 are off by 1e-4 and more

Progress = Callable[[int, int], None]  # (blocks done, blocks in all)


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """The geometry of N rows. Arrays have one entry per GIVEN row; an excluded row has index -1, cosine nan, count 0."""

    n: int  # finite rows, the N of all formulas
    excluded: tuple[int, ...]  # given rows left out because they hold a non-finite number
    mean: float
    hardest_mean: float
    counts: np.ndarray  # int64 [BINS]; sums to n(n-1)/2
    edges: np.ndarray  # float64 [BINS + 1]
    quantiles: dict[float, float]  # of all pairs: the ceil(q M)-th smallest of M cosines
    quantile_width: float  # a quantile is right to within this; 0 after exact refinement
    hardest_quantiles: dict[float, float]  # exact, over rows
    pair_shares: dict[float, float]  # share of pairs with cosine >= key, by bins
    hardest_shares: dict[float, float]  # share of rows whose hardest neighbour is >= key
    hardest: np.ndarray  # float64 [rows given]
    hardest_index: np.ndarray  # int64 [rows given]
    near_counts: np.ndarray  # int64 [rows given]: neighbours with cosine >= NEAR
    top_pairs: tuple[tuple[int, int, float], ...]  # (i, j, cosine), most similar first, i < j
    matmul_error: float  # largest fp32 block error against float64 seen in the check before the run

    @property
    def pairs(self) -> int:
        return self.n * (self.n - 1) // 2


def caption_geometry(
    rows: Tensor, *, exact_quantiles: bool = False, top: int = 20, block: int = BLOCK, progress: Progress | None = None
) -> Geometry:
    """Geometry of unit ``rows`` [N, D].

    Args:
        rows: unit rows; rows with a non-finite entry are counted, reported and left out.
        exact_quantiles: further passes over all pairs replace the binned quantiles by exact order statistics of the cosines.
        top: how many of the most similar pairs to keep.
        block: rows per block; results do not depend on it beyond fp32 rounding.
        progress: called with (blocks done, blocks in all).

    Raises:
        ValueError: fewer than two finite rows, a wrong shape, or rows that are not unit.
    """
    keep = _finite_unit_rows(rows)
    unit = rows.detach()[keep].float().contiguous() if len(keep) < len(rows) else rows.detach().float().contiguous()
    with _true_fp32(unit) as error:
        sweep = _Sweep.over(unit, top=top, block=block, progress=progress)
        index = _hardest_index(unit, sweep.winner, block)
        quantiles = _refined_quantiles(unit, sweep.counts, block) if exact_quantiles else _binned_quantiles(sweep.counts)
    hardest = _pair_cosines(unit, torch.arange(len(unit), device=unit.device), index)
    kept = keep.cpu().numpy()
    values = hardest.cpu().numpy()
    total = len(unit) * (len(unit) - 1) // 2
    counts = sweep.counts.cpu().numpy()
    assert counts.sum() == total, "every pair is counted exactly once"
    return Geometry(
        n=len(unit),
        excluded=tuple(int(i) for i in np.setdiff1d(np.arange(len(rows)), kept)),
        mean=mean_cosine(unit, block=block),
        hardest_mean=float(values.mean()),
        counts=counts,
        edges=(np.arange(BINS + 1) - BINS // 2) / (BINS // 2),
        quantiles=quantiles,
        quantile_width=0.0 if exact_quantiles else BIN_WIDTH,
        hardest_quantiles={q: float(np.quantile(values, q, method="inverted_cdf")) for q in QUANTILES},
        pair_shares={t: float(counts[_bin_of(t) :].sum() / total) for t in THRESHOLDS},
        hardest_shares={t: float((values >= t).mean()) for t in THRESHOLDS},
        hardest=_spread(values, kept, len(rows), np.nan),
        hardest_index=_spread(kept[index.cpu().numpy()], kept, len(rows), -1),
        near_counts=_spread(sweep.near.cpu().numpy(), kept, len(rows), 0),
        top_pairs=_top_pairs(unit, sweep.pairs, kept),
        matmul_error=error,
    )


def mean_cosine(rows: Tensor, *, block: int = BLOCK) -> float:
    """Mean cosine over all pairs i < j of ``rows`` [N, D], exact in float64 by the closed form; nan for one row."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)  # [D]
    squares = 0.0
    for part in rows.split(block):
        wide = part.double()
        total += wide.sum(0)
        squares += float(wide.square().sum())
    n = len(rows)
    return (float(total.square().sum()) - squares) / (n * (n - 1)) if n > 1 else math.nan


def estimate(rows: Tensor, *, block: int = BLOCK) -> tuple[float, int]:
    """(seconds, extra bytes) of one pass over all pairs, from timing one block pair; the rows themselves are not counted."""
    blocks = math.ceil(len(rows) / block)
    first, last = rows[:block].float(), rows[-block:].float()
    _bin_counts(first[:64] @ last.T)  # the first call pays for thread start-up
    start = time.perf_counter()
    cosine = first @ last.T
    _bin_counts(cosine)
    cosine.amax(0), cosine.amax(1)
    if rows.is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) * blocks * (blocks + 1) / 2
    return seconds, 48 * len(rows) + 4 * 4 * min(block, len(rows)) ** 2


@dataclass(kw_only=True)
class _Sweep:
    """What one pass over all block pairs gathers; O(N) memory."""

    counts: Tensor  # int64 [BINS]
    best: Tensor  # float32 [N], hardest fp32 cosine so far
    winner: Tensor  # int64 [N], start of the block that holds it
    near: Tensor  # int64 [N]
    pairs: tuple[Tensor, Tensor, Tensor]  # cosine [K], i [K], j [K]

    @classmethod
    def over(cls, unit: Tensor, *, top: int, block: int, progress: Progress | None) -> _Sweep:
        n, device = len(unit), unit.device
        none = torch.zeros(0, dtype=torch.int64, device=device)
        sweep = cls(
            counts=torch.zeros(BINS, dtype=torch.int64, device=device),
            best=torch.full((n,), -math.inf, device=device),
            winner=torch.zeros(n, dtype=torch.int64, device=device),
            near=torch.zeros(n, dtype=torch.int64, device=device),
            pairs=(torch.zeros(0, device=device), none, none),
        )
        blocks = math.ceil(n / block)
        for done, (i, j, cosine) in enumerate(_block_pairs(unit, block), start=1):
            sweep._add(i, j, cosine, top)
            if progress is not None:
                progress(done, blocks * (blocks + 1) // 2)
        return sweep

    def _add(self, i: int, j: int, cosine: Tensor, top: int) -> None:
        """One block [rows from i, columns from j], i <= j; its self pairs already hold -inf."""
        self.counts += _bin_counts(_each_pair_once(cosine) if i == j else cosine)
        row_best = cosine.amax(1)
        self._update(i, j, cosine, row_best, dim=1)
        if i != j:
            self._update(j, i, cosine, cosine.amax(0), dim=0)
        self._collect(i, j, cosine, row_best, top)

    def _update(self, at: int, other: int, cosine: Tensor, best: Tensor, dim: int) -> None:
        part = slice(at, at + len(best))
        better = best > self.best[part]  # strict: the earliest block wins a tie
        self.best[part] = torch.where(better, best, self.best[part])
        self.winner[part] = torch.where(better, other, self.winner[part])
        if bool((best >= NEAR).any()):
            self.near[part] += (cosine >= NEAR).sum(dim)

    def _collect(self, i: int, j: int, cosine: Tensor, row_best: Tensor, top: int) -> None:
        """Keep the ``top`` most similar pairs: only rows that can still enter are looked at."""
        value, left, right = self.pairs
        floor = float(value.min()) if len(value) >= top else -math.inf
        rows = torch.nonzero(row_best > floor).flatten() if top else row_best.new_zeros(0, dtype=torch.int64)
        if len(rows) == 0:
            return
        some = cosine[rows]
        if i == j:
            some = some.masked_fill(rows[:, None] >= torch.arange(some.shape[1], device=some.device), -math.inf)
        found, at = some.flatten().topk(min(top, some.numel()))
        real = torch.isfinite(found)
        found, at = found[real], at[real]
        value = torch.cat([value, found])
        left = torch.cat([left, i + rows[at // some.shape[1]]])
        right = torch.cat([right, j + at % some.shape[1]])
        order = value.argsort(descending=True, stable=True)[:top]
        self.pairs = (value[order], left[order], right[order])


def _block_pairs(unit: Tensor, block: int) -> Iterator[tuple[int, int, Tensor]]:
    """(i, j, cosine [b, c]) for the block upper triangle; the diagonal of a diagonal block is -inf."""
    for i in range(0, len(unit), block):
        for j in range(i, len(unit), block):
            cosine = unit[i : i + block] @ unit[j : j + block].T
            if i == j:
                cosine.fill_diagonal_(-math.inf)
            yield i, j, cosine


def _each_pair_once(cosine: Tensor) -> Tensor:
    """The strict upper triangle of a square block, flat."""
    mask = torch.ones(cosine.shape, dtype=torch.bool, device=cosine.device).triu_(1)
    return cosine[mask]


def _bin_counts(cosine: Tensor) -> Tensor:
    """Integer histogram [BINS]; values a rounding error outside [-1, 1] go to the outer bins."""
    cell = (cosine + 1.0).mul_(BINS / 2).clamp_(0, BINS - 1).to(torch.uint8)
    return torch.bincount(cell.flatten(), minlength=BINS)


def _bin_of(threshold: float) -> int:
    return round((threshold + 1.0) / BIN_WIDTH)


def _hardest_index(unit: Tensor, winner: Tensor, block: int) -> Tensor:
    """Index [N] of each row's hardest neighbour: one strip per row, against the block known to hold it.

    The maximum with indices inside the main pass would cost more than the multiplication itself.
    """
    index = torch.zeros(len(unit), dtype=torch.int64, device=unit.device)
    for start in range(0, len(unit), block):
        for rows in torch.nonzero(winner == start).flatten().split(block):
            cosine = unit[rows] @ unit[start : start + block].T
            inside = (rows >= start) & (rows < start + block)
            cosine[inside, rows[inside] - start] = -math.inf
            index[rows] = start + cosine.argmax(1)
    return index


def _pair_cosines(unit: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """float64 inner products of the paired rows."""
    parts = [(unit[a].double() * unit[b].double()).sum(1) for a, b in zip(left.split(BLOCK), right.split(BLOCK), strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _top_pairs(unit: Tensor, pairs: tuple[Tensor, Tensor, Tensor], kept: np.ndarray) -> tuple[tuple[int, int, float], ...]:
    _, left, right = pairs
    cosine = _pair_cosines(unit, left, right)
    found = [(int(kept[a]), int(kept[b]), c) for a, b, c in zip(left.tolist(), right.tolist(), cosine.tolist(), strict=True)]
    return tuple(sorted(found, key=lambda pair: (-pair[2], pair[0], pair[1])))


def _binned_quantiles(counts: Tensor) -> dict[float, float]:
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


def _refined_quantiles(unit: Tensor, counts: Tensor, block: int) -> dict[float, float]:
    """The exact order statistic of the fp32 cosines, for each of QUANTILES.

    Each pass counts how many cosines lie below a range and in each of its cells (cells of equal numbers of fp32 numbers,
    through the integer key that sorts as the floats do), then narrows the range to the cell of the wanted rank: O(1) memory
    beside the block, one pass for |cosine| >= 0.5, at most two near zero.
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
        below, cells = _count_ranges(unit, ranges, block)
        ranges = {q: _narrow(ranges[q], ranks[q] - below[q], cells[q]) for q in ranges}
    return {q: float(_from_sort_key(torch.tensor(first, dtype=torch.int32))) for q, (first, _) in ranges.items()}


def _cell_size(span: tuple[int, int]) -> int:
    return max(1, math.ceil((span[1] - span[0]) / _CELLS))


def _count_ranges(unit: Tensor, ranges: dict[float, tuple[int, int]], block: int) -> tuple[dict[float, int], dict[float, np.ndarray]]:
    below = dict.fromkeys(ranges, 0)
    cells = {q: torch.zeros(_CELLS, dtype=torch.int64, device=unit.device) for q in ranges}
    for i, j, cosine in _block_pairs(unit, block):
        key = _sort_key(_each_pair_once(cosine) if i == j else cosine.flatten())
        for q, (first, stop) in ranges.items():
            below[q] += int((key < first).sum())
            inside = key[(key >= first) & (key < stop)].long() - first
            cells[q] += torch.bincount(inside // _cell_size((first, stop)), minlength=_CELLS)
    return below, {q: count.cpu().numpy() for q, count in cells.items()}


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


@contextmanager
def _true_fp32(unit: Tensor) -> Iterator[float]:
    """fp32 multiplication by the fastest setting that IS fp32 on this machine; yields its largest error against float64.

    'medium' is allowed to round to bf16, but on processors without bf16 tiles it selects a kernel that is true fp32 and up
    to twice as fast. So it is tried on a sample of these rows, and kept only if it agrees with float64.
    """
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("medium", "highest"):
            torch.set_float32_matmul_precision(setting)
            error = _matmul_error(unit)
            if error < _FP32_ERROR:
                break
        yield error
    finally:
        torch.set_float32_matmul_precision(before)


def _matmul_error(unit: Tensor) -> float:
    some = unit[:BLOCK]  # the shape of the real blocks: the kernel is chosen by shape
    return float(((some @ some.T).double() - some.double() @ some.double().T).abs().max())


def _finite_unit_rows(rows: Tensor) -> Tensor:
    """Indices of the finite rows, which must be unit."""
    if rows.ndim != 2:
        raise ValueError(f"caption geometry needs a matrix of rows [N, D], got shape {list(rows.shape)}.")
    norms = torch.cat([part.detach().double().norm(dim=1) for part in rows.split(BLOCK)]) if len(rows) else rows.new_zeros(0)
    keep = torch.nonzero(torch.isfinite(norms)).flatten()
    if len(keep) < 2:
        raise ValueError(
            f"caption geometry needs at least two rows without nan or inf, got {len(keep)} of {len(rows)}; "
            "give more captions, or look for the cause of the non-finite embeddings."
        )
    off = float((norms[keep] - 1.0).abs().max())
    if off > 1e-3:
        raise ValueError(f"caption geometry needs unit rows, but a norm is off by {off:.3g}; divide each row by its norm.")
    return keep


def _spread(values: np.ndarray, kept: np.ndarray, n: int, missing: float) -> np.ndarray:
    """Values of the kept rows at their given places."""
    full = np.full(n, missing, dtype=values.dtype)
    full[kept] = values
    return full
