"""Why an entry of a gradient is exactly zero, and which non-zero entries nobody sees: pure functions of tensors.

Table A, exact zeros, disjoint, first match wins:
    frozen                 the parameter does not train: never in the gradient
    unused                 it trains, but the loss does not reach it (no gradient at all)
    structural             the batch cannot reach the entry: the row of an id that does not occur, a position behind every end of text,
                           a place of a convolution's kernel that only ever meets padding, or the bias of attention keys, which shifts
                           all logits of a softmax alike and so has gradient 0 in theory
    dead_unit              a unit of a layer whose activation, or whose upstream gradient, is zero for the whole batch
    dtype_underflow        non-zero in the next wider dtype; those that the factor 2^k brings back were below the range of this one, the
                           others were rounded away in a sum, or lie beyond every factor
    saturation_underflow   zero in the next wider dtype too, non-zero when the loss is multiplied by 2^k before backward in the same
                           dtype, or (half precision) in float64
    unexplained            zero in every pass
Table B, non-zero but invisible, each counted on its own, so one entry may be in several, and none of them is in A:
    squared_underflow      its square is 0 in fp32: |g| <= 2^-75, since 2^-150 is a tie between 0 and 2^-149 and goes to even
    eps_dominated          sqrt(v_hat) < eps: Adam's step shrinks by about g / eps
    stale                  |g| < sqrt(v_hat) / 100: the memory of larger gradients mutes this one

A dead unit is told from the gradients alone: in EVERY pass that was run (the wider dtypes and the multiplied loss included) its whole
row of the weight and its bias are zero (nothing comes from above), or its whole column of the weight that reads it is (it is silent).
A row that is zero through underflow shows itself in one of those passes and so is not dead. A branch whose last weight is initialised
to zero (residual branches, LoRA) is dead in this sense until that weight has moved.

Source: paper facts, section 7.1 and 7.2; peers 4.3, 4.4, G3, G4, G7. How to read: only the two underflows may speak of precision or
saturation. How it can mislead: first match wins, so a saturated half-precision batch counts as dtype underflow wherever fp32 still
has a number. Zeros that rounding makes (the positive's cell in fp32) count there too; once the residual is under 1e-16 float64 makes
the same zero, which then is unexplained (the residual form of the loss has none). A key that is rotated or normalised behind its bias
does have a gradient there; only its exact zeros would be misnamed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from gradscope.metrics.gradients import plain_squares

CAUSES = ("frozen", "unused", "structural", "dead_unit", "dtype_underflow", "saturation_underflow", "unexplained")
INVISIBLE = ("squared_underflow", "eps_dominated", "stale")

#: How far under sqrt(v_hat) a gradient counts as stale.
STALE = 100.0

#: Parameters that hold query, key and value projections below each other.
_JOINED = re.compile(r"(?:^|\.)(?:in_proj_(?:weight|bias)|qkv\.(?:weight|bias))$")
_KEY_BIAS = re.compile(r"(?:^|\.)(?:k_proj|key|k_lin|to_k)\.bias$")


def count_causes(zero: Tensor, evidence: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Disjoint counts of the zeros of one tensor, int64 [] by cause, in the order of ``evidence``; the rest is "unexplained".

    Args:
        zero: bool, which entries are exactly zero.
        evidence: cause -> bool tensor that broadcasts to ``zero`` and is True where that cause applies; None where nothing is known.
    """
    counts, left = {}, zero
    for cause, applies in evidence.items():
        if applies is None:
            counts[cause] = torch.zeros((), dtype=torch.int64, device=zero.device)
            continue
        counts[cause] = (left & applies).sum()
        left = left & ~applies
    return {**counts, "unexplained": left.sum()}


def rows_as_entries(rows: Tensor, like: Tensor) -> Tensor:
    """A bool mask of rows [R], or of entries, as one that broadcasts to ``like`` [R, ...]. ValueError where it fits neither."""
    if rows.dtype != torch.bool:
        raise ValueError(f"a structural mask is a bool tensor, True where the batch cannot reach; got {rows.dtype}")
    if rows.shape == like.shape:
        return rows
    if rows.shape == like.shape[:1]:
        return rows.view(-1, *[1] * (like.ndim - 1))
    raise ValueError(f"a structural mask of shape {list(rows.shape)} fits neither the rows nor the entries of {list(like.shape)}")


def dead_entries(weight: Tensor | None, bias: Tensor | None, out_dim: int = 0) -> tuple[Tensor | None, Tensor | None]:
    """Which entries of a layer's weight and bias belong to dead units, as masks of their shapes (None where there is none).

    Args:
        weight: bool, True where an entry is zero in every pass. [out, in, ...], or [units] for a norm; None if it does not train.
        bias: the same, [out].
        out_dim: the dimension of ``weight`` that the bias belongs to; 1 for transposed convolutions.
    """
    if weight is None:
        return None, bias
    unit = weight if weight.ndim == 1 else _throughout(weight, out_dim)
    unit = unit if bias is None else unit & bias
    if weight.ndim == 1:
        return unit, None if bias is None else unit
    silent = _throughout(weight, 1 - out_dim)
    mask = _along(unit, out_dim, weight) | _along(silent, 1 - out_dim, weight)
    return mask.expand_as(weight), None if bias is None else unit


def _throughout(mask: Tensor, dim: int) -> Tensor:
    return mask.transpose(0, dim).flatten(1).all(dim=1)


def _along(units: Tensor, dim: int, like: Tensor) -> Tensor:
    return units.view([-1 if d == dim else 1 for d in range(like.ndim)])


def squared_underflow(gradient: Tensor) -> Tensor:
    """How many non-zero entries have a square of 0 in fp32, int64 []; where denormals are flushed, those count as well."""
    return torch.count_nonzero(gradient) - plain_squares([gradient])[1].sum()


def zeros_in_rows(gradient: Tensor, rows: Tensor) -> Tensor:
    """Exact zeros in the rows of ``gradient`` [R, ...] that the bool mask ``rows`` [R] marks, int64 []."""
    flat = gradient.flatten(1)
    filled = torch.linalg.vector_norm(flat, 0, dim=1, dtype=torch.promote_types(flat.dtype, torch.float32))  # entries that are not 0
    return ((flat.shape[1] - filled.long()) * rows).sum()


def eps_dominated(gradient: Tensor, root: Tensor, eps: float) -> Tensor:
    """Non-zero entries with sqrt(v_hat) < eps, int64 []. ``root`` is sqrt(v_hat), of the gradient's shape."""
    return ((gradient != 0) & (root < eps)).sum()


def stale(gradient: Tensor, root: Tensor) -> Tensor:
    """Non-zero entries under sqrt(v_hat) / 100, int64 []."""
    size = gradient.abs()
    return ((size > 0) & (size * STALE < root)).sum()


def name_parts(name: str, rows: int) -> dict[str, slice]:
    """A parameter's name -> name -> its rows: query, key and value apart where one parameter of ``rows`` rows holds all three."""
    if not _JOINED.search(name) or rows % 3:
        return {name: slice(0, rows)}
    third = rows // 3
    return {f"{name}.{part}": slice(i * third, (i + 1) * third) for i, part in enumerate("qkv")}


def is_key_bias(part: str) -> bool:
    """Whether a name of ``name_parts`` is the bias of attention keys."""
    return bool(_KEY_BIAS.search(part)) or part.endswith(("in_proj_bias.k", "qkv.bias.k"))
