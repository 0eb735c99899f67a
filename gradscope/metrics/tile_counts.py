"""How many scores of a gallery lie above the level of each query: counted in fp32 where that decides, and in float64 where it does not.

For queries q with levels l_q, and t = ``TIE_TOLERANCE``,

    above_q = #{j : s_qj > l_q + t}        reached_q = #{j : s_qj >= l_q - t}

An fp32 tile is compared twice: with what is surely above the tie band, and with what is not surely below it (``Tiles.errors``). Both
answers are added up by groups of ``GROUP`` scores; where the two differ some score of the group is open, and only such groups are
looked at again. Open scores are formed again, nearly and then, if that does not decide, in float64. Where few queries are reached by
any score of a tile, which its largest scores tell, only theirs are compared.

How it can mislead: a tile in which more than ``CROWDED`` of the scores are open is refused, so that the caller takes a float64 one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradscope.metrics.gallery_scores import CROWDED, GROUP, TIE_TOLERANCE, UNIT, Tiles

_FEW = 1 / 8  # share of queries, up to which they are counted apart
_PAUSE = 16  # tiles
_TINY = 1e-30  # what fp32 products lose where they underflow


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """What the scores of Q queries are compared with, [Q] each."""

    level: Tensor  # float64; infinity where nothing is to be counted
    error: Tensor  # float64, how far an fp32 score may be from the true one
    high: Tensor  # float32: an fp32 score above it is above the tie band
    low: Tensor  # float32: an fp32 score below it is below the tie band

    @classmethod
    def of(cls, score: Tensor, error: Tensor) -> Levels:
        """``score`` float64 [Q]; minus infinity (the lost, whose count is nobody's) counts nothing."""
        level = torch.where(torch.isneginf(score), torch.inf, score)
        wide = error + 2.0 * UNIT * level.abs() + _TINY  # the thresholds are rounded, too
        low = (level - TIE_TOLERANCE - wide).float().clamp_min(torch.finfo(torch.float32).min)  # above minus infinity
        return cls(level=level, error=error, high=(level + TIE_TOLERANCE + wide).float(), low=low)

    def __getitem__(self, part: slice | Tensor) -> Levels:
        return Levels(level=self.level[part], error=self.error[part], high=self.high[part], low=self.low[part])


@dataclass(frozen=True, kw_only=True, eq=False)
class TileCounts:
    """What one tile adds to the counts of some queries."""

    queries: slice | Tensor  # of the side
    counts: Tensor  # whole numbers [2, queries] in any dtype, above and reached
    open: OpenScores | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenScores:
    """Scores [K] that were counted as reached and not as above, and may be neither or both."""

    query: Tensor  # int64, among the queries of the counts
    image: Tensor  # int64
    text: Tensor  # int64
    level: Tensor  # float64
    error: Tensor  # float64


class TileQueries:
    """Q queries that lie in the rows (``dim`` 1) or the columns (``dim`` 0) of tiles. May be used by several threads."""

    def __init__(self, tiles: Tiles, score: Tensor, error: Tensor, dim: int) -> None:
        """``score`` and ``error``: float64 [Q], the levels, and how far an fp32 score of the query may be from the true one."""
        self.tiles = tiles
        self.dim = dim
        beyond = (0, GROUP)  # of the last tile, which is filled up
        self.levels = Levels.of(pad(score, beyond, value=torch.inf), pad(error, beyond))
        self._habit = _Habit()

    def empty(self) -> Tensor:
        """float64 [2, Q and some]: no counts yet."""
        return self.levels.level.new_zeros(2, len(self.levels.level))

    def single(self, tile: Tensor, i: int, j: int) -> TileCounts | None:
        """The counts of a padded fp32 tile that starts at image i and caption j; None if it is crowded."""
        start = i if self.dim else j
        queries = slice(start, start + tile.shape[1 - self.dim])
        some = self._reaching(tile, self.levels.low[queries])
        return self.among(tile, i, j, some, queries if some is None else start + some)

    def among(self, tile: Tensor, i: int, j: int, lines: Tensor | None, queries: slice | Tensor) -> TileCounts | None:
        """The same for some queries, the scores of each in one of the ``lines`` (rows or columns) of the tile; in all if None."""
        tile = tile if lines is None else tile.index_select(1 - self.dim, lines)
        own = self.levels[queries]
        beyond = torch.stack([self._grouped(tile, torch.gt, own.high), self._grouped(tile, torch.ge, own.low)])
        differ = beyond[1] - beyond[0]
        if (unsure := int(differ.sum())) > CROWDED * tile.numel():
            return None
        counts = beyond.sum(1 + self.dim)
        if not unsure:
            return TileCounts(queries=queries, counts=counts)
        query, candidate = self._open_cells(tile, differ, own)
        line = query if lines is None else lines[query]
        image, text = (line, candidate) if self.dim else (candidate, line)
        unsettled = OpenScores(query=query, image=i + image, text=j + text, level=own.level[query], error=own.error[query])
        return TileCounts(queries=queries, counts=counts, open=unsettled)

    def double(self, tile: Tensor, i: int, j: int) -> TileCounts:
        """The counts of a float64 tile."""
        start = i if self.dim else j
        queries = slice(start, start + tile.shape[1 - self.dim])
        return TileCounts(queries=queries, counts=double_counts(tile, self.levels.level[queries], self.dim))

    def _reaching(self, tile: Tensor, low: Tensor) -> Tensor | None:
        """Queries that any score of the tile reaches, where they are few; else None, and the next tiles are not asked."""
        if self._habit.pause:
            self._habit.pause -= 1
            return None
        some = torch.nonzero(tile.amax(self.dim) >= low)[:, 0]
        if len(some) <= _FEW * len(low):
            return some
        self._habit.pause = _PAUSE
        return None

    def _grouped(self, tile: Tensor, compare: Callable[..., Tensor], bound: Tensor) -> Tensor:
        """float32, how many scores of each group are beyond the bound [Q]: [R, groups] or [groups, C]."""
        ones = self.tiles.scratch(*tile.shape)  # 0 or 1 in fp32, which torch makes and adds faster than bool
        compare(tile, bound[:, None] if self.dim else bound, out=ones)
        return ones.unflatten(self.dim, (-1, GROUP)).sum(self.dim + 1)

    def _open_cells(self, tile: Tensor, differ: Tensor, own: Levels) -> tuple[Tensor, Tensor]:
        """int64 [K] each, query and candidate of the scores between the bounds, of groups where ``differ`` is not 0."""
        a, b = torch.nonzero(differ, as_tuple=True)
        query, group = (a, b) if self.dim else (b, a)
        split = tile.unflatten(self.dim, (-1, GROUP))
        scores = split[a, b] if self.dim else split[a, :, b]
        between = (scores >= own.low[query, None]) & (scores <= own.high[query, None])
        at, place = torch.nonzero(between, as_tuple=True)
        return query[at], group[at] * GROUP + place


class _Habit(threading.local):
    """In each thread: for how many tiles not to ask whether few queries are reached."""

    pause = 0


def double_counts(tile: Tensor, level: Tensor, dim: int) -> Tensor:
    """int64 [2, Q], above and reached, of a float64 tile with the queries in its rows (``dim`` 1) or columns."""
    level = level[:, None] if dim else level
    return torch.stack([(tile > level + TIE_TOLERANCE).sum(dim), (tile >= level - TIE_TOLERANCE).sum(dim)])


def settle_open(tiles: Tiles, counted: Sequence[TileCounts]) -> None:
    """Puts right what was counted of scores that are open, of all at a time."""
    left = [(one.counts, one.open) for one in counted if one.open is not None]
    if not left:
        return
    image, text, level, error = (torch.cat([getattr(one, name) for _, one in left]) for name in ("image", "text", "level", "error"))
    score = _scores(tiles, image, text, level, error)
    for k, sign, wrong in ((0, 1, score > level + TIE_TOLERANCE), (1, -1, score < level - TIE_TOLERANCE)):
        parts = wrong.to(left[0][0].dtype).split([len(one.query) for _, one in left])
        for (counts, one), part in zip(left, parts, strict=True):
            counts[k].index_add_(0, one.query, part, alpha=sign)


def _scores(tiles: Tiles, image: Tensor, text: Tensor, level: Tensor, error: Tensor) -> Tensor:
    """float64 [K], on the true side of the levels [K]: exact where they are close to them."""
    score = tiles.gallery.nearly(image, text)
    near = (score - level).abs() <= TIE_TOLERANCE + tiles.close * error + _TINY
    still = torch.nonzero(near)[:, 0]
    if len(still):
        score[still] = tiles.gallery.exact(image[still], text[still])
    return score
