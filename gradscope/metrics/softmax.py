"""True values of a contrastive softmax, from its logits, in float64.

With x_i = logsumexp of the negatives of row i minus its positive logit:
    residual      1 - p_ii = sigmoid(x_i)            formed from the negatives, never as 1 - p
    row loss      -log p_ii = softplus(x_i)
    log row loss  log softplus(x_i), finite wherever x_i is

Source: the identity p_ii = 1 / (1 + exp(x_i)); the residual is the coupling factor of DCL (Yeh et al., 2022).
How to read: a residual of 1e-6 says that the row's pull and push are both a millionth of their largest size.
Logits of -inf are no negatives: they have no share. An anchor without any has x = -inf, so loss and residual 0, and undefined shares.
How it can mislead: the values are exact FOR THE LOGITS GIVEN. If those were rounded (bf16, or fp32 cosines at scale 100), so is
the answer; and two tensors are needed to know whether the objective still teaches: a large loss is not a useful gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.types import DIRECTIONS

#: Below this, log softplus(x) and x agree to the last bit of float64.
_LINEAR_BELOW = -40.0


def per_direction(matrix: Tensor, directions: Sequence[str] = DIRECTIONS) -> dict[str, Tensor]:
    """The readings of a square matrix [N, N] whose row is an image and whose column is a caption: anchors first."""
    return {direction: matrix if direction == "i2t" else matrix.T for direction in directions}


def negatives(matrix: Tensor, excluded: Tensor | None = None) -> Tensor:
    """[N, N] -> float64 [N, N] with -inf on the diagonal, and in the ``excluded`` cells [N, N] that are no negatives."""
    eye = torch.eye(matrix.shape[0], dtype=torch.bool, device=matrix.device)
    return matrix.double().masked_fill(eye if excluded is None else eye | excluded, -math.inf)


def log_odds(logits: Tensor) -> Tensor:
    """x [N]: log of (probability of all negatives / probability of the positive), anchors in rows. Float64."""
    return torch.logsumexp(negatives(logits), dim=1) - logits.diagonal().double()


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + exp(x))) without underflow, for float64 x."""
    return torch.where(x < _LINEAR_BELOW, x, F.softplus(x.clamp_min(_LINEAR_BELOW), threshold=40.0).log())


def residual(logits: Tensor) -> Tensor:
    """1 - p_ii per anchor [N], float64, relative error about 1e-15 for the logits given."""
    return torch.sigmoid(log_odds(logits))


def log10_batch_loss(logits: Tensor, directions: Sequence[str] = DIRECTIONS) -> Tensor:
    """log10 of the batch-mean loss over anchors and directions, [] float64; never meets a floor."""
    x = torch.cat([log_odds(m) for m in per_direction(logits, directions).values()])  # [2N]
    return (torch.logsumexp(log_softplus(x), dim=0) - math.log(len(x))) / math.log(10.0)


def negative_log_shares(logits: Tensor) -> Tensor:
    """log of each negative's share of its row's residual mass, [N, N] float64, -inf on the diagonal; rows sum to 1 in exp."""
    masked = negatives(logits)
    return masked - torch.logsumexp(masked, dim=1, keepdim=True)


def push_shares(logits: Tensor, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The share of all residual mass that lies on the cells of each mask, over all rows of all matrices: [] float64 each.

    Args:
        logits: [K, N, N], anchors in rows.
        masks: bool [K, N, N] each; a positive does not count, whatever its mask says.
    """
    logs = torch.stack([negatives(m) - torch.logsumexp(m.double(), dim=1, keepdim=True) for m in logits])  # log p_ij
    push = torch.exp(logs - logs.max())
    total = push.sum()
    return {name: push.masked_fill(~mask, 0.0).sum() / total for name, mask in masks.items()}


def effective_number(weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 of non-negative weights [N], float64; nan when all are zero.

    Formed on w / max w, so that weights of 1e-200 count as well as weights of 1.
    """
    w = weights.double()
    w = w / w.max()
    return w.sum() ** 2 / (w**2).sum()


def entropy_number(log_shares: Tensor) -> Tensor:
    """exp(entropy) of rows of log shares [N, M] -> [N]: how many negatives carry the row's mass, between 1 and M."""
    shares = log_shares.exp()
    return torch.exp(-(shares * log_shares.masked_fill(shares == 0, 0.0)).sum(dim=1))
