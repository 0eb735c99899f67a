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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product

import torch
from torch import Tensor

from gradscope import distributed
from gradscope.metrics.gallery_scores import TIE_TOLERANCE, Gallery, Tile, Tiles
from gradscope.products import fast_fp32

_CROWDED = 1 / 64  # share of a tile's scores that must be formed again, from which on the tile is float64: about as slow
_UNIT = 2.0**-24  # of fp32


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
        block: tile edge (default: 1024 on a CPU, 8192 on a GPU); memory is O(block * (block + D)), beside a few integers per row.
        shared: the tiles are dealt out over the processes of torch.distributed, all of which must hold the same rows. A collective;
            each process gets the whole answer, and it is that of one process.

    Raises:
        ValueError: if the shapes do not fit, or an image has no caption; if ``shared``, also if processes hold different rows.
    """
    gallery = Gallery.of(images, texts, image_of_text)
    if shared:
        gallery.refuse_different()
    block = block or (8192 if gallery.images.is_cuda else 1024)
    positive = gallery.positive_scores(block)  # [M]
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
    counts = torch.zeros(2, len(best) + len(positive), dtype=torch.int64, device=best.device)
    by_image, by_text = counts.split([len(best), len(positive)], dim=1)
    level = [torch.where(torch.isneginf(scores), torch.inf, scores) for scores in (best, positive)]  # the lost count nobody
    part = (distributed.rank(), distributed.world()) if shared else (0, 1)
    places = product(range(0, len(best), block), range(0, len(positive), block))
    with _tiles(gallery, block) as tiles:
        for i, j in islice(places, part[0], None, part[1]):
            rows, columns = slice(i, i + block), slice(j, j + block)
            found = _tile_counts(tiles, i, j, level[0][rows], level[1][columns])
            by_image[:, rows] += found[0]
            by_text[:, columns] += found[1]
    counts = distributed.summed(counts) if shared else counts
    return counts[:, : len(best)], counts[:, len(best) :]


@contextmanager
def _tiles(gallery: Gallery, block: int) -> Iterator[Tiles]:
    if gallery.small:
        yield Tiles(gallery, block, None)
    else:
        with fast_fp32(gallery.images.device, *gallery.shapes(block)) as products:
            yield Tiles(gallery, block, products)


def _tile_counts(tiles: Tiles, i: int, j: int, image_level: Tensor, text_level: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [2, R] and [2, C] of one tile."""
    tile = tiles.tile(i, j)
    if not tile.exact:
        sides = _Side(tiles, tile, image_level, dim=1), _Side(tiles, tile, text_level, dim=0)
        unsure = int(sides[0].unsure.sum() + sides[1].unsure.sum())
        if unsure <= _CROWDED * tile.scores.numel():
            if unsure:
                sides[0].settle(lambda query, other: tiles.exact(i + query, j + other))
                sides[1].settle(lambda query, other: tiles.exact(i + other, j + query))
            return sides[0].counts, sides[1].counts
        tile = tiles.double(i, j)
    return _exact_counts(tile.scores, image_level[:, None], 1), _exact_counts(tile.scores, text_level, 0)


class _Side:
    """The counts of one direction in an fp32 tile, whose queries are its rows (dim 1) or its columns (dim 0)."""

    def __init__(self, tiles: Tiles, tile: Tile, level: Tensor, dim: int) -> None:
        error = (tile.row_error if dim else tile.column_error) + 2.0 * _UNIT * level.abs() + 1e-30  # thresholds are rounded, too
        scratch = tiles.scratch(*tile.scores.shape)
        self._scores, scratch = (tile.scores, scratch) if dim else (tile.scores.T, scratch.T)
        self._level = level
        self._high = (level + TIE_TOLERANCE + error).float()
        self._low = (level - TIE_TOLERANCE - error).float().clamp_min(torch.finfo(torch.float32).min)  # above minus infinity
        # 0 or 1 in fp32, which torch makes and adds faster than bool.
        above = torch.gt(self._scores, self._high[:, None], out=scratch).sum(1)
        reached = torch.ge(self._scores, self._low[:, None], out=scratch).sum(1)
        self.counts = torch.stack([above, reached]).long()

    @property
    def unsure(self) -> Tensor:
        """int64 [Q]: scores that fp32 cannot place."""
        return self.counts[1] - self.counts[0]

    def settle(self, exact: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Forms them again; ``exact`` gives the scores of paired numbers of queries and candidates."""
        some = torch.nonzero(self.unsure)[:, 0]
        scores = self._scores[some]
        query, other = torch.nonzero((scores >= self._low[some, None]) & (scores <= self._high[some, None]), as_tuple=True)
        query = some[query]
        score, level = exact(query, other), self._level[query]
        self.counts[0].index_add_(0, query, (score > level + TIE_TOLERANCE).long())
        self.counts[1].index_add_(0, query, -(score < level - TIE_TOLERANCE).long())


def _exact_counts(tile: Tensor, level: Tensor, dim: int) -> Tensor:
    """int64 [2, Q]: how many scores of a float64 tile lie above the tie band, and how many above its lower edge."""
    above = (tile > level + TIE_TOLERANCE).sum(dim)
    return torch.stack([above, (tile >= level - TIE_TOLERANCE).sum(dim)])


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
