"""InfoNCE whose negatives are weighted by their own hardness.

    L_i = -log[ e^(l_ii) / (e^(l_ii) + sum over j != i of w_ij e^(l_ij)) ],     l = s S
    w_ij = (N - 1) e^(beta l_ij) / sum over k != i of e^(beta l_ik)             both directions averaged

Source: Robinson et al., 2021, with their debiasing term tau+ = 0; for two towers as HN-NCE (DiHT, Radenovic et al., 2023) with
alpha = 1. As in the published code the weights carry gradient. beta 0 equals InfoNCE. It is formed in logs: e^(100) is no fp32 number.
    log of the weighted sum = log(N - 1) + logsumexp((1 + beta) l) - logsumexp(beta l)
How to read it: hardness is the image-caption score itself, where HN takes it from the captions alone.
How it can mislead: weights of mean 1 can multiply the hardest negative by at most N - 1, that is log(N - 1) nat, 2.7 at width 16; a gap
of 20 logits stays a gap. Beside a margin of scale * gamma * G it hardly moves a saturated batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.softmax import log_softplus, per_direction
from gradscope.objectives import objectives
from gradscope.objectives.scores import dense_scores
from gradscope.types import Scores


@objectives.register("hardness_weighted")
@dataclass(frozen=True, kw_only=True)
class HardnessWeighted:
    """Hard negatives by reweighting; to be read, not trained."""

    beta: float = 0.5
    name: str = "hardness_weighted"
    trainable: ClassVar[bool] = False

    def scores(self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None) -> Scores:
        """Unit rows [N, D] twice and scale [] -> Scores; ``margin_text`` is not looked at. The weights belong to the loss."""
        return dense_scores(image, text, scale)

    def loss(self, scores: Scores) -> Tensor:
        """[N], the mean of both directions."""
        rows = [torch.logaddexp(m.diagonal(), self._push(m)) - m.diagonal() for m in per_direction(scores.logits).values()]
        return torch.stack(rows).mean(dim=0)

    def exact_loss(self, scores: Scores) -> Tensor:
        """[N]; exact in float64, where ``loss`` loses the pull of a row whose residual is under 1e-16."""
        rows = [F.softplus(self._push(m) - m.diagonal(), threshold=700) for m in per_direction(scores.logits).values()]
        return torch.stack(rows).mean(dim=0)

    def log10_loss(self, logits: Tensor) -> Tensor:
        """[N, N] -> [] float64."""
        x = self._log_odds(logits)
        return (torch.logsumexp(log_softplus(x), dim=0) - math.log(len(x))) / math.log(10.0)

    def residual(self, logits: Tensor) -> Tensor:
        """The probability of all weighted negatives, [2N] float64."""
        return torch.sigmoid(self._log_odds(logits))

    def _log_odds(self, logits: Tensor) -> Tensor:
        return torch.cat([self._push(m) - m.diagonal() for m in per_direction(logits.double()).values()])

    def _push(self, logits: Tensor) -> Tensor:
        """Log of the weighted sum over the negatives of each row, [N]."""
        n = logits.shape[0]
        eye = torch.eye(n, dtype=torch.bool, device=logits.device)
        hard = (1 + self.beta) * logits
        easy = self.beta * logits
        lifted = [m.masked_fill(eye, -torch.inf).logsumexp(dim=1) for m in (hard, easy)]
        return math.log(n - 1) + lifted[0] - lifted[1]
