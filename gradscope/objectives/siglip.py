"""SigLIP: every cell of the score matrix is a yes-or-no question of its own.

    L = -1/N sum over i, j of log sigmoid(z_ij (s S_ij + b)),      z_ij = 1 where i = j, else -1

Source: Sigmoid Loss for Language Image Pre-Training (Zhai et al., 2023). b is learned there, from -10 at scale 10.
How to read it: the residual is 1 - sigmoid(s S_ii + b), the pull that is left; at the bias that minimises the loss the pulls and the
pushes of a batch are equal in sum (``best_bias``).
How it can mislead: rows trained by a softmax never saw a bias. A bias of -10 beside a scale of 100 puts every cosine over .1 on the
"yes" side: the loss is huge and the gradient only says that the bias is wrong. Read such rows at their best bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.softmax import log_softplus
from gradscope.objectives import objectives
from gradscope.objectives.scores import dense_scores
from gradscope.types import Scores

#: Halvings of the bracket of the bias: 2^-45 of a few hundred logits is 1e-11.
_HALVINGS = 45


@objectives.register("siglip")
@dataclass(frozen=True, kw_only=True)
class SigLIP:
    """The pairwise sigmoid loss at one bias; to be read, not trained."""

    bias: float = -10.0
    name: str = "siglip"
    trainable: ClassVar[bool] = False

    def scores(self, image: Tensor, text: Tensor, scale: Tensor, margin_text: Tensor | None = None) -> Scores:
        """Unit rows [N, D] twice and scale [] -> Scores, without the bias: that belongs to the loss."""
        return dense_scores(image, text, scale)

    def loss(self, scores: Scores) -> Tensor:
        """[N]: half of the cells of anchor i's row, half of its column; the mean is the paper's loss."""
        cells = -F.logsigmoid(_signed(scores.logits + self.bias))  # [N, N]
        return (cells.sum(dim=1) + cells.sum(dim=0)) / 2

    def exact_loss(self, scores: Scores) -> Tensor:
        """The same: the gradient of a cell is one sigmoid."""
        return self.loss(scores)

    def log10_loss(self, logits: Tensor) -> Tensor:
        """[N, N] -> [] float64."""
        cells = log_softplus(-_signed(logits.double() + self.bias))
        return (torch.logsumexp(cells.flatten(), dim=0) - math.log(len(logits))) / math.log(10.0)

    def residual(self, logits: Tensor) -> Tensor:
        """1 - sigmoid of the positive, [2N] float64; the same in both directions."""
        return torch.sigmoid(-(logits.diagonal().double() + self.bias)).repeat(2)


def best_bias(logits: Sequence[Tensor]) -> float:
    """The bias at which the loss over these batches [N, N] is smallest: where the pulls and the pushes are equal in sum.

    Their difference rises with the bias, so halving a bracket finds it. Nan if a logit is.
    """
    stacked = torch.stack(list(logits)).double()  # [K, N, N]
    positive = stacked.diagonal(dim1=1, dim2=2)
    eye = torch.eye(stacked.shape[1], dtype=torch.bool, device=stacked.device)
    negatives = stacked.masked_fill(eye, -math.inf)  # subtracting the positives from a sum of all would leave their rounding
    low, high = -stacked.max() - 40 - math.log(stacked.shape[1]), -stacked.min() + 40 + math.log(stacked.shape[1])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        pushes = torch.sigmoid(negatives + middle).sum()
        pulls = torch.sigmoid(-positive - middle).sum()
        low, high = (torch.where(pushes < pulls, middle, low), torch.where(pushes < pulls, high, middle))
    return float((low + high) / 2)


def _signed(logits: Tensor) -> Tensor:
    """Positive where the answer is the right one: the diagonal as it is, the rest negated."""
    eye = torch.eye(logits.shape[0], dtype=torch.bool, device=logits.device)
    return torch.where(eye, logits, -logits)
