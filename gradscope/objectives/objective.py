"""What every objective answers about one batch: its loss, and the true values behind it.

    loss         [N]   per anchor, in the dtype of the logits, as training computes it
    exact_loss   [N]   the same loss, formed so that its gradient survives longest
    log10_loss   []    log10 of the batch-mean loss of the very same logits, float64, without a floor
    residual     [2N]  how much of the positive's pull is left per anchor, image rows first, then caption rows: |dL_i / d logit_ii|

For a softmax the residual is 1 - p_ii, formed from the negatives. ``trainable`` marks what `gradscope train` accepts; the others are
there to be read: what would they still teach on these rows? Source: HN-CLIP, section 2, for the first two objectives.
How it can mislead: a residual belongs to its objective. That of a decoupled loss is 1 by construction, also where all is learnt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gradscope.metrics.softmax import log10_batch_loss, per_direction, residual
from gradscope.objectives.scores import symmetric_loss
from gradscope.types import Scores


class Objective(Protocol):
    """The seam of every reader."""

    trainable: ClassVar[bool]

    def scores(self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None) -> Scores: ...

    def loss(self, scores: Scores) -> Tensor: ...

    def exact_loss(self, scores: Scores) -> Tensor: ...

    def log10_loss(self, logits: Tensor) -> Tensor: ...

    def residual(self, logits: Tensor) -> Tensor: ...


class SoftmaxObjective(ABC):
    """The answers of a plain softmax over the logits."""

    trainable: ClassVar[bool] = True

    @abstractmethod
    def scores(self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None) -> Scores:
        """Unit rows [N, D] twice, scale [], and for some margins another encoder's rows of the captions -> Scores."""

    def loss(self, scores: Scores) -> Tensor:
        """Cross-entropy, the mean of both directions: [N]."""
        return symmetric_loss(scores)

    def exact_loss(self, scores: Scores) -> Tensor:
        """The residual form: the pull does not round to 0 while a push remains. [N]."""
        return symmetric_loss(scores, "residual")

    def log10_loss(self, logits: Tensor) -> Tensor:
        """[N, N] -> [] float64."""
        return log10_batch_loss(logits)

    def residual(self, logits: Tensor) -> Tensor:
        """[N, N] -> 1 - p_ii, [2N] float64."""
        return torch.cat([residual(m) for m in per_direction(logits).values()])
