"""R@1 against the hardness of a caption: does a model fail where captions resemble each other?

    hardness of caption j = max over captions l of OTHER images in the same gallery of cos(text_j, text_l), same encoder
    hardness of an image  = the largest hardness of its captions

Queries are sorted by hardness and cut at its quantiles into bins of about equal counts (equal values stay together, so bins may
merge); each bin reports its R@1 with a 95 % bootstrap interval over images.

How to read it: a fall from the first bin to the last is what hard negatives cost.
How it can mislead: hardness is measured by the encoder that is being judged, so two encoders have different bins (compare them with
stored hardness of one of them); it grows with the gallery; a caption that another image shares word for word has hardness 1 and
cannot be told apart by anyone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.metrics.bootstrap import RESAMPLES, mean_interval
from gradscope.metrics.nearest_other import nearest_other
from gradscope.metrics.ranks import Ranks
from gradscope.metrics.recall import hit_probability

Array = NDArray[np.float64]

DEFINITION = (
    "hardness of a caption: its largest cosine to a caption of another image in the same gallery, same encoder; "
    "of an image: the largest of its captions'"
)


@dataclass(frozen=True, kw_only=True)
class HardnessBin:
    """R@1 of the queries whose hardness lies in [low_cosine, high_cosine]."""

    direction: str
    low_cosine: float
    high_cosine: float
    mean_cosine: float
    n_queries: int
    value: float
    low: float
    high: float


def caption_hardness(texts: Tensor, image_of_text: Tensor, *, block: int | None = None) -> Array:
    """float64 [M]: each caption's largest cosine to a caption of another image; nan where there is none or the row is not finite.

    Args:
        texts: unit rows [M, D]. image_of_text: int64 [M].
        block: tile edge, and so is memory, as in ``nearest_other``.
    """
    best = nearest_other(texts, image_of_text, block=block)
    return best.masked_fill_(torch.isneginf(best), torch.nan).cpu().numpy()


def query_hardness(counts: Ranks, hardness: Array, image_of_text: Tensor) -> Array:
    """float64 [Q]: a caption's own hardness, or the largest of an image's captions (nan where none of them has one)."""
    if counts.direction == "t2i":
        return hardness
    largest = np.full(counts.n_queries, -np.inf)
    known = np.isfinite(hardness)
    np.maximum.at(largest, image_of_text.cpu().numpy()[known], hardness[known])
    return np.where(np.isneginf(largest), np.nan, largest)


def hardness_recall(counts: Ranks, hardness: Array, *, bins: int = 5, resamples: int = RESAMPLES, seed: int = 0) -> list[HardnessBin]:
    """Bins by rising hardness; queries of unknown hardness (nan) belong to none.

    Args:
        counts: the rank counts of one direction.
        hardness: [Q], of the queries in order (``query_hardness``).
        bins: how many; fewer where equal values merge them.

    Raises:
        ValueError: fewer than one bin, or hardness that does not belong to the queries.
    """
    if bins < 1 or hardness.shape != (counts.n_queries,):
        raise ValueError(
            f"got {bins} bins and hardness of shape {hardness.shape} for {counts.n_queries} queries; "
            "give at least one bin and one value per query."
        )
    known = np.isfinite(hardness)
    if not known.any():
        return []
    inner = np.unique(np.quantile(hardness[known], np.arange(1, bins) / bins))
    place = np.searchsorted(inner, hardness, side="left")  # a value equal to an edge belongs to the lower bin
    hits, image = hit_probability(counts, 1), counts.image.numpy()
    return [
        _bin(counts.direction, hardness[own], hits[own], image[own], resamples, seed)
        for own in (known & (place == b) for b in range(len(inner) + 1))
        if own.any()
    ]


def _bin(direction: str, hardness: Array, hits: Array, image: NDArray[np.int64], resamples: int, seed: int) -> HardnessBin:
    low, high = mean_interval(hits, image, resamples=resamples, seed=seed)
    return HardnessBin(
        direction=direction,
        low_cosine=float(hardness.min()),
        high_cosine=float(hardness.max()),
        mean_cosine=float(hardness.mean()),
        n_queries=len(hits),
        value=float(hits.mean()),
        low=float(low[0]),
        high=float(high[0]),
    )
