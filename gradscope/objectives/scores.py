"""Unit rows -> scores -> loss per anchor. The mathematics that every pairwise objective shares.

    logits = scale * (cosine + margin)            L_i = 1/2 (CE of row i + CE of column i)
    logits = -inf where a cell is excluded: no probability, no push, a gradient of exactly 0; an anchor without any negative has loss 0

Source: InfoNCE / CLIP (Radford et al., 2021); HN-CLIP, section 2 for the margin.
How it can mislead: fp32 cross-entropy prints exactly 0.0 once the true loss is below about 1e-7, and its gradient on the
positive becomes exactly 0 while the negatives still have one; the residual form does neither.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.types import Scores


def dense_scores(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    margin: Tensor | None = None,
    excluded: Tensor | None = None,
    cosine: Tensor | None = None,
) -> Scores:
    """Scores of N images against N captions, in fp32 (or wider, if the rows are).

    Args:
        image, text: unit rows [N, D] of one dtype, fp32 or wider.
        scale: [] the multiplier after exp.
        margin: [N, N] with a zero diagonal, or None.
        excluded: bool [N, N], the cells that are no negatives, False on the diagonal; or None.
        cosine: [N, N] image @ text.T where it is known already; no gradient then reaches the rows.
    """
    cosine = image @ text.T if cosine is None else cosine  # [N, N]
    logits = scale * (cosine if margin is None else cosine + margin)
    if excluded is not None:
        # Added after the scale, whose gradient would be 0 * inf otherwise. A sum hands its gradient on as it is, strides included, so
        # that a mask without a True changes no bit, not even in the order in which the scale's gradient is summed.
        logits = logits + torch.zeros_like(logits).masked_fill(excluded, -math.inf)
    return Scores(cosine=cosine, margin=margin, logits=logits, scale=scale, excluded=excluded)


def plain_rows(logits: Tensor) -> Tensor:
    """Cross-entropy as everybody computes it, anchors in rows: [N, N] -> [N]."""
    target = torch.arange(logits.shape[0], device=logits.device)
    return F.cross_entropy(logits, target, reduction="none")


def residual_rows(logits: Tensor) -> Tensor:
    """The same loss as softplus(logsumexp of the negatives - positive), anchors in rows: [N, N] -> [N].

    Its gradient on the positive is formed from the negatives: the pull never rounds to zero while a push remains.
    """
    eye = torch.eye(logits.shape[0], dtype=torch.bool, device=logits.device)
    negatives = logits.masked_fill(eye, -math.inf)
    none = (negatives == -math.inf).all(dim=1)  # logsumexp of nothing is -inf, as it should be, but its gradient is nan
    push = torch.logsumexp(negatives.masked_fill(none[:, None], 0.0), dim=1).masked_fill(none, -math.inf)
    return _Softplus.apply(push - logits.diagonal())


#: --loss-form
LOSS_FORMS = {"plain": plain_rows, "residual": residual_rows}


def symmetric_loss(scores: Scores, form: str = "plain") -> Tensor:
    """The mean of the two directions per anchor: [N]. ``form`` is one of ``LOSS_FORMS``."""
    rows = LOSS_FORMS[form]
    return (rows(scores.logits) + rows(scores.logits.T)) / 2


class _Softplus(torch.autograd.Function):
    """softplus whose derivative is sigmoid(x) at every x, denormals included: torch's own softplus turns linear above 20, and its
    fp32 sigmoid divides by exp(-x), which overflows and gives 0 below x = -88."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return torch.logaddexp(x, torch.zeros_like(x))

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad * torch.exp(F.logsigmoid(x))
