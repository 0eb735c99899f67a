"""Ranks of the truth in both retrieval directions, by counting, in tiles.

For a query with best positive score s+ and the scores s_j of all candidates that are not its positives:

    greater = #{j : s_j > s+ + t}      ties = #{j : |s_j - s+| <= t}      positives = #{its positives within t of s+}

with t = ``TIE_TOLERANCE``. Image -> text: the positives of an image are all its captions, and the best-placed one counts; its
other captions never count against it. Text -> image: the positive of a caption is its one image.

Scores are inner products in float64 of the embeddings as given. Rounding then stays near 1e-16 whatever the tile or the order of the
gallery, far below t, so that equal embeddings tie and nothing else does, and the counts do not depend on block size, thread count or
permutation. (In float32 the last digit of a product depends on its place in the tile: a positive formed elsewhere can even be beaten
by itself.) Tiles are fp32 all the same: a score that is farther from s+ than an fp32 product can be wrong is counted as it is, the few
others are formed again in float64, and a tile with many such scores is float64 throughout. The counts are those of float64.

How to read it: ``greater`` is the best rank minus one; the ties are what chance decides, and recall.py takes the expectation.
How it can mislead: rows are used as given, so they must be unit rows if the score is to be a cosine. A row that is not finite
scores below everything; if it is the query, or the query's only positive, the query gets the worst rank and is counted in
``non_finite``. Two files with one picture are two images here, and each is a negative of the other's captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from gradscope import distributed
from gradscope.metrics.gallery_scores import TIE_TOLERANCE, Gallery, Tiles, each_tile, open_tiles
from gradscope.metrics.pair_sweep import default_block
from gradscope.metrics.same_rows import refuse_different
from gradscope.metrics.tile_counts import TileCounts, TileQueries, settle_open


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The counts of Q queries of one direction, on the CPU, in the order of the queries' rows."""

    direction: str
    greater: Tensor  # int64 [Q]
    ties: Tensor  # int64 [Q]
    positives: Tensor  # int64 [Q], at least 1
    image: Tensor  # int64 [Q], the image a query is, or belongs to
    negatives: Tensor  # int64 [Q], candidates that are not positives of the query
    n_candidates: int
    non_finite: int

    @property
    def n_queries(self) -> int:
        return len(self.greater)

    @property
    def tied_share(self) -> float:
        """Share of queries whose best positive ties with a negative."""
        return float((self.ties > 0).double().mean())


@torch.no_grad()
def ranks(
    images: Tensor, texts: Tensor, image_of_text: Tensor, *, block: int | None = None, shared: bool = False
) -> tuple[Ranks, Ranks]:
    """Both directions, (image -> text, text -> image), in one pass over the scores.

    Args:
        images: [N, D], any float dtype.
        texts: [M, D].
        image_of_text: int64 [M], the row of the image that each caption describes.
        block: tile edge (default: 1024 on a CPU, 8192 on a GPU); memory is O(block * (block + D)) for each thread,
            beside a few integers per row.
        shared: the tiles are dealt out over the processes of torch.distributed, all of which must hold the same rows. A collective;
            each process gets the whole answer, and it is that of one process.

    Raises:
        ValueError: if the shapes do not fit, or an image has no caption; if ``shared``, also if processes hold different rows.
    """
    gallery = Gallery.of(images, texts, image_of_text)
    if shared:
        refuse_different(gallery.images, gallery.texts, gallery.owner)
    block = block or default_block(gallery.images.device)
    positive = gallery.positive_scores()  # [M]
    best = torch.full((len(images),), -torch.inf, dtype=torch.float64, device=positive.device)
    best.scatter_reduce_(0, gallery.owner, positive, "amax")  # [N]
    by_image, by_text = _counted(gallery, best, positive, block, shared)

    own = torch.bincount(gallery.owner, minlength=len(images))
    tied_own = torch.bincount(gallery.owner[positive >= best[gallery.owner] - TIE_TOLERANCE], minlength=len(images))
    everyone = torch.arange(len(images), device=positive.device)
    one = torch.ones_like(gallery.owner)
    return (
        _result("i2t", by_image, best, tied_own, everyone, len(texts) - own, len(texts)),
        _result("t2i", by_text, positive, one, gallery.owner, len(images) - one, len(images)),
    )


def _counted(gallery: Gallery, best: Tensor, positive: Tensor, block: int, shared: bool) -> tuple[Tensor, Tensor]:
    """int64 [2, N] and [2, M]: how many negatives score above the tie band of each query, and how many above its lower edge."""
    part = (distributed.rank(), distributed.world()) if shared else (0, 1)
    places = list(product(range(0, len(best), block), range(0, len(positive), block)))[part[0] :: part[1]]
    with open_tiles(gallery, block) as tiles:
        sides = TileQueries(tiles, best, tiles.errors[0], dim=1), TileQueries(tiles, positive, tiles.errors[1], dim=0)
        sums = [side.empty() for side in sides]
        with each_tile(lambda place: _tile_counts(tiles, sides, *place), places, len(places), best.device) as found:
            for both in found:
                for total, one in zip(sums, both, strict=True):
                    total[:, one.queries] += one.counts
    sizes = len(best), len(positive)
    counts = torch.cat([total[:, :size] for total, size in zip(sums, sizes, strict=True)], dim=1).long()
    counts = distributed.summed(counts) if shared else counts
    return counts[:, : len(best)], counts[:, len(best) :]


@torch.no_grad()
def _tile_counts(tiles: Tiles, sides: tuple[TileQueries, TileQueries], i: int, j: int) -> list[TileCounts]:
    """One tile, for both directions: fp32 unless that leaves too much open."""
    if tiles.fp32:
        tile = tiles.padded(i, j)
        found = [one for side in sides if (one := side.single(tile, i, j)) is not None]
        if len(found) == len(sides):
            settle_open(tiles, found)
            return found
    wide = tiles.double(i, j)
    return [side.double(wide, i, j) for side in sides]


def _result(
    direction: str, counts: Tensor, score: Tensor, positives: Tensor, image: Tensor, negatives: Tensor, n_candidates: int
) -> Ranks:
    lost = torch.isneginf(score)
    greater, reached = counts
    return Ranks(
        direction=direction,
        greater=torch.where(lost, negatives, greater).cpu(),
        ties=torch.where(lost, 0, reached - greater).cpu(),
        positives=torch.where(lost, 1, positives).cpu(),
        image=image.cpu(),
        negatives=negatives.cpu(),
        n_candidates=n_candidates,
        non_finite=int(lost.sum()),
    )
