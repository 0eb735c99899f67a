"""DCL: InfoNCE whose denominator leaves the positive out.

    L_i = logsumexp over j != i of s S_ij - s S_ii,       both directions averaged

Source: Decoupled Contrastive Learning (Yeh et al., 2022), with the negatives of the other tower only, as for two towers.
How to read it: the factor 1 - p_ii that InfoNCE puts before its gradient is gone, so the residual here is 1 at every row.
How it can mislead: the loss has no floor; it runs below 0 and goes on falling as the scale grows, so "a loss under 1e-3" means nothing
and its log10 is nan here. It teaches for ever: also rows that have nothing left to learn. A widely copied implementation
does not remove the positive but takes log(1e-45) = -103 off its logit: at temperature .1 it is gone, at CLIP's scale 100 it is not,
where that positive leads by as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics.softmax import per_direction
from gradscope.objectives import objectives
from gradscope.objectives.scores import dense_scores
from gradscope.types import Scores


@objectives.register("dcl")
@dataclass(frozen=True, kw_only=True)
class DCL:
    """Decoupled contrastive learning; to be read, not trained."""

    name: str = "dcl"
    trainable: ClassVar[bool] = False

    def scores(self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None) -> Scores:
        """Unit rows [N, D] twice and scale [] -> Scores; ``margin_text`` is not looked at."""
        return dense_scores(image, text, scale)

    def loss(self, scores: Scores) -> Tensor:
        """[N], of either sign."""
        return torch.stack([self._rows(m) for m in per_direction(scores.logits).values()]).mean(dim=0)

    def exact_loss(self, scores: Scores) -> Tensor:
        """The same: nothing cancels."""
        return self.loss(scores)

    def log10_loss(self, logits: Tensor) -> Tensor:
        """nan: the loss has no floor at 0."""
        return logits.new_full((), torch.nan, dtype=torch.float64)

    def residual(self, logits: Tensor) -> Tensor:
        """[2N] ones; nan where a row's logits are."""
        rows = torch.cat([self._rows(m) for m in per_direction(logits.double()).values()])
        return torch.ones_like(rows) + 0.0 * rows

    @staticmethod
    def _rows(logits: Tensor) -> Tensor:
        eye = torch.eye(logits.shape[0], dtype=torch.bool, device=logits.device)
        return logits.masked_fill(eye, -torch.inf).logsumexp(dim=1) - logits.diagonal()
