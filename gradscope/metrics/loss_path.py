"""One batch through the loss path in a chosen precision: what is printed, what is true, and what reaches the embeddings.

    fp64         everything in float64, from the rows given
    fp32         everything in fp32
    bf16, fp16   as under torch.autocast: products of the two embedding matrices, and so the logits, in that type; cross-entropy in fp32
    loss_scale   the loss is multiplied by it before the backward pass, the gradients are divided by it (in float64) afterwards

Zeros, lost pulls and row sums are counted on the raw tensors of that backward, before anything is divided. ``measure`` stops at the
N x D embeddings: no tower, no parameter, seconds on a CPU. The form of the loss is a ``PairLoss``: ``softmax_loss(HN().scores)``, or
any other that has scores and a loss per row. The truth is the float64 pass in residual form: plain cross-entropy in float64 loses the
pull too, once the residual is under 1e-16.

Source: paper facts, section 7.1 and 7.3; mixed precision with a loss scale: Micikevicius et al., 2018.
How to read: a loss of 0.0 beside log10_loss_true -9 and zero_share 0 is only the print that ended; zero_share 1 is the signal that did.
How it can mislead: the embeddings are taken as given. Half-precision towers round them before, and lose gradient again behind.
The order of the factors decides much in fp16: scale * (image @ text.T) keeps gradients 100 times larger in the product's backward than
(scale * image) @ text.T does. Denormals count as non-zero unless the process flushes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradscope.metrics.gradients import cosine, max_abs, squared_parts, true_norm
from gradscope.metrics.softmax import log_odds, log_softplus, per_direction, residual
from gradscope.objectives.scores import LOSS_FORMS, residual_rows
from gradscope.types import Scores

#: From exact to coarse. The half types go through torch.autocast.
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """A loss of two sets of paired rows, as functions of tensors; its batch value is the mean over anchors and directions of ``rows``.

    scores      image rows [N, D], text rows [N, D], scale [] -> Scores, differentiable
    rows        logits [N, N], anchors in rows -> loss [N], differentiable, as training computes it
    exact_rows  the same loss in the form that keeps its gradient longest in float64: what everything is held against; None: ``rows``
    log_rows    logits -> natural log of the true loss per anchor, [N] float64, without a floor; None: the exact pass's loss is used
    residual    logits -> what is left to learn per anchor, [N] float64 in 0..1; None: this loss has none
    balanced    each row of the logit gradient sums to zero in exact arithmetic
    """

    scores: Callable[[Tensor, Tensor, Tensor], Scores]
    rows: Callable[[Tensor], Tensor]
    exact_rows: Callable[[Tensor], Tensor] | None = None
    log_rows: Callable[[Tensor], Tensor] | None = None
    residual: Callable[[Tensor], Tensor] | None = None
    balanced: bool = False


def softmax_loss(scores: Callable[[Tensor, Tensor, Tensor], Scores], form: str = "plain") -> PairLoss:
    """The loss of InfoNCE and of HN, whose ``scores`` method is what to give. ``form`` is one of ``LOSS_FORMS``."""
    return PairLoss(
        scores=scores,
        rows=LOSS_FORMS[form],
        exact_rows=residual_rows,
        log_rows=lambda logits: log_softplus(log_odds(logits)),
        residual=residual,
        balanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The tensors of one forward and backward pass. Gradients are raw: still multiplied by ``loss_scale``."""

    logits: Tensor  # [N, N] in the precision's own type
    loss: Tensor  # [] as printed: not multiplied by the loss scale
    row_grads: Mapping[str, Tensor]  # "i2t"/"t2i" -> [N, N], anchors in rows: that direction's half of the logit gradient
    gradient: tuple[Tensor, Tensor]  # at image and text rows, [N, D] each
    loss_scale: float


@dataclass(frozen=True, kw_only=True)
class LossPath:
    """What one precision and loss scale make of a batch. Plain floats; nan where a value does not exist.

    loss             as printed, in the type of the path                      log10_loss_true  from the very logits, no floor
    residual         mean over both directions, from the very logits          gradient_norm    at the embeddings, float64, unscaled
    zero_share       exactly zero entries of both embedding gradients         zero_rows        rows that are zero throughout
    non_finite       share of entries that are inf or nan (the loss scale is too large)
    pull_lost        share of anchors whose own cell of the logit gradient is exactly 0 while another of the row is not
    row_sum          largest |row sum| / row absolute sum of the logit gradient: 0 in exact arithmetic; nan if not ``balanced``
    logit_rounding   largest |logit - its float64 value|, in logits
    gradient_error   |g - g64| / |g64| at the embeddings                      direction        cosine of g and g64, nan if one is 0
    """

    precision: str
    loss_scale: float
    loss: float
    log10_loss_true: float
    residual: float
    gradient_norm: float
    zero_share: float
    zero_rows: float
    non_finite: float
    pull_lost: float
    row_sum: float
    logit_rounding: float
    gradient_error: float
    direction: float


def measure(
    image: Tensor,
    text: Tensor,
    scale: Tensor | float,
    objective: PairLoss,
    *,
    precision: str,
    loss_scale: float = 1.0,
    exact: Pass | None = None,
) -> LossPath:
    """One batch in one precision, against float64.

    Args:
        image, text: unit rows [N, D] of paired items, fp32 or float64, N at least 2.
        scale: [] the multiplier after exp.
        precision: one of ``PRECISIONS``.
        loss_scale: the factor of mixed precision, above 0.
        exact: ``exact_pass`` of the same batch, where it is at hand; made here otherwise.

    Raises:
        ValueError: unknown precision, a loss scale that is not above 0, rows of different or unusable shape or type.
    """
    truth = exact or exact_pass(image, text, scale, objective)
    made = one_pass(image, text, scale, objective, precision=precision, loss_scale=loss_scale)
    values = {**_loss_values(made, truth, objective), **_gradient_values(made, truth, objective)}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return LossPath(precision=precision, loss_scale=loss_scale, **dict(zip(values, numbers, strict=True)))


def exact_pass(image: Tensor, text: Tensor, scale: Tensor | float, objective: PairLoss) -> Pass:
    """What every precision is held against: float64, in the form that loses nothing. Errors as ``measure``."""
    best = replace(objective, rows=objective.exact_rows or objective.rows)
    return one_pass(image, text, scale, best, precision="fp64")


def one_pass(
    image: Tensor, text: Tensor, scale: Tensor | float, objective: PairLoss, *, precision: str, loss_scale: float = 1.0
) -> Pass:
    """Forward and backward of one batch in ``precision``; arguments and errors as ``measure``."""
    _check(image, text, precision, loss_scale)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    half = _HALF.get(precision)
    with torch.enable_grad(), torch.autocast(image.device.type, half or torch.bfloat16, enabled=half is not None):
        rows = [t.detach().to(dtype, copy=True).requires_grad_() for t in (image, text)]
        logits = objective.scores(*rows, torch.as_tensor(scale, dtype=dtype, device=image.device).detach()).logits
        loss = (objective.rows(logits).mean() + objective.rows(logits.T).mean()) / 2
        gradient = torch.autograd.grad(loss * loss_scale, rows)
        row_grads = {d: _row_grad(m, objective, loss_scale) for d, m in per_direction(logits.detach()).items()}
    return Pass(
        logits=logits.detach(), loss=loss.detach(), row_grads=row_grads, gradient=(gradient[0], gradient[1]), loss_scale=loss_scale
    )


def lost_pulls(row_grad: Tensor) -> Tensor:
    """Which anchors have an exactly zero own cell while another cell of their row is not zero: bool [N]."""
    return (row_grad.diagonal() == 0) & (row_grad != 0).any(dim=1)


def row_sum_violation(row_grad: Tensor) -> Tensor:
    """|row sum| / row absolute sum per anchor, [N] float64; 0 for a row of zeros."""
    total, size = row_grad.double().sum(dim=1).abs(), row_grad.double().abs().sum(dim=1)
    return torch.where(size == 0, torch.zeros_like(size), total / size)


def relative_error(gradient: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """|g - exact| / |exact| over all entries, [] float64; formed on tensors divided by the largest entry of ``exact``."""
    unit = max_abs(exact).double()
    off = [(g.double() - e.double()) / unit for g, e in zip(gradient, exact, strict=True)]
    return torch.stack([(o**2).sum() for o in off]).sum().sqrt() / squared_parts(exact, max_abs(exact)).sum().sqrt()


def _row_grad(logits: Tensor, objective: PairLoss, loss_scale: float) -> Tensor:
    """One direction's half of the logit gradient, anchors in rows, raw: [N, N]."""
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(objective.rows(leaf).mean() / 2 * loss_scale, leaf)[0]


def _loss_values(made: Pass, truth: Pass, objective: PairLoss) -> dict[str, Tensor]:
    sides = per_direction(made.logits.double()).values()
    nan = torch.full((), math.nan, dtype=torch.float64, device=made.logits.device)
    if objective.log_rows is None:
        log10_true = truth.loss.log10()
    else:
        logs = torch.cat([objective.log_rows(m) for m in sides])  # [2N]
        log10_true = (torch.logsumexp(logs, 0) - math.log(len(logs))) / math.log(10.0)
    left = nan if objective.residual is None else torch.cat([objective.residual(m) for m in sides]).mean()
    rounding = (made.logits.double() - truth.logits).abs().max()
    return {"loss": made.loss, "log10_loss_true": log10_true, "residual": left, "logit_rounding": rounding}


def _gradient_values(made: Pass, truth: Pass, objective: PairLoss) -> dict[str, Tensor]:
    raw = torch.cat(made.gradient)  # [2N, D]
    unscaled = [g.double() / made.loss_scale for g in made.gradient]
    row_grads = list(made.row_grads.values())
    row_sum = torch.cat([row_sum_violation(g) for g in row_grads]).max()
    return {
        "gradient_norm": true_norm(unscaled),
        "zero_share": (raw == 0).double().mean(),
        "zero_rows": (raw == 0).all(dim=1).double().mean(),
        "non_finite": (~raw.isfinite()).double().mean(),
        "pull_lost": torch.cat([lost_pulls(g) for g in row_grads]).double().mean(),
        "row_sum": row_sum if objective.balanced else torch.full_like(row_sum, math.nan),
        "gradient_error": relative_error(unscaled, truth.gradient),
        "direction": cosine(unscaled, truth.gradient),
    }


def _check(image: Tensor, text: Tensor, precision: str, loss_scale: float) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision '{precision}'; choose from {', '.join(PRECISIONS)}.")
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise ValueError(f"the loss scale must be a number above 0; got {loss_scale}.")
    if image.ndim != 2 or image.shape != text.shape or len(image) < 2:
        shapes = f"{list(image.shape)} and {list(text.shape)}"
        raise ValueError(f"image and text rows must be two [N, D] matrices of one shape with N at least 2; got {shapes}.")
    if not {image.dtype, text.dtype} <= {torch.float32, torch.float64}:
        raise ValueError(f"rows must be fp32 or float64 (precision is what this function varies); got {image.dtype} and {text.dtype}.")
