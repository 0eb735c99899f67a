"""The symmetric contrastive loss without an [N, N] store: value, exact gradients, and what its diagnostics need, in two blocked passes.

With x_i = log(sum of exp(logits of the negatives)) - log(sum of exp(logits of the positives)) of one anchor in one direction:
    loss       softplus(x),  residual r = sigmoid(x): both formed from the negatives, in float64
    gradient   by the logits, for an upstream g: off the positives  g_i P_ij (row) + g_j P_ij (column)
               on a positive  -(its share of the positives) * residual, by row and by column: never 1 - p, which cancels
    d image = s A t,   d text = s A^t v,   d scale = <A, cosine + margin>

Source: InfoNCE / CLIP (Radford et al., 2021); HN-CLIP, section 2 for the margin; blocks with a running log-sum-exp as in FlashAttention
(Dao et al., 2022) and Inf-CL (Cheng et al., 2024), here for both directions, with a margin and from the negatives.
How to read it: ``Streamed.anchors`` answers what the dense readings answer from cells. Memory is O(N D + block^2); where captions of
one group are positives of each other, some 250 bytes more for each pair of a group, and a group of n has n^2.
How it can mislead: fp32 products of unit rows are off by some 1e-7, so logits at scale 100 by 1e-5: the values are exact for the
products, not for infinitely precise rows. On CUDA TF32 stays off unless ``backend`` asks for it; on the CPU products follow
torch.set_float32_matmul_precision, whose "medium" is bf16 on some processors. Gradients are of first order only; create_graph=True is
refused. Inside torch.compile the passes run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.distributed import gathered, largest, rank, summed, summed_rows, world
from gradscope.kernels.backward import backward_strip
from gradscope.kernels.cells import SEVERAL, Cells, add_pairs, constant, log_sums, make_cells, pair_cosines, positive_pairs
from gradscope.kernels.forward import forward_strip
from gradscope.kernels.library import library_products
from gradscope.kernels.strip import FORMS, Products, Sums, Weights
from gradscope.kernels.triton_found import TRITON, require_triton, say_once, why_not
from gradscope.objectives.margin import MARGINS
from gradscope.types import Anchors

BACKENDS = ("auto", *FORMS, *TRITON)


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """One streamed loss and what was read on the way."""

    loss: Tensor  # [N] per anchor, mean of both directions, in the dtype of the rows; differentiable in image, text and scale
    anchors: Anchors
    zero_cells: Tensor  # int64 []: negatives' cells of the logit gradient that are exactly 0; -1 until the backward has run
    how: str  # which kernel, in words
    shares: list[Tensor]  # [] of each pass that has run: share of the blocks whose one shared exp passed its check

    def shared_share(self) -> float:
        """Mean of ``shares``; 0 for the safe form and for kernels without such a check. Waits for the device."""
        return sum(float(share) for share in self.shares) / max(len(self.shares), 1)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What both passes need, every tensor detached, and where they leave what they read."""

    cells: Cells
    strip: slice
    pairs: tuple[Tensor, Tensor]  # (rows, columns) of the positive cells, [K] each
    constant: Tensor  # [] float64
    top: int
    kernel: _Kernel
    zero_cells: Tensor
    anchors: list[Anchors] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    """The two passes over a strip."""

    forward: Callable[..., Sums]
    backward: Callable[..., Products]
    words: str


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
    each computes its own strip of rows, all get the same values, and the gradient is right at a rank's own rows. The upstream gradient
    of the loss must be the same on all: take the mean over all N anchors, not over a rank's own.

    Args:
        image, text: unit rows [N, D], fp32 or float64. Longer ones work too: fp32 logits are then off by that much more.
        scale: [] the multiplier after exp, above 0.
        gamma, margin, margin_text: as in ``objectives.margin``; margin_text [N, D0] is needed by "frozen" and "external".
        groups: int64 [N], captions of the same record or text have the same number; None: all differ. The same on all ranks.
        several: what captions of one group are to each other: "exclude" (no negatives) or "positives".
        top: K > 0 also reads which share of an image's residual lies on its 1 ... K hardest captions (that direction only: by column
            it would cost as much again).
        backend: "auto"; on torch "shared" (one exp per cell where a check allows it) or "safe" (two); on NVIDIA GPUs "triton" or
            "triton-tiles" (IEEE fp32 products, by the library or in the kernel), "triton-tf32x3" (about as exact) or "triton-tf32"
            (logits at scale 100 off by .01); "auto" takes "triton" where it can.

    Raises:
        ValueError: an unknown word, shapes or dtypes that do not fit, a margin without its rows.
        RuntimeError: in the backward, where rows or scale were changed in place since, or a second derivative is asked for.
    """
    _check_words({"margin": (margin, MARGINS), "several": (several, SEVERAL), "backend": (backend, BACKENDS)})
    _check_rows(image, text, margin_text, groups)
    if scale.ndim:
        raise ValueError(f"scale has the shape {tuple(scale.shape)}; give a tensor of one number, shape ()")
    if top < 0:
        raise ValueError(f"top is {top}; give 0 or more")
    if margin in ("frozen", "external") and gamma and margin_text is None:
        raise ValueError(f"the {margin} margin needs margin_text, one row for each of the {len(text)} captions")
    count = len(image) // world()
    cells = make_cells(image, text, gamma, margin, margin_text, groups)
    plan = _Plan(
        cells=cells,
        strip=slice(rank() * count, (rank() + 1) * count),
        pairs=positive_pairs(len(image), cells.groups if several == "positives" else None, image.device),
        constant=constant(text, gamma, margin, cells.groups),
        top=top,
        kernel=_kernel(cells, backend),
        zero_cells=torch.full((), -1, dtype=torch.int64, device=image.device),
    )
    # Traced, the loops over blocks would be unrolled, which takes minutes.
    passes = torch.compiler.disable(_Stream.apply) if torch.compiler.is_compiling() else _Stream.apply
    loss = passes(image, text, scale.to(image.device), plan)
    return Streamed(loss=loss, anchors=plan.anchors[0], zero_cells=plan.zero_cells, how=plan.kernel.words, shares=plan.shares)


def _kernel(cells: Cells, backend: str) -> _Kernel:
    """Triton on a CUDA device that has it; else torch, which shares an exp only where the host may look at the logs (on the CPU)."""
    chosen = cells.image.device.type == "cuda" and backend == "auto"
    reason = why_not(cells.image) if chosen else ""
    if backend in TRITON or (chosen and not reason):
        require_triton(cells.image)
        from gradscope.kernels import triton_strip as strips

        how = TRITON.get(backend, "ieee")
        forward, backward = partial(strips.forward_strip, precision=how), partial(strips.backward_strip, precision=how)
        return _Kernel(forward=forward, backward=backward, words=strips.words(how))
    form = "safe" if backend == "safe" or chosen else "shared"
    how = "two exp per cell" if form == "safe" else "one exp per cell where its check passes"
    if chosen:
        say_once(reason)
        how += f"; no Triton: {reason}"
    return _Kernel(forward=partial(forward_strip, form=form), backward=partial(backward_strip, form=form), words=f"torch blocks, {how}")


def _check_words(words: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    for name, (value, allowed) in words.items():
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is unknown; give one of {', '.join(allowed)}")


def _check_rows(image: Tensor, text: Tensor, margin_text: Tensor | None, groups: Tensor | None) -> None:
    like = image.ndim == 2 and image.shape == text.shape and image.dtype == text.dtype
    if not like or image.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"image rows are {tuple(image.shape)} {image.dtype} and text rows {tuple(text.shape)} {text.dtype}; give both one shape "
            "(N, D), in float32 or float64"
        )
    if len(image) == 0 or len(image) % world():
        raise ValueError(f"{len(image)} rows do not divide among {world()} processes; give a multiple, at least one row each")
    for name, rows, ndim in (("margin_text", margin_text, 2), ("groups", groups, 1)):
        if rows is not None and (rows.ndim != ndim or len(rows) != len(image)):
            raise ValueError(f"{name} has the shape {tuple(rows.shape)}; give {ndim} dimensions, the first of the {len(image)} pairs")
    if groups is not None and groups.dtype != torch.int64:
        raise ValueError(f"groups are {groups.dtype}; give whole numbers, int64")


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, scale: Tensor, plan: _Plan) -> Tensor:
        with torch.autocast(image.device.type, enabled=False), library_products(image.device):
            found = plan.kernel.forward(plan.cells, scale.detach(), plan.strip, top=plan.top)
        cosines = pair_cosines(plan.cells.image, plan.cells.text, plan.pairs) - plan.constant  # off them instead of on every negative
        logits = scale.detach().double() * cosines
        sums = [log_sums(logits, index, len(image)) for index in plan.pairs]
        odds = [gathered(found.rows) - sums[0], _log_sum_over_ranks(found.columns) - sums[1]]
        # The rows are in the plan already; saved, a change of them in place before the backward is an error.
        rows = [side for side in (image, text) if not side.is_inference()]
        ctx.save_for_backward(scale, logits, cosines, *sums, *odds, *rows)
        ctx.plan = plan
        plan.anchors.append(_anchors(plan, found, cosines, odds))
        if found.shared is not None:
            plan.shares.append(found.shared)
        return torch.stack([_softplus(x) for x in odds]).mean(dim=0).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Sequence[Tensor | None]:
        if torch.is_grad_enabled():
            raise RuntimeError("the streaming loss has no second derivative; take the dense kernel where create_graph=True is needed")
        plan: _Plan = ctx.plan
        scale, logits, cosines, *logs = ctx.saved_tensors[:7]
        g = grad.double() / 2
        image, text, along = ctx.needs_input_grad[:3]
        with torch.autocast(grad.device.type, enabled=False), library_products(grad.device):
            found = plan.kernel.backward(
                plan.cells, scale, plan.strip, _weights(g, logs, plan.strip), rows=image or along, columns=text
            )
        plan.zero_cells.copy_(summed(found.zeros))
        if found.shared is not None:
            plan.shares.append(found.shared)
        pull = _pull(g, logits, logs, plan)
        return (
            _image_grad(found, pull, scale, plan) if image else None,
            _text_grad(found, pull, scale, plan) if text else None,
            summed(found.along + (pull * cosines).sum()).to(scale.dtype) if along else None,
            None,
        )


def _weights(g: Tensor, logs: Sequence[Tensor], strip: slice) -> Weights:
    """The backward's weights from an upstream g [N] and the saved (row sums, column sums, row odds, column odds)."""
    rows, columns, row_odds, column_odds = logs
    return Weights(row_logs=(rows + _softplus(row_odds))[strip], column_logs=columns + _softplus(column_odds), rows=g[strip], columns=g)


def _pull(g: Tensor, logits: Tensor, logs: Sequence[Tensor], plan: _Plan) -> Tensor:
    """The logit gradient on the positive cells of this strip, 0 on the others: [K] float64; from residuals, so nothing cancels."""
    total = torch.zeros_like(logits)
    for index, log_sum, odds in zip(plan.pairs, logs[:2], logs[2:], strict=True):
        residual = torch.exp(F.logsigmoid(odds))
        total -= (g * residual)[index] * (logits - log_sum[index]).exp()
    return total * ((plan.pairs[0] >= plan.strip.start) & (plan.pairs[0] < plan.strip.stop))


def _image_grad(found: Products, pull: Tensor, scale: Tensor, plan: _Plan) -> Tensor:
    assert found.rows is not None
    grad = _among_all(found.rows, plan)
    add_pairs(grad, plan.pairs[0], pull, plan.cells.text, plan.pairs[1])
    return grad.mul_(scale)


def _text_grad(found: Products, pull: Tensor, scale: Tensor, plan: _Plan) -> Tensor:
    assert found.columns is not None
    add_pairs(found.columns, plan.pairs[1], pull, plan.cells.image, plan.pairs[0])
    return _among_all(summed_rows(found.columns), plan).mul_(scale)


def _among_all(rows: Tensor, plan: _Plan) -> Tensor:
    """The rows of this strip at their place [N, D], 0 elsewhere."""
    if len(rows) == len(plan.cells):
        return rows
    grad = torch.zeros_like(plan.cells.image)
    grad[plan.strip] = rows
    return grad


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=700.0)


def _log_sum_over_ranks(logs: Tensor) -> Tensor:
    """log of the sum over ranks of exp(logs)."""
    if world() == 1:
        return logs
    top = largest(logs).clamp_min(-1e30)
    return top + summed((logs - top).exp()).log()


def _anchors(plan: _Plan, found: Sums, cosines: Tensor, odds: Sequence[Tensor]) -> Anchors:
    """What the dense readings would have formed from cells; ``cosines`` are the positives' less the constant."""
    own = torch.where(plan.pairs[0] == plan.pairs[1], cosines, 0.0)  # a mask as an index would make the host wait for the device
    positive = torch.zeros_like(odds[0]).index_add_(0, plan.pairs[0], own)
    hardest = {"i2t": gathered(found.hardest_rows), "t2i": largest(found.hardest_columns)}
    # A largest number over ranks may lose a nan; the sums do not.
    hardest = {
        name: (value + plan.constant).masked_fill(x.isnan(), torch.nan) for (name, value), x in zip(hardest.items(), odds, strict=True)
    }
    share = {} if found.top is None else {"i2t": _top_share(found.top, found.rows, plan.top)}
    return Anchors(
        positive=positive + plan.constant, log_odds=dict(zip(("i2t", "t2i"), odds, strict=True)), hardest=hardest, top_share=share
    )


def _top_share(top: Tensor, rows: Tensor, count: int) -> Tensor:
    """Mean over all anchors of the share of 1 ... ``count`` negatives; nan where an anchor has none."""
    shares = (top - rows[:, None]).exp().cumsum(dim=1).clamp(max=1.0)
    shares = torch.cat([shares, shares[:, -1:].expand(-1, count - shares.shape[1])], dim=1)
    return summed(shares.sum(dim=0)) / (len(shares) * world())
