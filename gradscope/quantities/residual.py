"""How much probability the negatives still hold, and which negatives hold it.

    mean, median, max, log10_mean .<direction>     of the residuals 1 - p_ii, summed over the negatives, float64
    mass_topK_by_H.<direction>                     mean over anchors of sum_{j in top K} p_ij
    share_topK_by_H.<direction>                    mean over anchors of that sum / residual;   K = 1, 5, 10
    uniform_topK                                   K / (width - 1): the share if all negatives were alike
    effective_negatives.<direction>                exp(entropy of p_ij / residual), mean over anchors: 1 ... width - 1

H is how "hardest" is ranked: by_caption (cosine of the anchor's caption with the other's) or by_logit (image-caption cosine, without
the margin). Where K exceeds the number of negatives, all of them are taken and share and uniform are 1. Captions excluded as duplicates
are no negatives; where that leaves none (a batch of one caption), residuals are 0 and shares nan.
How it can mislead: a share is high in any narrow softmax, so read it beside uniform_topK; ties at the K-th place are cut arbitrarily.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.softmax import entropy_number, log_odds, negative_log_shares, negatives, per_direction
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Scores, Step


@quantities.register("residual")
@dataclass(frozen=True, kw_only=True)
class Residual:
    top: tuple[int, ...] = (1, 5, 10)
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "loss"

    def __call__(self, step: Step) -> list[Reading]:
        readings = []
        hardest = self._hardest(step)
        for head in step.heads.values():
            readings += [self._reading(head, f"uniform_top{k}", _uniform(head.scores, k), "share") for k in self.top]
            for direction, logits in per_direction(head.scores.logits, head.directions).items():
                readings += self._direction(head, direction, logits, hardest[direction])
        return readings

    def _hardest(self, step: Step) -> dict[str, dict[str, Tensor]]:
        """direction -> ranking -> the K hardest negatives [N, K], hardest first; the same for every objective.

        The anchor itself is -inf, so last; so are captions excluded as its duplicates, with a share of 0.
        """
        scores = next(iter(step.heads.values())).scores
        count = min(max(self.top), max(scores.cosine.shape[1] - 1, 1))

        def hardest(matrix: Tensor) -> Tensor:
            return negatives(matrix, scores.excluded).topk(count, dim=1).indices

        captions = hardest(step.embeddings.text @ step.embeddings.text.T)
        return {name: {"caption": captions, "logit": hardest(matrix)} for name, matrix in per_direction(scores.cosine).items()}

    def _direction(self, head: Head, direction: str, logits: Tensor, hardest: dict[str, Tensor]) -> list[Reading]:
        x = log_odds(logits)
        r = torch.sigmoid(x)  # [N]
        shares = negative_log_shares(logits)  # [N, N]
        values = {
            "mean": r.mean(),
            "median": torch.quantile(r, 0.5),
            "max": r.max(),
            "log10_mean": (torch.logsumexp(F.logsigmoid(x), 0) - math.log(len(x))) / math.log(10.0),
        }
        readings = [self._reading(head, f"{key}.{direction}", value, "probability") for key, value in values.items()]
        for ranking, chosen in hardest.items():
            ranked = shares.gather(1, chosen).exp()
            for k in self.top:
                share = ranked[:, :k].sum(dim=1)
                name = f"top{k}_by_{ranking}.{direction}"
                readings.append(self._reading(head, f"share_{name}", share.mean(), "share"))
                readings.append(self._reading(head, f"mass_{name}", (share * r).mean(), "probability"))
        number = entropy_number(shares).mean()
        readings.append(self._reading(head, f"effective_negatives.{direction}", number, "negatives"))
        return readings

    @staticmethod
    def _reading(head: Head, key: str, value: Tensor | float, unit: str) -> Reading:
        return Reading(quantity="residual", key=key, term=head.name, value=value, unit=unit)


def _uniform(scores: Scores, k: int) -> Tensor | float:
    """The share of k of an anchor's negatives if all were alike; where duplicates are excluded, the mean over anchors."""
    width = scores.logits.shape[1]
    if width == 1:
        return math.nan  # no negatives
    if scores.excluded is None:
        return min(k, width - 1) / (width - 1)
    left = width - 1 - scores.excluded.sum(dim=1)  # [N]
    return (left.clamp(max=k) / left.double()).mean()
