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
from itertools import islice, product

import torch
from torch import Tensor

from gradscope import distributed
from gradscope.metrics.gallery_scores import CROWDED, TIE_TOLERANCE, Gallery, Tiles, open_tiles
from gradscope.metrics.pair_sweep import default_block
from gradscope.metrics.same_rows import refuse_different

_GROUP = 64
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
    counts = torch.zeros(2, len(best) + len(positive), dtype=torch.int64, device=best.device)
    by_image, by_text = counts.split([len(best), len(positive)], dim=1)
    part = (distributed.rank(), distributed.world()) if shared else (0, 1)
    places = product(range(0, len(best), block), range(0, len(positive), block))
    with open_tiles(gallery, block) as tiles:
        levels = _Levels.of(best, tiles.errors[0]), _Levels.of(positive, tiles.errors[1])
        for i, j in islice(places, part[0], None, part[1]):
            rows, columns = slice(i, i + block), slice(j, j + block)
            found = _tile_counts(tiles, i, j, levels[0][rows], levels[1][columns])
            by_image[:, rows] += found[0]
            by_text[:, columns] += found[1]
    counts = distributed.summed(counts) if shared else counts
    return counts[:, : len(best)], counts[:, len(best) :]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Levels:
    """What the scores of Q queries are compared with, [Q] each."""

    level: Tensor  # float64, the best positive; infinity for the lost, whose count is nobody's
    high: Tensor  # float32: an fp32 score above it is above the tie band
    low: Tensor  # float32: an fp32 score below it is below the tie band

    @classmethod
    def of(cls, score: Tensor, error: Tensor) -> _Levels:
        level = torch.where(torch.isneginf(score), torch.inf, score)
        error = error + 2.0 * _UNIT * level.abs() + 1e-30  # the thresholds are rounded, too
        low = (level - TIE_TOLERANCE - error).float().clamp_min(torch.finfo(torch.float32).min)  # above minus infinity
        return cls(level=level, high=(level + TIE_TOLERANCE + error).float(), low=low)

    def __getitem__(self, part: slice) -> _Levels:
        return _Levels(level=self.level[part], high=self.high[part], low=self.low[part])


def _tile_counts(tiles: Tiles, i: int, j: int, image: _Levels, text: _Levels) -> tuple[Tensor, Tensor]:
    """int64 [2, R] and [2, C] of one tile."""
    if tiles.fp32:
        tile = tiles.single(i, j)
        by_row = _single_counts(tiles, tile, (i, j), image, dim=1)
        by_column = None if by_row is None else _single_counts(tiles, tile, (i, j), text, dim=0)
        if by_row is not None and by_column is not None:
            return by_row, by_column
    wide = tiles.double(i, j)
    return _double_counts(wide, image.level[:, None], 1), _double_counts(wide, text.level, 0)


def _single_counts(tiles: Tiles, tile: Tensor, place: tuple[int, int], levels: _Levels, dim: int) -> Tensor | None:
    """int64 [2, Q] for the queries in the rows (dim 1) or columns (dim 0) of an fp32 tile; None if too much must be formed again."""
    low, high = (levels.low[:, None], levels.high[:, None]) if dim else (levels.low, levels.high)
    above, reached = tiles.scratch(tile)  # 0 or 1 in fp32, which torch makes and adds faster than bool
    counts = torch.stack([torch.gt(tile, high, out=above).sum(dim), torch.ge(tile, low, out=reached).sum(dim)]).long()
    unsure = int((counts[1] - counts[0]).sum())
    if unsure > CROWDED * tile.numel():
        return None
    if unsure:
        number = _nonzero(reached.sub_(above).view(-1))
        row, column = number // tile.shape[1], number % tile.shape[1]
        score = tiles.gallery.exact(place[0] + row, place[1] + column)
        _settle(counts, row if dim else column, score, levels.level)
    return counts


def _settle(counts: Tensor, query: Tensor, score: Tensor, level: Tensor) -> None:
    """Puts right what was counted of ``score`` [K], float64, for ``query`` [K]: not above the band, but above its lower edge."""
    level = level[query]
    counts[0].index_add_(0, query, (score > level + TIE_TOLERANCE).long())
    counts[1].index_add_(0, query, -(score < level - TIE_TOLERANCE).long())


def _nonzero(flags: Tensor) -> Tensor:
    """int64 places of the ones among many float32 zeros [K]: by groups first, which leaves little to look through."""
    if len(flags) % _GROUP:
        return torch.nonzero(flags)[:, 0]
    groups = flags.view(-1, _GROUP)
    some = torch.nonzero(groups.sum(1))[:, 0]
    group, place = torch.nonzero(groups.index_select(0, some), as_tuple=True)
    return some[group] * _GROUP + place


def _double_counts(tile: Tensor, level: Tensor, dim: int) -> Tensor:
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
