"""Two models on one gallery: paired differences, a test, and the queries on which they disagree.

    difference = R@k(a) - R@k(b), with a percentile interval from a bootstrap over IMAGES (both models on the same resamples)
    test       = exact sign test on the images whose hits differ: with n+ of them better under a and n- under b,
                 p = P(|Binomial(n+ + n-, 1/2) - mean| at least as extreme), two-sided.
                 With one caption per image and no ties this is McNemar's exact test on the hits.

A caption query counts for its image: where an image has several captions, the sign is that of its summed gain, since its captions are
not independent of each other. A flip is a query whose chance of a hit at 1 differs between the two.

How to read it: the interval says how large the difference is, the p value how easily chance alone flips that many queries one way.
How it can mislead: gallery, seed of training and checkpoint are taken as given, and six p values are printed: the smallest of several
is small by chance alone. Separate intervals of two models may overlap although the paired difference is clear of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradscope.evaluate import Embedded
from gradscope.metrics.bootstrap import RESAMPLES, paired_difference
from gradscope.metrics.ranks import Ranks, ranks
from gradscope.metrics.recall import expected_rank, hit_probability
from gradscope.metrics.winners import Winners, winners

DEPTHS = (1, 5, 10)


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """R@k of both models in one direction; recalls and the difference are fractions, ``better`` and ``worse`` count images."""

    direction: str
    k: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    better: int  # images with more hits under a
    worse: int  # images with more hits under b
    p_value: float


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A query that one model gets and the other misses at 1. ``won`` is "a" or "b"; items are image ids."""

    direction: str
    won: str
    id: str
    caption_number: int  # of the query's caption within its image, from 0; -1 for an image query
    caption: str  # "" where the strings are not known
    rank_a: float
    rank_b: float
    instead: str  # id of the wrong item (or of the image of the wrong caption) that the losing model liked best; "" if none is finite
    instead_score: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, all flips (the loser's worst ranks first), and the size of the gallery."""

    images: int
    captions: int
    resamples: int
    seed: int
    rows: list[ComparedRow]
    flips: list[Flip]
    non_finite: dict[str, int]  # queries by model ("a", "b") that are not finite and count as misses


def compare(a: Embedded, b: Embedded, *, resamples: int = RESAMPLES, seed: int = 0) -> Comparison:
    """Score both and set them side by side. Raises ValueError if they are not embeddings of the same gallery."""
    refuse_other_gallery(a, b)
    rank_a, rank_b = (ranks(e.image, e.text, e.image_of_text) for e in (a, b))
    won_a, won_b = (winners(e.image, e.text, e.image_of_text) for e in (a, b))
    rows = [compared(x, y, k, resamples=resamples, seed=seed) for x, y in zip(rank_a, rank_b, strict=True) for k in DEPTHS]
    naming = a if a.captions else b
    found = [flip for parts in zip(rank_a, rank_b, won_a, won_b, strict=True) for flip in _flips(naming, *parts)]
    lost = {name: sum(counts.non_finite for counts in side) for name, side in (("a", rank_a), ("b", rank_b))}
    return Comparison(images=len(a.ids), captions=len(a.text), resamples=resamples, seed=seed, rows=rows, flips=found, non_finite=lost)


def refuse_other_gallery(a: Embedded, b: Embedded) -> None:
    """Raises ValueError that says in what the galleries differ: items, their order, captions or which image they belong to."""
    advice = "compare two encoders on the same data, split and policies."
    if (len(a.ids), len(a.text)) != (len(b.ids), len(b.text)):
        sizes = f"{len(a.ids):,} images with {len(a.text):,} captions, and {len(b.ids):,} with {len(b.text):,}"
        raise ValueError(f"the two galleries differ: {sizes}; {advice}")
    for index, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)):
        if x != y:
            raise ValueError(f"the two galleries differ: image {index} is '{x}' in the first and '{y}' in the second; {advice}")
    if a.image_of_text.cpu().tolist() != b.image_of_text.cpu().tolist():
        raise ValueError(f"the two galleries differ: their captions belong to different images; {advice}")
    other = [i for i, (x, y) in enumerate(zip(a.digests, b.digests, strict=True)) if x != y]
    if other:
        owner = a.ids[int(a.image_of_text[other[0]])]
        raise ValueError(f"the two galleries differ in {len(other):,} captions, the first is of image '{owner}'; {advice}")


def compared(a: Ranks, b: Ranks, k: int, *, resamples: int = RESAMPLES, seed: int = 0) -> ComparedRow:
    """One direction at one depth, from the rank counts of the same queries."""
    from scipy.stats import binomtest

    hits_a, hits_b, image = hit_probability(a, k), hit_probability(b, k), a.image.numpy()
    difference = paired_difference(hits_a, hits_b, image, resamples=resamples, seed=seed)
    gain = np.bincount(image, weights=hits_a - hits_b)
    gain[np.abs(gain) < 1e-9] = 0  # chances of hits under ties are sums of fractions
    better, worse = int((gain > 0).sum()), int((gain < 0).sum())
    return ComparedRow(
        direction=a.direction,
        k=k,
        a=float(hits_a.mean()),
        b=float(hits_b.mean()),
        difference=difference.value,
        low=difference.low,
        high=difference.high,
        better=better,
        worse=worse,
        p_value=float(binomtest(better, better + worse).pvalue) if better + worse else 1.0,
    )


def _flips(names: Embedded, a: Ranks, b: Ranks, won_a: Winners, won_b: Winners) -> list[Flip]:
    gain = hit_probability(a, 1) - hit_probability(b, 1)
    rank_a, rank_b = expected_rank(a), expected_rank(b)
    owner = names.image_of_text.cpu().numpy()
    number = caption_numbers(owner)
    text_query = a.direction == "t2i"
    flips = []
    for q in np.flatnonzero(np.abs(gain) > 1e-9):
        loser = won_b if gain[q] > 0 else won_a
        wrong = int(loser.rival[q])
        flips.append(
            Flip(
                direction=a.direction,
                won="a" if gain[q] > 0 else "b",
                id=names.ids[int(a.image[q])],
                caption_number=int(number[q]) if text_query else -1,
                caption=names.captions[q] if text_query and names.captions else "",
                rank_a=float(rank_a[q]),
                rank_b=float(rank_b[q]),
                instead="" if wrong < 0 else names.ids[wrong if text_query else int(owner[wrong])],
                instead_score=float(loser.rival_score[q]),
            )
        )
    return sorted(flips, key=lambda flip: -max(flip.rank_a, flip.rank_b))


def caption_numbers(owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M]: the how-manieth caption of its image each caption is, from 0."""
    seen: dict[int, int] = {}
    numbers = []
    for image in owner.tolist():
        numbers.append(seen.get(image, 0))
        seen[image] = numbers[-1] + 1
    return np.array(numbers, dtype=np.int64)
