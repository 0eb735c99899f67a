"""Who won each query: the best positive, the best negative and their scores, in tiles, scored as in ranks.py.

    truth = the best-scoring positive       rival = the best-scoring negative       winner = truth if its score is not below the rival's

Scores closer than ``TIE_TOLERANCE`` are tied; of candidates that tie among themselves the first row of the gallery is named.

How to read it: which item a model confuses with which. How it can mislead: where truth and rival tie, recall gives the hit a chance
below 1, and naming a winner is a convention; ``tied`` marks those.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.metrics.gallery_scores import TIE_TOLERANCE, check_gallery, finite, finite_rows, leave_out_positives, positive_scores


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
def winners(images: Tensor, texts: Tensor, image_of_text: Tensor, *, block: int = 1024) -> tuple[Winners, Winners]:
    """(image -> text, text -> image). Memory is O(block * (block + D)). Raises ValueError as ``ranks`` does."""
    check_gallery(images, texts, image_of_text)
    if images.device.type == "mps":  # has no float64
        images, texts = images.cpu(), texts.cpu()
    owner = image_of_text.to(images.device)
    good_image, good_text = finite_rows(images), finite_rows(texts)
    truth_i2t, truth_t2i = _truths(images, texts, owner, good_text & good_image[owner], block)
    rival_i2t, rival_t2i = _Best(len(images), images.device), _Best(len(texts), images.device)
    for i in range(0, len(images), block):
        for j in range(0, len(texts), block):
            rows, columns = slice(i, i + block), slice(j, j + block)
            tile = finite(images[rows]) @ finite(texts[columns]).T
            tile.masked_fill_(~(good_image[rows, None] & good_text[columns]), -torch.inf)
            leave_out_positives(tile, owner[columns] - i)
            rival_i2t.take(rows, tile, j)
            rival_t2i.take(columns, tile.T, i)
    return _winners("i2t", truth_i2t, rival_i2t), _winners("t2i", truth_t2i, rival_t2i)


def _truths(images: Tensor, texts: Tensor, owner: Tensor, good: Tensor, block: int) -> tuple[_Best, _Best]:
    """The best own caption of each image, and the own image of each caption; named even where no score is finite."""
    by_image, by_text = _Best(len(images), images.device), _Best(len(texts), images.device)
    by_text.index = owner
    by_text.score = positive_scores(images, texts, owner, block).masked_fill(~good, -torch.inf)
    by_image.score.scatter_reduce_(0, owner, by_text.score, "amax")
    top = by_text.score >= by_image.score[owner] - TIE_TOLERANCE
    captions = torch.arange(len(texts), device=images.device)
    by_image.index.fill_(len(texts)).scatter_reduce_(0, owner[top], captions[top], "amin")
    return by_image, by_text


class _Best:
    """The running best candidate of each query: the first row among equals."""

    def __init__(self, queries: int, device: torch.device) -> None:
        self.score = torch.full((queries,), -torch.inf, dtype=torch.float64, device=device)
        self.index = torch.full((queries,), -1, dtype=torch.int64, device=device)

    def take(self, queries: slice, scores: Tensor, offset: int) -> None:
        """Candidates ``offset`` and on, one column each, for some queries."""
        top = scores.amax(1)
        before = self.score[queries]
        better = torch.nonzero((top > before + TIE_TOLERANCE) & torch.isfinite(top))[:, 0]
        # Few improve after the first tiles. Rounding separates equal embeddings in the last digit, so the first within the
        # tolerance is named.
        place = (scores[better] >= top[better, None] - TIE_TOLERANCE).to(torch.uint8).argmax(1)
        rows = better + queries.start
        self.score[rows] = top[better]
        self.index[rows] = place + offset


def _winners(direction: str, truth: _Best, rival: _Best) -> Winners:
    return Winners(
        direction=direction,
        truth=truth.index.cpu().numpy(),
        truth_score=truth.score.cpu().numpy(),
        rival=rival.index.cpu().numpy(),
        rival_score=rival.score.cpu().numpy(),
    )
