"""Who won each query: the best positive, the best negative and their scores, in tiles, scored as in ranks.py.

    truth = the best-scoring positive       rival = the best-scoring negative       winner = truth if its score is not below the rival's

Scores closer than ``ranks.TIE_TOLERANCE`` are tied; of candidates that tie among themselves the first row of the gallery is named.

How to read it: which item a model confuses with which. How it can mislead: where truth and rival tie, recall gives the hit a chance
below 1, and naming a winner is a convention; ``tied`` marks those.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradscope.metrics.ranks import TIE_TOLERANCE, check_gallery, finite, finite_rows


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
    best = {(d, kind): _Best(n, images.device) for d, n in (("i2t", len(images)), ("t2i", len(texts))) for kind in (True, False)}
    for i in range(0, len(images), block):
        for j in range(0, len(texts), block):
            rows, columns = slice(i, i + block), slice(j, j + block)
            tile = finite(images[rows]) @ finite(texts[columns]).T
            tile.masked_fill_(~(good_image[rows, None] & good_text[columns]), -torch.inf)
            mine = owner[columns] == torch.arange(i, i + len(tile), device=images.device)[:, None]
            for kind, mask in ((True, ~mine), (False, mine)):
                scores = tile.masked_fill(mask, -torch.inf)
                best["i2t", kind].take(rows, scores, j)
                best["t2i", kind].take(columns, scores.T, i)
    # A positive whose score is not finite was never taken: the query still has one, its first.
    for direction, first in (("i2t", _first_caption(owner, len(images))), ("t2i", owner)):
        truth = best[direction, True]
        truth.index = torch.where(truth.index < 0, first, truth.index)
    return _winners("i2t", best), _winners("t2i", best)


class _Best:
    """The running best candidate of each query: the first row among equals."""

    def __init__(self, queries: int, device: torch.device) -> None:
        self.score = torch.full((queries,), -torch.inf, dtype=torch.float64, device=device)
        self.index = torch.full((queries,), -1, dtype=torch.int64, device=device)

    def take(self, queries: slice, scores: Tensor, offset: int) -> None:
        """Candidates ``offset`` and on, one column each, for some queries."""
        top = scores.amax(1)
        # Rounding separates equal embeddings in the last digit, so the first within the tolerance is named.
        place = (scores >= top[:, None] - TIE_TOLERANCE).int().argmax(1) + offset
        better = top > self.score[queries] + TIE_TOLERANCE
        better |= torch.isneginf(self.score[queries]) & torch.isfinite(top)
        self.score[queries] = torch.where(better, top, self.score[queries])
        self.index[queries] = torch.where(better, place, self.index[queries])


def _first_caption(owner: Tensor, n_images: int) -> Tensor:
    first = torch.full((n_images,), len(owner), dtype=torch.int64, device=owner.device)
    return first.scatter_reduce_(0, owner, torch.arange(len(owner), device=owner.device), "amin")


def _winners(direction: str, best: dict[tuple[str, bool], _Best]) -> Winners:
    truth, rival = best[direction, True], best[direction, False]
    return Winners(
        direction=direction,
        truth=truth.index.cpu().numpy(),
        truth_score=truth.score.cpu().numpy(),
        rival=rival.index.cpu().numpy(),
        rival_score=rival.score.cpu().numpy(),
    )
