"""Recall as a fraction of all positives: of an image's captions, how many are within the first k.

    true R@k = mean over images of (1 / n_i) sum over its captions j of P(caption j within the first k)

A caption's place counts everything ahead of it, its image's other captions too; ties are in random order, so with g candidates
above and t others tied (as in ranks.py) the chance is (k - g) / (t + 1), cut to 0..1. Image -> text only: a caption
has one image.

How to read it: the retrieval literature's "R@k" is mostly hit-if-any (recall.py); this is the other reading of the word. It cannot
reach 1 where an image has more than k captions.
How it can mislead: the two are equal with one caption per image and far apart with five; never compare one with the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.metrics.bootstrap import RESAMPLES, mean_interval
from gradscope.metrics.gallery_scores import Gallery, Tiles, each_tile, open_tiles
from gradscope.metrics.pair_sweep import default_block
from gradscope.metrics.recall import MetricRow
from gradscope.metrics.tile_counts import TileCounts, TileQueries, double_counts, settle_open

DEPTHS = (1, 5, 10)
PROTOCOL = "every caption is a candidate; fraction of the image's captions within k; ties in random order"

Array = NDArray[np.float64]


def true_recall_rows(
    images: Tensor, texts: Tensor, image_of_text: Tensor, *, resamples: int = RESAMPLES, seed: int = 0, block: int | None = None
) -> list[MetricRow]:
    """Rows "true R@1", "true R@5", "true R@10" with 95 % intervals over images. Raises ValueError as ``ranks`` does."""
    greater, ties = caption_places(images, texts, image_of_text, block=block)
    owner = image_of_text.cpu().numpy()
    own = np.bincount(owner)
    chance = np.clip((np.array(DEPTHS) - greater[:, None]) / (ties[:, None] + 1), 0, 1)  # [M, K]
    share = np.stack([np.bincount(owner, weights=column) / own for column in chance.T], axis=1)  # [N, K]
    low, high = mean_interval(share, np.arange(len(images)), resamples=resamples, seed=seed)
    return [
        MetricRow(
            direction="i2t",
            metric=f"true R@{k}",
            value=float(value),
            low=float(a),
            high=float(b),
            n_queries=len(images),
            n_candidates=len(texts),
            protocol=PROTOCOL,
        )
        for k, value, a, b in zip(DEPTHS, share.mean(0), low, high, strict=True)
    ]


@torch.no_grad()
def caption_places(
    images: Tensor, texts: Tensor, image_of_text: Tensor, *, block: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each caption, with its image as the query: candidates above it, and others tied with it; int64 [M] each.

    A caption whose score is not finite has all others above it. ``block`` as in ``ranks``, and so is the memory it takes.
    """
    gallery = Gallery.of(images, texts, image_of_text)
    block = block or default_block(gallery.images.device)
    positive = gallery.positive_scores()
    queries = _Queries.of(gallery.owner)
    places = list(product(range(0, len(images), block), range(0, len(texts), block)))
    with open_tiles(gallery, block, positives=True) as tiles:
        side = TileQueries(tiles, positive[queries.caption], tiles.errors[0][gallery.owner[queries.caption]], dim=1)
        total = side.empty()
        with each_tile(lambda place: _tile_counts(tiles, side, queries, *place), places, len(places), total.device) as found:
            for one in chain.from_iterable(found):
                total[:, one.queries] += one.counts
    counts = torch.empty(2, len(texts), dtype=torch.int64, device=total.device)
    counts[:, queries.caption] = total[:, : len(texts)].long()
    counts[1] -= 1  # a caption reaches itself
    counts[:, torch.isneginf(positive)] = len(texts) - 1
    return counts[0].cpu().numpy(), (counts[1] - counts[0]).cpu().numpy()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Queries:
    """All captions, image by image."""

    caption: Tensor  # int64 [M]
    first: Tensor  # int64 [N], the place in ``caption`` of the first of an image
    number: Tensor  # int64 [N], how many an image has

    @classmethod
    def of(cls, owner: Tensor) -> _Queries:
        number = torch.bincount(owner)
        return cls(caption=torch.argsort(owner, stable=True), first=number.cumsum(0) - number, number=number)

    def turns(self, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """For k = 0, 1, ...: which of the images have a k-th caption, and where in ``caption`` it is."""
        first, number = self.first[rows], self.number[rows]
        for k in range(int(number.max())):
            having = torch.nonzero(number > k)[:, 0]
            yield having, first[having] + k


@torch.no_grad()
def _tile_counts(tiles: Tiles, side: TileQueries, queries: _Queries, i: int, j: int) -> list[TileCounts]:
    """One tile against one caption of each image at a time: fp32 unless that leaves too much open."""
    rows = slice(i, i + tiles.block)
    if tiles.fp32:
        tile = tiles.padded(i, j)
        top = tile.amax(1)
        found = []
        for line, query in queries.turns(rows):
            reached = torch.nonzero(top[line] >= side.levels.low[query])[:, 0]
            if len(reached):
                found.append(side.among(tile, i, j, line[reached], query[reached]))
        if (whole := [one for one in found if one is not None]) == found:
            settle_open(tiles, whole)
            return whole
    wide = tiles.double(i, j)
    return [
        TileCounts(queries=query, counts=double_counts(wide[line], side.levels.level[query], 1)) for line, query in queries.turns(rows)
    ]
