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

Accuracy: pairs are multiplied once, in fp32 blocks (`gradscope.metrics.pair_sweep`), and binned there, so a cosine within 1e-6 of a bin
edge may land in the neighbouring bin (2026-11-30, 5,100 sentence embeddings of width 384: 42 of 13.0 M pairs did). The mean, the
hardest cosines and the most similar pairs are taken again in float64.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from gradscope.metrics.long_sweep import Course, Progress, run
from gradscope.metrics.pair_quantiles import BIN_WIDTH, QUANTILES, binned_quantiles, refined_quantiles
from gradscope.metrics.pair_sweep import BINS, NEAR, Sweep, block_pairs, default_block, number_of_pairs
from gradscope.products import Shape, fast_fp32
from gradscope.tile_threads import in_order, workers

__all__ = ["BINS", "BIN_WIDTH", "NEAR", "QUANTILES", "Course", "Geometry", "Progress", "caption_geometry", "estimate", "mean_cosine"]

THRESHOLDS = (0.8, 0.9, 0.95)
_STRIP = 128  # rows taken to float64 at a time: they stay in cache
_TIMED_PAIRS = 8
_SAME = 1e-5  # cosines of equal fp32 rows are within this of 1


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
    repeated: int  # finite rows that equal an earlier one in every number
    matmul_error: float  # largest error of fp32 products against float64 in the trial before the run
    resumed: int  # block pairs taken over from an earlier run that was stopped

    @property
    def pairs(self) -> int:
        return self.n * (self.n - 1) // 2


def caption_geometry(
    rows: Tensor, *, exact_quantiles: bool = False, top: int = 20, block: int | None = None, course: Course | None = None
) -> Geometry:
    """Geometry of unit ``rows`` [N, D].

    Args:
        rows: unit rows, taken as fp32 (wider ones are rounded); those with a non-finite entry are counted, reported and left out.
        exact_quantiles: further passes over all pairs replace the binned quantiles by exact order statistics of the cosines.
        top: how many of the most similar pairs to keep.
        block: rows per block (default: 1024 on a CPU, 8192 on a GPU); results do not depend on it beyond fp32 rounding.
        course: progress, processes, and where the state of an unfinished run is kept.

    Raises:
        ValueError: fewer than two finite rows, a wrong shape, rows that are not unit, or a saved state that cannot be read.
    """
    keep = _finite_unit_rows(rows)
    unit = _kept(rows, keep)
    block, course = block or default_block(rows.device), course or Course()
    with fast_fp32(unit.device, *_shapes(unit, block)) as products:
        sweep = Sweep.of(unit, block)
        resumed = run(sweep, course, setting=products.setting)
        index = sweep.hardest_index()
        quantiles = binned_quantiles(sweep.counts)
        if exact_quantiles:
            quantiles = refined_quantiles(unit, sweep.counts, block, part=course.part)
    return _joined(rows, keep, sweep, index, quantiles, exact_quantiles, top, products.error, resumed)


def mean_cosine(rows: Tensor) -> float:
    """Mean cosine over all pairs i < j of ``rows`` [N, D], exact in float64 by the closed form; nan for one row."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)  # [D]
    squares = torch.zeros((), dtype=torch.float64, device=rows.device)
    for part in rows.split(_STRIP):
        wide = part.double()
        total += wide.sum(0)
        squares += wide.square().sum()
    n = len(rows)
    return float(total.square().sum() - squares) / (n * (n - 1)) if n > 1 else math.nan


def estimate(rows: Tensor, *, block: int | None = None, processes: int = 1) -> tuple[float, int]:
    """(seconds, extra bytes) of one pass over all pairs, from timing a few block pairs; the rows themselves are not counted.

    It is as good as the moment: other work that comes or goes during the pass changes the pass. Raises ValueError as
    ``caption_geometry`` does.
    """
    unit, block = _kept(rows, _finite_unit_rows(rows)), block or default_block(rows.device)
    blocks = math.ceil(len(unit) / block)
    pairs = block_pairs(len(unit), block)
    with fast_fp32(unit.device, *_shapes(unit, block)):
        sweep = Sweep.of(unit, block)
        some = list(islice(pairs, 0, None, max(1, number_of_pairs(len(unit), block) // _TIMED_PAIRS)))[: _TIMED_PAIRS + 1]
        _take(sweep, some[:1])  # the first call pays for the start of threads
        pair = _seconds(lambda: _take(sweep, some), unit.device) / len(some)
        row = _seconds(lambda: _per_row(unit[:block]), unit.device) / min(block, len(unit))
    seconds = pair * (number_of_pairs(len(unit), block) / processes + blocks / 2) + row * len(unit)  # a half: finding the indices
    return seconds, 48 * len(unit) + 8 * workers(unit.device) * min(block, len(unit)) ** 2


def _take(sweep: Sweep, pairs: list[tuple[int, int]]) -> None:
    with sweep.seen(pairs) as found:
        for seen in found:
            sweep.take(seen)


def _per_row(unit: Tensor) -> None:
    """What is done once for each row: norms, the mean and the hardest cosines in float64."""
    _finite_unit_rows(unit)
    mean_cosine(unit)
    everyone = torch.arange(len(unit), device=unit.device)
    _pair_cosines(unit, everyone, everyone.flip(0))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def _shapes(unit: Tensor, block: int) -> tuple[Shape, ...]:
    """Of a whole block and of the last one."""
    n, width = unit.shape
    sizes = sorted({min(block, n), n % block or min(block, n)})
    return tuple((rows, sizes[-1], width) for rows in sizes)


def _joined(
    rows: Tensor,
    keep: Tensor,
    sweep: Sweep,
    index: Tensor,
    quantiles: dict[float, float],
    exact: bool,
    top: int,
    error: float,
    resumed: int,
) -> Geometry:
    unit, kept, total = sweep.unit, keep.cpu().numpy(), len(keep) * (len(keep) - 1) // 2
    values = _pair_cosines(unit, torch.arange(len(unit), device=unit.device), index).cpu().numpy()
    counts = sweep.counts.cpu().numpy()
    assert counts.sum() == total, "every pair is counted exactly once"
    return Geometry(
        n=len(unit),
        excluded=tuple(int(i) for i in np.setdiff1d(np.arange(len(rows)), kept)),
        mean=mean_cosine(unit),
        hardest_mean=float(values.mean()),
        counts=counts,
        edges=(np.arange(BINS + 1) - BINS // 2) / (BINS // 2),
        quantiles=quantiles,
        quantile_width=0.0 if exact else BIN_WIDTH,
        hardest_quantiles={q: float(np.quantile(values, q, method="inverted_cdf")) for q in QUANTILES},
        pair_shares={t: float(counts[_bin_of(t) :].sum() / total) for t in THRESHOLDS},
        hardest_shares={t: float((values >= t).mean()) for t in THRESHOLDS},
        hardest=_spread(values, kept, len(rows), np.nan),
        hardest_index=_spread(kept[index.cpu().numpy()], kept, len(rows), -1),
        near_counts=_spread(sweep.near.cpu().numpy(), kept, len(rows), 0),
        top_pairs=_top_pairs(sweep, index, top, kept),
        repeated=_repeated(unit, values),
        matmul_error=error,
        resumed=resumed,
    )


def _bin_of(threshold: float) -> int:
    return round((threshold + 1.0) / BIN_WIDTH)


def _pair_cosines(unit: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """float64 inner products of the paired rows."""

    def products(pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = (unit.index_select(0, rows) for rows in pair)  # faster than unit[rows]
        return first.double().mul_(second).sum(1)

    with in_order(products, zip(left.split(_STRIP), right.split(_STRIP), strict=True), unit.device) as found:
        parts = list(found)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=unit.device)


def _top_pairs(sweep: Sweep, index: Tensor, top: int, kept: np.ndarray) -> tuple[tuple[int, int, float], ...]:
    """The ``top`` most similar pairs, found among few rows.

    Of the 2K rows whose hardest neighbours are nearest, no three share a pair with theirs, so they make K pairs or more: the K-th
    best pair is at least as near as the last of them, and a nearer pair lies between two of these rows. Four times as many are
    taken, for near-ties that fp32 may have put in another order.
    """
    some = sweep.best.argsort(descending=True, stable=True)[: 8 * top]
    rows = torch.cat([some, index[some]]).unique()
    wide = sweep.unit[rows].double()
    left, right = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
    near = (wide @ wide.T)[left, right].topk(min(top, len(left)), sorted=False).indices
    left, right = rows[left[near]], rows[right[near]]
    cosine = _pair_cosines(sweep.unit, left, right)
    found = [(int(kept[a]), int(kept[b]), c) for a, b, c in zip(left.tolist(), right.tolist(), cosine.tolist(), strict=True)]
    return tuple(sorted(found, key=lambda pair: (-pair[2], pair[0], pair[1])))


def _repeated(unit: Tensor, hardest: np.ndarray) -> int:
    """How many rows equal an earlier one in every number; only rows with a neighbour at 1 are looked at."""
    seen, repeats = set(), 0
    for row in np.flatnonzero(hardest > 1.0 - _SAME):
        number = hashlib.sha256((unit[row] + 0.0).cpu().numpy().tobytes()).digest()  # + 0: minus zero equals zero
        repeats += number in seen
        seen.add(number)
    return repeats


def _finite_unit_rows(rows: Tensor) -> Tensor:
    """Indices of the finite rows, which must be unit."""
    if rows.ndim != 2:
        raise ValueError(f"caption geometry needs a matrix of rows [N, D], got shape {list(rows.shape)}.")
    norms = torch.cat([part.detach().double().norm(dim=1) for part in rows.split(_STRIP)]) if len(rows) else rows.new_zeros(0)
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


def _kept(rows: Tensor, keep: Tensor) -> Tensor:
    """fp32; not a copy where all are kept."""
    return (rows.detach()[keep] if len(keep) < len(rows) else rows.detach()).float().contiguous()


def _spread(values: np.ndarray, kept: np.ndarray, n: int, missing: float) -> np.ndarray:
    """Values of the kept rows at their given places."""
    full = np.full(n, missing, dtype=values.dtype)
    full[kept] = values
    return full
