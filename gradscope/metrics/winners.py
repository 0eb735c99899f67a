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

from gradscope.metrics.gallery_scores import TIE_TOLERANCE, Gallery, Tiles, each_tile, open_tiles
from gradscope.metrics.pair_sweep import default_block
from gradscope.metrics.tile_leaders import Job, few, jobs, leaders

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
    """(image -> text, text -> image). ``block``, and so memory, as in ``ranks``. Raises ValueError as that does."""
    gallery = Gallery.of(images, texts, image_of_text)
    block = block or default_block(gallery.images.device)
    truth_i2t, truth_t2i = _truths(gallery)
    device = gallery.images.device
    by_image, by_text = _Best(len(images), device), _Best(len(texts), device)
    places = list(product(range(0, len(images), block), range(0, len(texts), block)))
    with open_tiles(gallery, block) as tiles:
        todo = jobs(places, block, by_image.score, by_text.score)
        with each_tile(lambda job: _look(tiles, job), todo, len(places), device) as found:
            for images_found, texts_found in found:
                by_image.take(images_found)
                by_text.take(texts_found)
    return _winners("i2t", truth_i2t, by_image), _winners("t2i", truth_t2i, by_text)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """Of some queries of a tile, each once: the best score there, and the first candidate tied with it. [K] each."""

    query: Tensor  # int64
    candidate: Tensor  # int64
    score: Tensor  # float64


@torch.no_grad()
def _look(tiles: Tiles, job: Job) -> list[_Found]:
    """What one tile says of its images and of its captions, where it may be news: from fp32 unless that leaves too much open."""
    if tiles.fp32:
        tile = tiles.single(job.i, job.j)
        errors = tiles.errors[0][job.i :], tiles.errors[1][job.j :]
        sides = zip(job.known, errors, (1, 0), strict=True)
        cells = [leaders(tile, known, error[: len(known)], dim, tie=TIE_TOLERANCE) for known, error, dim in sides]
        if few(cells, tile):
            (image, text), (picture, caption) = [(job.i + row, job.j + column) for row, column in cells]
            exact = tiles.gallery.exact
            return [_first_best(image, text, exact(image, text)), _first_best(caption, picture, exact(picture, caption))]
    wide = tiles.double(job.i, job.j)
    return [_first_of_all(wide, job.i, job.j), _first_of_all(wide.T, job.j, job.i)]


def _first_best(query: Tensor, candidate: Tensor, score: Tensor) -> _Found:
    """Of pairs [K]; all that a query has of its best in the tile are among them."""
    rows, place = query.unique(return_inverse=True)
    best = torch.full(rows.shape, -torch.inf, dtype=torch.float64, device=rows.device).scatter_reduce_(0, place, score, "amax")
    # Rounding separates equal embeddings in the last digit, so the first within the tolerance is named.
    tied = score >= best[place] - TIE_TOLERANCE
    first = torch.full_like(rows, _NOBODY).scatter_reduce_(0, place[tied], candidate[tied], "amin")
    return _Found(query=rows, candidate=first, score=best)


def _first_of_all(scores: Tensor, query: int, candidate: int) -> _Found:
    """Of a float64 tile that starts at a query and a candidate, queries in its rows."""
    best = scores.amax(1)
    first = (scores >= best[:, None] - TIE_TOLERANCE).byte().argmax(1)
    return _Found(query=query + torch.arange(len(best), device=best.device), candidate=candidate + first, score=best)


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

    def take(self, found: _Found) -> None:
        """What the next tile says."""
        known = self.score[found.query]
        better = found.score > known + TIE_TOLERANCE
        self.index[found.query[better]] = found.candidate[better]
        self.score[found.query] = torch.maximum(known, found.score)


def _winners(direction: str, truth: _Best, rival: _Best) -> Winners:
    return Winners(
        direction=direction,
        truth=truth.index.cpu().numpy(),
        truth_score=truth.score.cpu().numpy(),
        rival=rival.index.cpu().numpy(),
        rival_score=rival.score.cpu().numpy(),
    )
