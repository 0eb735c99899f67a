"""How much probability the negatives still hold, and which negatives hold it.

    mean, median, max, log10_mean .<direction>     of the residuals 1 - p_ii, summed over the negatives, float64
    mass_topK_by_H.<direction>                     mean over anchors of sum_{j in top K} p_ij
    share_topK_by_H.<direction>                    mean over anchors of that sum / residual;   K = 1, 5, 10
    uniform_topK                                   K / (width - 1): the share if all negatives were alike
    effective_negatives.<direction>                exp(entropy of p_ij / residual), mean over anchors: 1 ... width - 1

H is how "hardest" is ranked: by_caption (cosine of the anchor's caption with the other's), by_logit (image-caption cosine, without the
margin), or by_push (an objective's own logits, its margin included: those that hold most; without a margin it equals by_logit, and is
read for HN only). Where K exceeds the number of negatives, all of them are taken and share and uniform are 1. Captions excluded as
duplicates are no negatives; where that leaves none (a batch of one caption), residuals are 0 and shares nan.
Where the softmax is streamed its cells do not exist: residuals, uniform_topK and the shares by_push (InfoNCE: by_logit) remain.
How it can mislead: a share is high in any narrow softmax, so read it beside uniform_topK; ties at the K-th place are cut arbitrarily.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.kernels.largest import places_of_largest
from gradscope.metrics.duplicates import group_sizes
from gradscope.metrics.order_statistics import quantile
from gradscope.metrics.softmax import per_direction
from gradscope.objectives.margin import remembered_cosines
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Scores, Step


@quantities.register("residual")
@dataclass(frozen=True, kw_only=True)
class Residual:
    top: tuple[int, ...] = (1, 5, 10)
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "loss"
    left_out: ClassVar[str] = "masses, shares by_caption and effective_negatives"

    def __call__(self, step: Step) -> list[Reading]:
        readings = []
        hardest = self._hardest(step)
        for head in step.heads.values():
            uniform = _uniform(head, step.groups)
            readings += [_reading(head, f"uniform_top{k}", uniform(k), "share") for k in self.top]
            for direction, x in head.anchors.log_odds.items():
                readings += _residuals(head, direction, x)
                if head.scores is None:
                    readings += self._streamed(head, direction)
                else:
                    readings += self._shares(head, direction, head.scores, hardest[direction])
        return readings

    def _hardest(self, step: Step) -> dict[str, dict[str, Tensor]]:
        """direction -> ranking -> the K hardest negatives [N, K], hardest first; the same for every objective."""
        scores = next(iter(step.heads.values())).scores
        if scores is None:
            return {}
        captions = self._first(remembered_cosines(step.embeddings.text, step.memo), scores.excluded)
        return {
            name: {"caption": captions, "logit": self._first(matrix, scores.excluded)}
            for name, matrix in per_direction(scores.cosine).items()
        }

    def _first(self, matrix: Tensor, excluded: Tensor | None) -> Tensor:
        """The anchor itself is -inf, so last; so are captions excluded as its duplicates."""
        count = min(max(self.top), max(matrix.shape[1] - 1, 1))
        cells = matrix.clone(memory_format=torch.contiguous_format)  # of strips of a transposed matrix this takes eight times as long
        if excluded is not None:
            cells.masked_fill_(excluded, -math.inf)
        return places_of_largest(cells.fill_diagonal_(-math.inf), count)

    def _shares(self, head: Head, direction: str, scores: Scores, hardest: dict[str, Tensor]) -> list[Reading]:
        x = head.anchors.log_odds[direction]
        logits = per_direction(scores.logits)[direction]
        push = x + logits.diagonal().double()  # [N] log of the negatives' sum
        readings = []
        chosen = hardest if scores.margin is None else {**hardest, "push": self._first(logits, None)}
        for ranking, columns in chosen.items():
            own = torch.arange(len(logits), device=logits.device)[:, None] == columns  # where negatives are fewer than K
            cells = logits.gather(1, columns).double().masked_fill(own, -math.inf)
            ranked = torch.exp(cells - push[:, None])
            for k in self.top:
                share = ranked[:, :k].sum(dim=1)
                name = f"top{k}_by_{ranking}.{direction}"
                readings.append(_reading(head, f"share_{name}", share.mean(), "share"))
                readings.append(_reading(head, f"mass_{name}", (share * torch.sigmoid(x)).mean(), "probability"))
        number = head.anchors.effective[direction].mean()
        return [*readings, _reading(head, f"effective_negatives.{direction}", number, "negatives")]

    def _streamed(self, head: Head, direction: str) -> list[Reading]:
        """What the kernel read on its way, if it was asked to."""
        shares = head.anchors.top_share.get(direction)
        if shares is None:
            return []
        by = "push" if head.gamma else "logit"
        return [_reading(head, f"share_top{k}_by_{by}.{direction}", shares[min(k, len(shares)) - 1], "share") for k in self.top]


def _residuals(head: Head, direction: str, x: Tensor) -> list[Reading]:
    r = torch.sigmoid(x)  # [N]
    values = {
        "mean": r.mean(),
        "median": quantile(r, 0.5),
        "max": r.max(),
        "log10_mean": (torch.logsumexp(F.logsigmoid(x), 0) - math.log(len(x))) / math.log(10.0),
    }
    return [_reading(head, f"{key}.{direction}", value, "probability") for key, value in values.items()]


def _uniform(head: Head, groups: Tensor | None) -> Callable[[int], Tensor | float]:
    """The share of k of an anchor's negatives if all were alike; where duplicates are excluded, the mean over anchors."""
    width = len(head.anchors.positive)
    if width == 1:
        return lambda k: math.nan  # no negatives
    if groups is not None:
        left = width - group_sizes(groups)  # [N]
    elif head.scores is not None and head.scores.excluded is not None:
        left = width - 1 - head.scores.excluded.sum(dim=1)
    else:
        return lambda k: min(k, width - 1) / (width - 1)
    return lambda k: (left.clamp(max=k) / left.double()).mean()


def _reading(head: Head, key: str, value: Tensor | float, unit: str) -> Reading:
    return Reading(quantity="residual", key=key, term=head.name, value=value, unit=unit)
