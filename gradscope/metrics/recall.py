"""Recall at k, median rank and mean reciprocal rank, with intervals, from rank counts.

Let g negatives score above the best positive, and t negatives and p positives tie there (see ranks.py). In a random order of
the ties the first positive sits at place g + m with

    P(the first m tied places hold no positive) = prod_{j=1..p} (t - m + j) / (t + j)   for 0 <= m <= t, then 0

    R@k  = mean over queries of P(first positive within the first k)        all scores equal, N pairs: R@1 = 1/N
    rank = g + (t + p + 1) / (p + 1), its expectation; the median rank is the median of these
    MRR  = mean over queries of the expectation of 1 / rank

How to read it: recall is a fraction of queries in 0..1; a query is a hit if ANY of its positives is within the first k.
How it can mislead: recall grows as the gallery shrinks (compare only at equal ``n_candidates``); k >= n_candidates is always
1; the share of tied queries, reported beside it, says how much was left to chance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradscope.metrics.bootstrap import RESAMPLES, mean_interval, median_interval
from gradscope.metrics.ranks import Ranks, ranks

DEPTHS = (1, 5, 10, 25, 50)

PROTOCOL = {
    "i2t": "every caption is a candidate; hit if any caption of the image is within k; ties in random order",
    "t2i": "every image is a candidate once; hit if the caption's image is within k; ties in random order",
}

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One number of one direction, as evals.jsonl wants it."""

    direction: str
    metric: str
    value: float
    low: float
    high: float
    n_queries: int
    n_candidates: int
    protocol: str


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """All metrics of both directions, and what to know about the scores behind them."""

    rows: list[MetricRow]
    i2t: Ranks
    t2i: Ranks
    resamples: int
    seed: int

    def value(self, direction: str, metric: str) -> float:
        """One number, e.g. ``value("t2i", "R@1")``."""
        return next(row.value for row in self.rows if (row.direction, row.metric) == (direction, metric))

    def dicts(self) -> list[dict[str, object]]:
        """The rows as dicts, for the run log and for JSON."""
        return [asdict(row) for row in self.rows]


def retrieval(
    images: Tensor,
    texts: Tensor,
    image_of_text: Tensor,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    block: int | None = None,
    shared: bool = False,
) -> Retrieval:
    """Score a gallery both ways: images [N, D], texts [M, D], image_of_text int64 [M]. Raises ValueError as ``ranks`` does.

    ``shared``: the scoring is dealt out over the processes of torch.distributed, which must hold the same rows; a collective.
    """
    both = ranks(images, texts, image_of_text, block=block, shared=shared)
    rows = [row for one in both for row in metric_rows(one, resamples=resamples, seed=seed)]
    return Retrieval(rows=rows, i2t=both[0], t2i=both[1], resamples=resamples, seed=seed)


def metric_rows(counts: Ranks, *, resamples: int = RESAMPLES, seed: int = 0) -> list[MetricRow]:
    """R@1/5/10/25/50, median rank and MRR of one direction with 95 % intervals over images."""
    image = counts.image.numpy()
    rank = expected_rank(counts)
    means = np.stack([*(hit_probability(counts, k) for k in DEPTHS), expected_reciprocal_rank(counts)], axis=1)  # [Q, K]
    low, high = mean_interval(means, image, resamples=resamples, seed=seed)
    values = [*means.mean(0), np.median(rank)]
    edges = [*zip(low, high, strict=True), median_interval(rank, image, resamples=resamples, seed=seed)]
    names = [*(f"R@{k}" for k in DEPTHS), "MRR", "median_rank"]
    return [
        MetricRow(
            direction=counts.direction,
            metric=name,
            value=float(value),
            low=float(edge[0]),
            high=float(edge[1]),
            n_queries=counts.n_queries,
            n_candidates=counts.n_candidates,
            protocol=PROTOCOL[counts.direction],
        )
        for name, value, edge in zip(names, values, edges, strict=True)
    ]


def hit_probability(counts: Ranks, k: int) -> Array:
    """[Q]: the chance that a positive is within the first k, over random orders of the ties; 0 or 1 where nothing ties."""
    greater, ties, positives = _numpy(counts)
    return 1 - _still_waiting(k - greater, ties, positives)


def expected_rank(counts: Ranks) -> Array:
    """[Q]: the expected place of the first positive, counted from 1."""
    greater, ties, positives = _numpy(counts)
    return greater + (ties + positives + 1) / (positives + 1)


def expected_reciprocal_rank(counts: Ranks) -> Array:
    """[Q]: the expectation of 1 / place; computed once for each distinct (greater, ties, positives)."""
    cases, member = np.unique(np.stack(_numpy(counts), axis=1), axis=0, return_inverse=True)
    return np.array([_reciprocal(*case) for case in cases])[member.ravel()]


def _reciprocal(greater: int, ties: int, positives: int) -> float:
    return float((waiting_chances(ties, positives) / (greater + np.arange(1, ties + 2))).sum())


def waiting_chances(ties: int, positives: int) -> Array:
    """[ties + 1]: the chance that exactly m tied negatives stand ahead of the first positive, for m = 0 ... ties."""
    places = np.arange(ties + 2)  # 0 ... ties + 1
    waiting = _still_waiting(places, np.full_like(places, ties), np.full_like(places, positives))
    return waiting[:-1] - waiting[1:]


def _still_waiting(places: NDArray[np.int64], ties: NDArray[np.int64], positives: NDArray[np.int64]) -> Array:
    """The chance that the first ``places`` tied places hold no positive; 1 for places <= 0. All arguments int64 [Q]."""
    places = np.clip(places, 0, ties + 1)
    chance = np.ones(len(places))
    for j in range(1, int(positives.max()) + 1):
        chance *= np.where(j <= positives, (ties - places + j) / (ties + j), 1.0)
    return chance


def _numpy(counts: Ranks) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    return counts.greater.numpy(), counts.ties.numpy(), counts.positives.numpy()
