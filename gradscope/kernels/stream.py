"""The symmetric contrastive loss without an [N, N] store: value, exact gradients, and what its diagnostics need, in two blocked passes.

With x_i = log(sum of exp(logits of the negatives)) - log(sum of exp(logits of the positives)) of one anchor in one direction:
    loss       softplus(x),  residual r = sigmoid(x): both formed from the negatives, in float64
    gradient   by the logits, for an upstream g: off the positives  g_i P_ij (row) + g_j P_ij (column)
               on a positive  -(its share of the positives) * residual, by row and by column: never 1 - p, which cancels
    d image = s A t,   d text = s A^t v,   d scale = <A, cosine + margin>

Source: InfoNCE / CLIP (Radford et al., 2021); HN-CLIP, section 2 for the margin; blocks with a running log-sum-exp as in FlashAttention
(Dao et al., 2022) and Inf-CL (Cheng et al., 2024), here for both directions, with a margin and from the negatives.
How to read it: ``Streamed.anchors`` answers what the dense readings answer from cells. Memory is O(N D + block^2).
How it can mislead: fp32 products of unit rows are off by some 1e-7, so logits at scale 100 by 1e-5: the values are exact for the
products, not for infinitely precise rows. Gradients are of first order only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gradscope.distributed import gathered, largest, rank, summed, world
from gradscope.kernels.cells import SEVERAL, Cells, add_pairs, constant, make_cells, pair_cosines, positive_pairs
from gradscope.kernels.strip import Weights, backward_strip, forward_strip
from gradscope.objectives.margin import MARGINS
from gradscope.types import Anchors

BACKENDS = ("auto", "shared", "safe")


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """One streamed loss and what was read on the way."""

    loss: Tensor  # [N] per anchor, mean of both directions, in the dtype of the rows; differentiable in image, text and scale
    anchors: Anchors
    zero_cells: Tensor  # int64 []: negatives' cells of the logit gradient that are exactly 0; -1 until the backward has run
    how: str  # which kernel, in words
    shared: Tensor  # [] share of the blocks whose one shared exp passed its check

    def shared_share(self) -> float:
        """Share of the blocks that took the fast form; waits for the device."""
        return float(self.shared)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is the same in both passes; every tensor detached."""

    cells: Cells
    strip: slice
    rows: Tensor  # [K] the positive cells
    columns: Tensor  # [K]
    constant: Tensor  # [] float64
    top: int
    form: str
    read: dict[str, Any]  # filled by the forward pass
    zero_cells: Tensor


def stream(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    *,
    gamma: float = 0.0,
    margin: str = "live",
    margin_text: Tensor | None = None,
    groups: Tensor | None = None,
    several: str = "exclude",
    top: int = 0,
    backend: str = "auto",
) -> Streamed:
    """The contrastive loss of N images with N captions, row i with row i.

    Under torch.distributed every rank calls it with the same N rows (of all ranks, in order of rank), N a multiple of their number;
    each computes its own strip of rows, all get the same values, and the gradient is right at a rank's own rows.

    Args:
        image, text: unit rows [N, D], fp32 or float64.
        scale: [] the multiplier after exp.
        gamma, margin, margin_text: as in ``objectives.margin``; margin_text [N, D0] is needed by "frozen" and "external".
        groups: int64 [N], captions of the same record or text have the same number; None: all differ.
        several: what captions of one group are to each other: "exclude" (no negatives) or "positives".
        top: K > 0 also reads which share of an image's residual lies on its 1 ... K hardest captions.
        backend: "auto", "shared" (one exp per cell where a check allows it) or "safe" (two).
    """
    _check(image, text, gamma, margin, margin_text, groups, several, backend)
    count = len(image) // world()
    rows, columns = positive_pairs(len(image), groups if several == "positives" else None, image.device)
    plan = _Plan(
        cells=make_cells(image, text, gamma, margin, margin_text, groups),
        strip=slice(rank() * count, (rank() + 1) * count),
        rows=rows,
        columns=columns,
        constant=constant(text, gamma, margin, groups),
        top=top,
        form="safe" if backend == "safe" else "shared",
        read={},
        zero_cells=torch.full((), -1, dtype=torch.int64, device=image.device),
    )
    loss = _Stream.apply(image, text, scale, plan)
    how = "torch blocks, " + ("two exp per cell" if plan.form == "safe" else "one exp per cell where its check passes")
    return Streamed(loss=loss, anchors=plan.read["anchors"], zero_cells=plan.zero_cells, how=how, shared=plan.read["shared"])


def _check(
    image: Tensor,
    text: Tensor,
    gamma: float,
    margin: str,
    margin_text: Tensor | None,
    groups: Tensor | None,
    several: str,
    backend: str,
) -> None:
    for name, value, allowed in (("margin", margin, MARGINS), ("several", several, SEVERAL), ("backend", backend, BACKENDS)):
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is unknown; give one of {', '.join(allowed)}")
    if image.shape != text.shape or image.dtype != text.dtype or image.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"image rows are {tuple(image.shape)} {image.dtype} and text rows {tuple(text.shape)} {text.dtype}; give both the same shape, "
            "in float32 or float64"
        )
    if len(image) % world():
        raise ValueError(f"{len(image)} rows do not divide among {world()} processes; give a multiple")
    if margin in ("frozen", "external") and gamma and (margin_text is None or len(margin_text) != len(text)):
        raise ValueError(f"the {margin} margin needs margin_text, one row for each of the {len(text)} captions")
    if groups is not None and groups.shape != image.shape[:1]:
        raise ValueError(f"groups has shape {tuple(groups.shape)}; give one number for each of the {len(image)} rows")


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, plan: _Plan) -> Tensor:
        with torch.autocast(image.device.type, enabled=False):
            s = scale.detach().double()
            found = forward_strip(plan.cells, scale.detach(), plan.strip, top=plan.top, form=plan.form)
            cosines = pair_cosines(plan.cells.image, plan.cells.text, (plan.rows, plan.columns))
            logits = s * (cosines - plan.constant)  # of the positives; the constant is taken off them instead of put on the negatives
            positives = [_log_sums(logits, index, len(image)) for index in (plan.rows, plan.columns)]
            odds = [gathered(found.rows) - positives[0], _log_sum_over_ranks(found.columns) - positives[1]]
            ctx.save_for_backward(scale, logits, cosines, *positives, *odds)
            ctx.plan = plan
            plan.read.update(anchors=_anchors(plan, found, cosines, odds), shared=found.shared)
            both = torch.stack([F.softplus(x, threshold=700.0) for x in odds])
            return both.mean(dim=0).to(image.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:  # type: ignore[override]
        plan: _Plan = ctx.plan
        scale, logits, cosines, row_sum, column_sum, *odds = ctx.saved_tensors
        g = grad.double() / 2
        rows, columns, strip = plan.rows, plan.columns, plan.strip
        logs = [positive + F.softplus(x, threshold=700.0) for positive, x in zip((row_sum, column_sum), odds, strict=True)]
        weights = Weights(row_logs=logs[0][strip], column_logs=logs[1], rows=g[strip], columns=g)
        with torch.autocast(grad.device.type, enabled=False):
            found = backward_strip(plan.cells, scale, strip, weights, form=plan.form)
        plan.zero_cells.copy_(summed(found.zeros))
        residuals = [torch.exp(F.logsigmoid(x)) for x in odds]
        pull = (
            -(g * residuals[0])[rows] * (logits - row_sum[rows]).exp()
            - (g * residuals[1])[columns] * (logits - column_sum[columns]).exp()
        )
        mine = (rows >= strip.start) & (rows < strip.stop)
        pull = pull * mine
        d_image = torch.zeros_like(plan.cells.image)
        d_image[strip] = found.rows
        d_text = found.columns
        add_pairs(d_image, rows, pull, plan.cells.text, columns)
        add_pairs(d_text, columns, pull, plan.cells.image, rows)
        d_scale = found.along + (pull * (cosines - plan.constant)).sum()
        s = scale.to(d_image.dtype)
        return d_image * s, summed(d_text) * s, summed(d_scale).to(scale.dtype), None


def _log_sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """logsumexp of values [K] by index: [count] float64."""
    top = values.new_full((count,), -torch.inf).scatter_reduce(0, index, values, "amax")
    return top + torch.zeros_like(top).index_add_(0, index, (values - top[index]).exp()).log()


def _log_sum_over_ranks(logs: Tensor) -> Tensor:
    if world() == 1:
        return logs
    top = largest(logs)
    safe = top.masked_fill(top == -torch.inf, 0.0)
    return safe + summed((logs - safe).exp()).log()


def _anchors(plan: _Plan, found: Any, cosines: Tensor, odds: list[Tensor]) -> Anchors:
    own = plan.rows == plan.columns
    positive = torch.empty_like(odds[0])
    positive[plan.rows[own]] = cosines[own]
    hardest = {"i2t": gathered(found.hardest_rows) + plan.constant, "t2i": largest(found.hardest_columns) + plan.constant}
    share = {}
    if found.top is not None:
        share["i2t"] = gathered((found.top - found.rows[:, None]).exp()).cumsum(1).mean(0).clamp(max=1.0)
    return Anchors(positive=positive, log_odds={"i2t": odds[0], "t2i": odds[1]}, hardest=hardest, top_share=share)
