"""Who won each query: the best positive, the best negative and their scores, in tiles, scored as in ranks.py.

    truth = the best-scoring positive       rival = the best-scoring negative       winner = truth if its score is not below the rival's

Scores closer than ``TIE_TOLERANCE`` are tied; of candidates that tie among themselves the first row of the gallery is named.

How to read it: which item a model confuses with which. How it can mislead: where truth and rival tie, recall gives the hit a chance
below 1, and naming a winner is a convention; ``tied`` marks those.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.metrics.gallery_scores import CROWDED, TIE_TOLERANCE, Gallery, Tiles, open_tiles
from gradscope.metrics.pair_sweep import default_block

_NOBODY = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Winners:
    """One entry per query of one direction; rows are candidates (captions for i2t, images for t2i).

    -1 with minus infinity: there is no such candidate, or none whose score is finite (a truth is named in any case).
    """

    direction: str
    truth: NDArray[np.int64]
    truth_score: NDArray[np.float64]
    rival: NDArray[np.int64]
    rival_score: NDArray[np.float64]

    @property
    def tied(self) -> NDArray[np.bool_]:
        """Truth and rival within the tolerance."""
        with np.errstate(invalid="ignore"):  # minus infinity less itself
            return np.abs(self.truth_score - self.rival_score) <= TIE_TOLERANCE

    @property
    def winner(self) -> NDArray[np.int64]:
        """-1 where no score is finite."""
        wins = np.isfinite(self.truth_score) & (self.truth_score >= self.rival_score - TIE_TOLERANCE)
        return np.where(wins, self.truth, self.rival)

    @property
    def winner_score(self) -> NDArray[np.float64]:
        return np.where(self.winner == self.truth, self.truth_score, self.rival_score)


@torch.no_grad()
def winners(images: Tensor, texts: Tensor, image_of_text: Tensor, *, block: int | None = None) -> tuple[Winners, Winners]:
    """(image -> text, text -> image). Memory is O(block * (block + D)), ``block`` as in ``ranks``. Raises ValueError as that does."""
    gallery = Gallery.of(images, texts, image_of_text)
    block = block or default_block(gallery.images.device)
    truth_i2t, truth_t2i = _truths(gallery)
    device = gallery.images.device
    rivals = _Best(len(images), device), _Best(len(texts), device)
    with open_tiles(gallery, block) as tiles:
        for i, j in product(range(0, len(images), block), range(0, len(texts), block)):
            _take(tiles, i, j, *rivals)
    return _winners("i2t", truth_i2t, rivals[0]), _winners("t2i", truth_t2i, rivals[1])


def _take(tiles: Tiles, i: int, j: int, by_image: _Best, by_text: _Best) -> None:
    """One tile, for both directions: fp32 unless that leaves too much open."""
    rows, columns = slice(i, i + tiles.block), slice(j, j + tiles.block)
    if tiles.fp32:
        tile = tiles.single(i, j)
        rivals = (
            by_image.rivals(rows, tile, tiles.errors[0][rows]),
            by_text.rivals(columns, tile.T, tiles.errors[1][columns]),
        )
        if sum(len(query) for query, _ in rivals) <= CROWDED * tile.numel():
            (image, text), (caption, picture) = rivals
            by_image.take(i + image, j + text, tiles.gallery.exact(i + image, j + text))
            by_text.take(j + caption, i + picture, tiles.gallery.exact(i + picture, j + caption))
            return
    wide = tiles.double(i, j)
    for best, part, scores, start in ((by_image, rows, wide, (i, j)), (by_text, columns, wide.T, (j, i))):
        query, candidate = best.rivals(part, scores, torch.zeros_like(scores[:, 0]))
        best.take(start[0] + query, start[1] + candidate, scores[query, candidate])


def _truths(gallery: Gallery) -> tuple[_Best, _Best]:
    """The best own caption of each image, and the own image of each caption; named even where no score is finite."""
    images, texts, owner = len(gallery.images), len(gallery.texts), gallery.owner
    by_image, by_text = _Best(images, owner.device), _Best(texts, owner.device)
    by_text.index, by_text.score = owner, gallery.positive_scores()
    by_image.score.scatter_reduce_(0, owner, by_text.score, "amax")
    top = by_text.score >= by_image.score[owner] - TIE_TOLERANCE
    captions = torch.arange(texts, device=owner.device)
    by_image.index.fill_(texts).scatter_reduce_(0, owner[top], captions[top], "amin")
    return by_image, by_text


class _Best:
    """The running best candidate of each query: the first row among equals."""

    def __init__(self, queries: int, device: torch.device) -> None:
        self.score = torch.full((queries,), -torch.inf, dtype=torch.float64, device=device)
        self.index = torch.full((queries,), -1, dtype=torch.int64, device=device)

    def rivals(self, queries: slice, scores: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """(query, candidate) [K], numbers in a tile, of all that may be better than what is known, and the best there or tied with it.

        ``scores`` [Q, C] are right to within ``error`` [Q]. Few queries improve after the first tiles.
        """
        top = scores.amax(1).double()
        some = torch.nonzero((top + error > self.score[queries] + TIE_TOLERANCE) & torch.isfinite(top))[:, 0]
        floor = top[some] - 2.0 * error[some] - TIE_TOLERANCE
        if scores.dtype == torch.float32:
            floor -= top[some].abs() * 2.0**-22  # for its rounding
        place, candidate = torch.nonzero(scores[some] >= floor.to(scores.dtype)[:, None], as_tuple=True)
        return some[place], candidate

    def take(self, query: Tensor, candidate: Tensor, score: Tensor) -> None:
        """float64 scores [K] of pairs of row numbers; all that a query has of its best in this tile are among them."""
        rows, place = query.unique(return_inverse=True)
        best = torch.full(rows.shape, -torch.inf, dtype=torch.float64, device=rows.device).scatter_reduce_(0, place, score, "amax")
        tied = score >= best[place] - TIE_TOLERANCE
        # Rounding separates equal embeddings in the last digit, so the first within the tolerance is named.
        first = torch.full_like(rows, _NOBODY).scatter_reduce_(0, place[tied], candidate[tied], "amin")
        better = best > self.score[rows] + TIE_TOLERANCE
        self.score[rows[better]] = best[better]
        self.index[rows[better]] = first[better]


def _winners(direction: str, truth: _Best, rival: _Best) -> Winners:
    return Winners(
        direction=direction,
        truth=truth.index.cpu().numpy(),
        truth_score=truth.score.cpu().numpy(),
        rival=rival.index.cpu().numpy(),
        rival_score=rival.score.cpu().numpy(),
    )
