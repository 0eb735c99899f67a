"""Exactly zero gradient entries, and the four different things that "the gradient is zero in fp32" can mean.

Counted on the very fp32 tensors of the measured batch (count_nonzero; denormals count as non-zero unless the process flushes them):
    entries.X, rows.X             share of zero entries / of rows that are zero throughout, X = logits, embeddings
    entries.parameters            share of zero entries over all trainable parameters
    structural.parameters         share of entries in rows this batch cannot reach (ids not in it, positions beyond its texts)
    entries_reached.parameters    share of zeros among all other entries: the one that may speak of saturation
    tensors.parameters            share of tensors that are zero throughout; unused.parameters counts those without a gradient
    all_zero.X                    1 if every entry is 0.0                                                          case (i)
    naive_norm                    what a plain fp32 square-and-sum gives over all parameters; the true one is ``gradient``'s norm
    naive_norm_zero               1 if that fp32 norm prints 0 while an entry is not: squares underflow             case (ii)
    loss_zero_gradient_not        1 if the fp32 loss prints 0 while a logit gradient is not                       case (iii)
    positive_zero.<direction>     share of anchors whose own cell is exactly 0 while a negative's is not: the pull is lost  (iv)
    row_sum.<direction>           largest |row sum| / row absolute sum of that direction's logit gradient; 0 in exact arithmetic

Where the softmax is streamed its kernel counts the negatives' cells block by block, a loss scale included; the positives' follow from
the residuals. rows.logits and row_sum are left out there, and positive_zero is 0 by the form of the loss: the pull is the sum of the
pushes, formed before either is rounded. A loop that is not ours has a loss of another form: there (iii) and (iv) are left out too.

Source: paper facts, section 7.1. How it can mislead: a raw zero share is dominated by structure (99 % of a stock token embedding);
fp32 saturation alone needs a logit gap of about 100 before an entry is exactly zero, so a high rate usually has another cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics.duplicates import group_sizes
from gradscope.metrics.gradients import present, statistics
from gradscope.metrics.softmax import row_slices
from gradscope.metrics.zero_causes import zeros_in_rows
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Scores, Step


@quantities.register("zeros")
@dataclass(frozen=True, kw_only=True)
class Zeros:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "default"
    needs: ClassVar[tuple[str, ...]] = ("direction_grads",)
    left_out: ClassVar[str] = "zero rows and row sums of the logit gradient (and, in a loop of your own, the lost pull)"

    def __call__(self, step: Step) -> list[Reading]:
        readings = []
        for head in step.heads.values():
            values: dict[str, Tensor | float] = {}
            if head.scores is not None and head.logit_grad is not None:
                values |= _logits(head, head.scores, head.logit_grad)
            elif head.zero_cells is not None:
                values |= _streamed(step, head, head.zero_cells)
            if head.image_grad is not None and head.text_grad is not None:
                values |= _matrix("embeddings", head.image_grad, head.text_grad)
            if head.param_grads is not None:
                values |= _parameters(step, head)
            readings += [
                Reading(quantity="zeros", key=key, term=head.name, value=value, unit=_unit(key)) for key, value in values.items()
            ]
        return readings


def _logits(head: Head, scores: Scores, gradient: Tensor) -> dict[str, Tensor]:
    values = _matrix("logits", gradient)
    if scores.excluded is not None:  # a cell outside the softmax is zero by definition
        kept = ~scores.excluded
        values["entries.logits"] = ((gradient == 0) & kept).count_nonzero().double() / kept.count_nonzero()
    values["loss_zero_gradient_not"] = ((head.loss == 0) & (values["all_zero.logits"] == 0)).double()
    for direction, part in head.direction_grads.items():
        values |= _direction(direction, part)
    return values


def _streamed(step: Step, head: Head, zero_cells: Tensor) -> dict[str, Tensor | float]:
    """``_logits`` without the cells."""
    width = len(head.anchors.positive)
    excluded = 0 if step.groups is None else (group_sizes(step.groups) - 1).sum()
    residuals = torch.stack([torch.sigmoid(x) for x in head.anchors.log_odds.values()])  # [2, N]
    pull = (residuals.mean(dim=0) / width).float()  # the cell of the positive, less its sign
    zeros, every = zero_cells + (pull == 0).sum(), width**2 - excluded
    values: dict[str, Tensor | float] = {"entries.logits": zeros.double() / every, "all_zero.logits": (zeros == every).double()}
    if step.own_loss:
        values["loss_zero_gradient_not"] = ((head.loss == 0) & (zeros != every)).double()
        values |= {f"positive_zero.{direction}": 0.0 for direction in head.directions}
    return values


def _unit(key: str) -> str:
    if key == "naive_norm":
        return "nat / weight"
    if key.startswith(("all_zero", "naive", "loss_zero")):
        return "0/1"
    return "tensors" if key == "unused.parameters" else "ratio" if key.startswith("row_sum") else "share"


def _matrix(name: str, *gradients: Tensor) -> dict[str, Tensor]:
    filled = torch.cat([_filled(g) for g in gradients])  # [rows]
    entries = sum(g.numel() for g in gradients)
    return {
        f"entries.{name}": (entries - filled.sum()) / entries,
        f"rows.{name}": (filled == 0).double().mean(),
        f"all_zero.{name}": (filled == 0).all().double(),
    }


def _filled(gradient: Tensor) -> Tensor:
    """How many entries of each row are not 0: [rows] float64."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, 0, dim=1, dtype=wide).double()


def _direction(direction: str, gradient: Tensor) -> dict[str, Tensor]:
    wide = (gradient[rows].double() for rows in row_slices(*gradient.shape))
    total, size = torch.cat([torch.stack([strip.sum(dim=1), strip.abs().sum(dim=1)]) for strip in wide], dim=1)  # [N] each
    lost = (gradient.diagonal() == 0) & (size != 0)
    return {
        f"positive_zero.{direction}": lost.double().mean(),
        f"row_sum.{direction}": torch.where(size == 0, torch.zeros_like(size), total.abs() / size).max(),
    }


def _parameters(step: Step, head: Head) -> dict[str, Tensor | float]:
    assert head.param_grads is not None
    grads = head.param_grads
    found = statistics(grads, step.memo)
    zeros = found.zeros  # [tensors]
    sizes = [0 if g is None else g.numel() for g in grads]
    structural, structural_zeros = _structural(step, grads)
    every = sum(sizes)
    all_zero, naive = zeros.sum() == every, found.plain_squares(head.param_factor)[0].sum().sqrt()
    empty = torch.stack([count == size for count, size in zip(zeros, sizes, strict=True) if size])
    return {
        "entries.parameters": zeros.sum().double() / every,
        "structural.parameters": structural.double() / every,
        "entries_reached.parameters": (zeros.sum() - structural_zeros).double() / (every - structural),
        "tensors.parameters": empty.double().mean(),
        "unused.parameters": float(len(grads) - len(present(grads))),
        "all_zero.parameters": all_zero.double(),
        "naive_norm": naive,
        "naive_norm_zero": ((naive == 0) & ~all_zero).double(),
    }


def _structural(step: Step, grads: object) -> tuple[Tensor, Tensor]:
    """Entries in unreachable rows, and how many of those are exactly zero, both int64 []."""
    assert isinstance(grads, (list, tuple))
    device = step.embeddings.text.device
    entries = zeros = torch.zeros((), dtype=torch.int64, device=device)
    for name, gradient in zip(step.names, grads, strict=True):
        rows = step.structural_rows.get(name)
        if rows is None or gradient is None:
            continue
        entries = entries + rows.sum() * gradient.shape[1]
        zeros = zeros + zeros_in_rows(gradient, rows)
    return entries, zeros
