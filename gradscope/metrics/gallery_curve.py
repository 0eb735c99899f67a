"""Expected R@1 in a smaller gallery, exactly, from the rank counts of the full one.

A gallery of size n holds the query's positives (counted as one place) and n - 1 negatives drawn without replacement from its M
negatives, all draws equally likely. If x negatives stand ahead of the first positive, the query is a hit when none of them is drawn:

    P(hit at n | x ahead) = C(M - x, n - 1) / C(M, n - 1) = prod_{i=0..x-1} (1 - (n - 1) / (M - i))      0 where x > M - (n - 1)

With g negatives above and t tied with the best positive (p of them), a random order of the ties puts x = g + m ahead with the chance
that recall.py gives to m; drawing a subset leaves that order random, so the expectation over both is the sum over m. At n = M + 1
this is R@1 itself. Source: the hypergeometric distribution. Nothing is sampled.

How to read it: what the same embeddings would score in a random smaller gallery of the same kind of data, so that results on 1,000
and on 5,000 items can be set side by side.
How it can mislead: real smaller benchmarks are not random subsets of larger ones. Image -> text with several captions per image draws
captions, not images. Nothing is said about galleries larger than the one measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradscope.metrics.bootstrap import RESAMPLES, mean_interval
from gradscope.metrics.ranks import Ranks
from gradscope.metrics.recall import waiting_chances

Array = NDArray[np.float64]

STEPS = (1, 2, 5)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Expected R@1 of one direction at one gallery size, with its 95 % interval over images."""

    direction: str
    size: int
    value: float
    low: float
    high: float


def gallery_sizes(counts: Ranks) -> tuple[int, ...]:
    """10, 20, 50, 100, ... below the full gallery, and the full one (the smallest number of negatives of a query, plus one)."""
    full = int(counts.negatives.min()) + 1
    rising = [step * 10**power for power in range(1, 8) for step in STEPS]
    return (*(size for size in rising if size < full), full)


def gallery_curve(
    counts: Ranks, sizes: tuple[int, ...] | None = None, *, resamples: int = RESAMPLES, seed: int = 0
) -> list[CurvePoint]:
    """One point per size.

    Args:
        counts: the rank counts of one direction.
        sizes: gallery sizes; by default ``gallery_sizes(counts)``.

    Raises:
        ValueError: a size below 1, or above what every query's negatives allow.
    """
    sizes = gallery_sizes(counts) if sizes is None else sizes
    full = int(counts.negatives.min()) + 1
    for size in sizes:
        if not 1 <= size <= full:
            raise ValueError(f"gallery size {size} cannot be drawn from this gallery; give sizes from 1 to {full}.")
    hits = np.stack([hit_chance(counts, size) for size in sizes], axis=1)  # [Q, K]
    low, high = mean_interval(hits, counts.image.numpy(), resamples=resamples, seed=seed)
    return [
        CurvePoint(direction=counts.direction, size=size, value=float(value), low=float(a), high=float(b))
        for size, value, a, b in zip(sizes, hits.mean(0), low, high, strict=True)
    ]


def hit_chance(counts: Ranks, size: int) -> Array:
    """[Q]: the chance that a positive comes first in a random gallery of ``size``; once for each distinct case."""
    columns = [counts.greater, counts.ties, counts.positives, counts.negatives]
    cases, member = np.unique(np.stack([c.numpy() for c in columns], axis=1), axis=0, return_inverse=True)
    tables = {int(m): _none_drawn(int(m), size - 1) for m in np.unique(cases[:, 3])}
    chance = [float(waiting_chances(t, p) @ tables[int(m)][g : g + t + 1]) for g, t, p, m in cases]
    return np.array(chance)[member.ravel()]


def _none_drawn(negatives: int, drawn: int) -> Array:
    """[negatives + 1]: the chance that ``drawn`` of the negatives miss x given ones, for x = 0 ... negatives."""
    logs = np.full(negatives + 1, -np.inf)
    x = np.arange(negatives - drawn + 1)
    logs[0] = 0.0
    logs[1 : len(x)] = np.cumsum(np.log1p(-drawn / (negatives - x[:-1])))
    return np.exp(logs)
