"""Percentile bootstrap intervals over images.

One resample draws I of the I images with replacement; every query of a drawn image (all its captions) comes along, as often as
the image was drawn. With w_i the number of times image i was drawn, v_i the sum and n_i the number of its queries' values:

    resampled mean = sum_i w_i v_i / sum_i w_i n_i        interval = the (1 - level)/2 and (1 + level)/2 quantiles of it

How to read it: the range in which the number would fall for another draw of queries from the same kind of data. For two
models on one gallery read ``paired_difference``: their separate intervals may overlap while the difference is clear of zero.
How it can mislead: the gallery is kept as it is, and so are training seed and checkpoint: the interval does not cover them.
With fewer than about 30 images it is too narrow, and at 0 % or 100 % it has no width at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000
LEVEL = 0.95

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of a minus mean of b over the same queries, with its interval."""

    value: float
    low: float
    high: float
    n_queries: int
    n_images: int


def mean_interval(
    values: ArrayLike, image: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> tuple[Array, Array]:
    """Interval of the mean over queries, for K metrics on the same resamples.

    Args:
        values: [Q] or [Q, K], one row per query.
        image: integers [Q]; queries with one value here are drawn together.
        resamples: how many draws. seed: of the draws.
        level: e.g. 0.95.

    Returns:
        (low, high), each [K] (K = 1 for a vector).

    Raises:
        ValueError: if there are no queries, or lengths differ.
    """
    table, group = _checked(values, image)
    sums, sizes = _per_image(table, group)

    def mean(weight: Array) -> Array:
        return (weight @ sums) / (weight @ sizes)[:, None]

    return _interval(mean, len(sizes), resamples, seed, level)


def median_interval(
    values: ArrayLike, image: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> tuple[float, float]:
    """Interval of the median over queries; arguments and errors as in ``mean_interval``, for one metric."""
    table, group = _checked(values, image)
    order = np.argsort(table[:, 0], kind="stable")
    ranked, owner = table[order, 0], group[order]

    def median(weight: Array) -> Array:
        reached = np.cumsum(weight[:, owner], axis=1)  # [R, Q]
        half = reached[:, -1:] / 2
        lower, upper = (reached < half).sum(1), (reached <= half).sum(1)  # the two middle places; one when the count is odd
        return ((ranked[lower] + ranked[upper]) / 2)[:, None]

    low, high = _interval(median, int(group.max()) + 1, resamples, seed, level)
    return float(low[0]), float(high[0])


def paired_difference(
    hits_a: ArrayLike, hits_b: ArrayLike, image: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> Difference:
    """Two models on the same queries and gallery: mean(hits_a) - mean(hits_b), both taken on the same resamples.

    Args:
        hits_a, hits_b: [Q], one value per query, in the same order of queries.
        image, resamples, seed, level: as in ``mean_interval``.

    Raises:
        ValueError: if the lengths differ.
    """
    first, second = np.asarray(hits_a, dtype=np.float64), np.asarray(hits_b, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(
            f"the two models have hits of shapes {first.shape}, {second.shape}; score both on the same queries, in one order."
        )
    gain = first - second
    low, high = mean_interval(gain, image, resamples=resamples, seed=seed, level=level)
    return Difference(
        value=float(gain.mean()), low=float(low[0]), high=float(high[0]), n_queries=len(gain), n_images=len(np.unique(image))
    )


def draws(n_images: int, *, resamples: int, seed: int) -> Iterator[Array]:
    """How often each image is drawn: float64 [r, n_images] at a time, ``resamples`` rows in all, each summing to n_images."""
    generator = np.random.default_rng(seed)
    at_once = max(1, 2_000_000 // n_images)
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        chosen = generator.integers(0, n_images, size=(count, n_images)) + n_images * np.arange(count)[:, None]
        yield np.bincount(chosen.ravel(), minlength=count * n_images).reshape(count, n_images).astype(np.float64)


def _interval(statistic: Callable[[Array], Array], n_images: int, resamples: int, seed: int, level: float) -> tuple[Array, Array]:
    results = np.concatenate([statistic(weight) for weight in draws(n_images, resamples=resamples, seed=seed)])  # [R, K]
    low, high = np.quantile(results, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def _checked(values: ArrayLike, image: ArrayLike) -> tuple[Array, NDArray[np.int64]]:
    table = np.asarray(values, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    labels = np.asarray(image)
    if not len(table) or labels.shape != (len(table),):
        raise ValueError(f"got {len(table)} query values and {labels.size} image labels; give one label per value, and some.")
    return table, np.unique(labels, return_inverse=True)[1].astype(np.int64)


def _per_image(table: Array, group: NDArray[np.int64]) -> tuple[Array, Array]:
    """Sums [I, K] and numbers [I] of the queries of each image."""
    sizes: Array = np.bincount(group).astype(np.float64)
    sums: Array = np.stack([np.bincount(group, weights=column) for column in table.T], axis=1).astype(np.float64)
    return sums, sizes
