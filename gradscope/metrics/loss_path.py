"""One batch through the loss path in a chosen precision: what is printed, what is true, and what reaches the embeddings.

    fp64         everything in float64, from the rows given
    fp32         everything in fp32
    bf16, fp16   as under torch.autocast: products of the two embedding matrices, and so the logits, in that type; the loss in fp32
    loss_scale   the loss is multiplied by it before the backward pass, the gradients are divided by it (in float64) afterwards

Zeros, lost pulls and row sums are counted on the raw tensors of that backward, before anything is divided. ``measure`` stops at the
N x D embeddings: no tower, no parameter, seconds on a CPU. The form of the loss is a ``PairLoss``, which ``pair_loss`` makes of any
objective. The truth is the float64 pass in residual form: plain cross-entropy in float64 loses the pull too, once the residual is under
1e-16.

Source: paper facts, section 7.1 and 7.3; mixed precision with a loss scale: Micikevicius et al., 2018.
How to read: a loss of 0.0 beside log10_loss_true -9 and zero_share 0 is only the print that ended; zero_share 1 is the signal that did.
How it can mislead: the embeddings are taken as given. Half-precision towers round them before, and lose gradient again behind.
The order of the factors decides much in fp16: in s (V T') the gradient that passes the product is s times larger than in (s V) T', and
far fewer of its entries are 0. Denormals count as non-zero unless the process flushes them (``flushes_denormals``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gradscope.metrics.gradients import cosine, max_abs, squared_parts, true_norm
from gradscope.objectives.objective import Objective, SoftmaxObjective
from gradscope.objectives.scores import LOSS_FORMS, residual_rows
from gradscope.registry import unknown_name
from gradscope.types import Scores

#: From exact to coarse. The half types go through torch.autocast.
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
#: Where the scale s enters: s (V T'), as here and in transformers; (s V) T', as in OpenAI's CLIP; (s V) T' for the image rows and a
#: second product (s T) V' for the caption rows, as in open_clip.
ORDERS = ("scale last", "scale first", "two products")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """A loss of two sets of paired rows, as functions of tensors. Made by ``pair_loss`` of an objective.

    scores      image rows [N, D], text rows [N, D], scale [] -> Scores, differentiable
    loss        Scores -> loss per anchor [N], differentiable, as training computes it
    exact_loss  the same loss in the form that keeps its gradient longest: what everything is held against, in float64
    log10_loss  logits [N, N] -> log10 of the batch-mean loss, [] float64, without a floor
    residual    logits [N, N] -> the pull that is left per anchor, [2N] float64
    rows        logits, anchors in rows -> loss [N] of one direction, where the gradient of each row sums to zero; else None
    """

    scores: Callable[[Tensor, Tensor, Tensor], Scores]
    loss: Callable[[Scores], Tensor]
    exact_loss: Callable[[Scores], Tensor]
    log10_loss: Callable[[Tensor], Tensor]
    residual: Callable[[Tensor], Tensor]
    rows: Callable[[Tensor], Tensor] | None


def pair_loss(objective: Objective, form: str = "plain", order: str = "scale last") -> PairLoss:
    """The loss path of an objective.

    Args:
        objective: any of ``gradscope.objectives``.
        form: one of ``LOSS_FORMS``; other than "plain" only for a plain softmax (InfoNCE, HN).
        order: one of ``ORDERS``; other than "scale last" only for a plain softmax. In exact arithmetic they are one.

    Raises:
        ValueError: unknown form or order, or a form or order that this objective does not have.
    """
    if form not in LOSS_FORMS:
        raise ValueError(unknown_name("loss form", form, list(LOSS_FORMS)))
    if order not in ORDERS:
        raise ValueError(unknown_name("order", order, list(ORDERS)))
    if type(objective).loss is not SoftmaxObjective.loss:  # it forms its loss in its own way
        if (form, order) != ("plain", "scale last"):
            raise ValueError(
                f"forms and orders of the loss are for a plain softmax (infonce, hn); {type(objective).__name__} has one only."
            )
        return _assembled(objective, objective.scores, partial(_on_fp32, objective.loss), objective.exact_loss, None)
    rows = LOSS_FORMS[form] if form == "plain" else partial(_rows_on_fp32, LOSS_FORMS[form])
    inside = _scale_first if order == "scale first" else _two_products
    scores = objective.scores if order == "scale last" else partial(inside, objective.scores)
    return _assembled(objective, scores, partial(_both, rows), partial(_both, residual_rows), rows)


def _assembled(
    objective: Objective,
    scores: Callable[[Tensor, Tensor, Tensor], Scores],
    loss: Callable[[Scores], Tensor],
    exact_loss: Callable[[Scores], Tensor],
    rows: Callable[[Tensor], Tensor] | None,
) -> PairLoss:
    return PairLoss(
        scores=scores, loss=loss, exact_loss=exact_loss, log10_loss=objective.log10_loss, residual=objective.residual, rows=rows
    )


@dataclass(frozen=True, kw_only=True)
class _TwoProducts(Scores):
    """Scores whose caption rows have logits of their own, equal to ``logits.T`` but for rounding."""

    logits_t2i: Tensor  # [N, N], captions in rows


def _sides(scores: Scores) -> tuple[Tensor, Tensor]:
    """The logits of both directions, anchors in rows."""
    return scores.logits, scores.logits_t2i if isinstance(scores, _TwoProducts) else scores.logits.T


def _both(rows: Callable[[Tensor], Tensor], scores: Scores) -> Tensor:
    """The mean of the two directions per anchor: [N]."""
    one, other = _sides(scores)
    return (rows(one) + rows(other)) / 2


def _on_fp32(loss: Callable[[Scores], Tensor], scores: Scores) -> Tensor:
    """A loss on half-precision logits made fp32. Autocast does so for cross-entropy, once per direction, and for no other."""
    return loss(replace(scores, logits=_widened(scores.logits)))


def _rows_on_fp32(rows: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    return rows(_widened(logits))


def _widened(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in _HALF.values() else logits


def _scale_first(scores: Callable[[Tensor, Tensor, Tensor], Scores], image: Tensor, text: Tensor, scale: Tensor) -> Scores:
    """The same scores with the scale inside the product."""
    made = scores(image, text, scale)
    return replace(made, logits=_product(image, text, scale, made.margin))


def _two_products(scores: Callable[[Tensor, Tensor, Tensor], Scores], image: Tensor, text: Tensor, scale: Tensor) -> Scores:
    """The same scores with the scale inside two products, one per direction."""
    made = scores(image, text, scale)
    one = _product(image, text, scale, made.margin)
    other = _product(text, image, scale, None if made.margin is None else made.margin.T)
    return _TwoProducts(cosine=made.cosine, margin=made.margin, logits=one, scale=made.scale, logits_t2i=other)


def _product(rows: Tensor, columns: Tensor, scale: Tensor, margin: Tensor | None) -> Tensor:
    logits = (scale * rows) @ columns.T
    return logits if margin is None else logits + scale * margin


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The tensors of one forward and backward pass. Gradients are raw: still multiplied by ``loss_scale``."""

    logits: Tensor  # [N, N] in the precision's own type
    loss: Tensor  # [] as printed: not multiplied by the loss scale
    logit_grad: Tensor  # [N, N]
    row_grads: tuple[Tensor, ...]  # of each direction alone, anchors in rows, [N, N]; empty where the rows need not balance
    gradient: tuple[Tensor, Tensor]  # at image and text rows, [N, D] each
    loss_scale: float


@dataclass(frozen=True, kw_only=True)
class LossPath:
    """What one precision and loss scale make of a batch. Plain floats; nan where a value does not exist.

    loss             as printed, in the type of the path                      log10_loss_true  from the very logits, no floor
    residual         mean over both directions, from the very logits          gradient_norm    at the embeddings, float64, unscaled
    zero_share       exactly zero entries of both embedding gradients         zero_rows        rows that are zero throughout
    non_finite       share of entries that are inf or nan (the loss scale is too large)
    pull_lost        share of pairs whose own cell of the logit gradient is exactly 0 while another of their row or column is not
    row_sum          largest |row sum| / row absolute sum of one direction's logit gradient: 0 in exact arithmetic; nan without rows
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
    return compared(made, truth, objective, precision=precision)


def compared(made: Pass, truth: Pass, objective: PairLoss, *, precision: str) -> LossPath:
    """What ``measure`` answers, from two passes that are at hand: ``made`` in ``precision``, ``truth`` by ``exact_pass``."""
    values = {**own_values(made, objective), **_against(made, truth)}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    return LossPath(precision=precision, loss_scale=made.loss_scale, **dict(zip(values, numbers, strict=True)))


def exact_pass(image: Tensor, text: Tensor, scale: Tensor | float, objective: PairLoss) -> Pass:
    """What every precision is held against: float64, in the form that loses nothing. Errors as ``measure``."""
    return one_pass(image, text, scale, replace(objective, loss=objective.exact_loss), precision="fp64")


def one_pass(
    image: Tensor, text: Tensor, scale: Tensor | float, objective: PairLoss, *, precision: str, loss_scale: float = 1.0
) -> Pass:
    """Forward and backward of one batch in ``precision``; arguments and errors as ``measure``."""
    _check(image, text, precision, loss_scale)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    half = _HALF.get(precision)
    with torch.enable_grad(), torch.autocast(image.device.type, half or torch.bfloat16, enabled=half is not None):
        pair = [t.detach().to(dtype, copy=True).requires_grad_() for t in (image, text)]
        scores = objective.scores(pair[0], pair[1], torch.as_tensor(scale, dtype=dtype, device=image.device).detach())
        loss = objective.loss(scores).mean()
        made = [scores.logits, *([scores.logits_t2i] if isinstance(scores, _TwoProducts) else [])]
        *logit_grads, image_grad, text_grad = torch.autograd.grad(loss * loss_scale, [*made, *pair])
        row_grads = () if objective.rows is None else tuple(_row_grad(m, objective.rows, loss_scale) for m in _sides(scores))
    return Pass(
        logits=scores.logits.detach(),
        loss=loss.detach(),
        logit_grad=logit_grads[0] if len(logit_grads) == 1 else logit_grads[0] + logit_grads[1].T,
        row_grads=row_grads,
        gradient=(image_grad, text_grad),
        loss_scale=loss_scale,
    )


def lost_pulls(logit_grad: Tensor) -> Tensor:
    """Which pairs have an exactly zero own cell while another cell of their row or column is not zero: bool [N]."""
    alive = logit_grad != 0
    return ~alive.diagonal() & (alive.any(dim=1) | alive.any(dim=0))


def row_sum_violation(row_grad: Tensor) -> Tensor:
    """|row sum| / row absolute sum per anchor, [N] float64; 0 for a row of zeros."""
    total, size = row_grad.double().sum(dim=1).abs(), row_grad.double().abs().sum(dim=1)
    return torch.where(size == 0, torch.zeros_like(size), total / size)


def relative_error(gradient: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """|g - exact| / |exact| over all entries, [] float64; formed on tensors divided by the largest entry of ``exact``."""
    unit = max_abs(exact).double()
    off = [(g.double() - e.double()) / unit for g, e in zip(gradient, exact, strict=True)]
    return torch.stack([(o**2).sum() for o in off]).sum().sqrt() / squared_parts(exact, max_abs(exact)).sum().sqrt()


def flushes_denormals(device: torch.device) -> bool:
    """Whether this process turns numbers under 1.2e-38 into 0 on ``device``: then they count as exact zeros. One synchronisation."""
    return not bool(torch.full((), 1e-39, device=device) * 1.0)


def _row_grad(logits: Tensor, rows: Callable[[Tensor], Tensor], loss_scale: float) -> Tensor:
    """One direction's half of the logit gradient, anchors in rows, raw: [N, N]."""
    leaf = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(rows(leaf).mean() / 2 * loss_scale, leaf)[0]


def own_values(made: Pass, objective: PairLoss) -> dict[str, Tensor]:
    """The fields of ``LossPath`` that one pass answers alone, [] each: all but row_sum and what is held against float64."""
    raw = torch.cat(made.gradient)  # [2N, D]
    return {
        "loss": made.loss,
        "log10_loss_true": objective.log10_loss(made.logits),
        "residual": objective.residual(made.logits).mean(),
        "gradient_norm": true_norm(_unscaled(made)).abs(),  # never -0.0
        "zero_share": (raw == 0).double().mean(),
        "zero_rows": (raw == 0).all(dim=1).double().mean(),
        "non_finite": (~raw.isfinite()).double().mean(),
        "pull_lost": lost_pulls(made.logit_grad).double().mean(),
    }


def _against(made: Pass, truth: Pass) -> dict[str, Tensor]:
    """The other fields."""
    unscaled = _unscaled(made)
    nan = torch.full((), math.nan, dtype=torch.float64, device=made.logits.device)
    return {
        "row_sum": torch.cat([row_sum_violation(g) for g in made.row_grads]).max() if made.row_grads else nan,
        "logit_rounding": (made.logits.double() - truth.logits).abs().max(),
        "gradient_error": relative_error(unscaled, truth.gradient),
        "direction": cosine(unscaled, truth.gradient),
    }


def _unscaled(made: Pass) -> list[Tensor]:
    return [g.double() / made.loss_scale for g in made.gradient]


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
