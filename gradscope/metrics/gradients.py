"""Norms, cosines and zero counts of a gradient that lives in many tensors, true over forty decades.

A naive fp32 norm squares its entries: below 1e-23 each square is 0 and so is the norm. Here every tensor is divided by the largest
magnitude of the whole gradient first and summed in float64. Source: paper facts, section 7.1 (ii).
How it can mislead: a norm says nothing about how many entries carry it; read it beside the zero shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Gradient = Sequence[Tensor | None]


def present(gradient: Gradient) -> list[Tensor]:
    return [g for g in gradient if g is not None]


def max_abs(gradient: Gradient) -> Tensor:
    """The largest magnitude, [] of the gradient's dtype; nan if any entry is nan."""
    return torch.stack([g.abs().max() for g in present(gradient)]).max()


def squared_parts(gradient: Gradient, unit: Tensor) -> Tensor:
    """Per tensor, the sum of squares of g / unit, float64 [tensors]; 0 for absent ones. ``unit`` [] is ``max_abs`` (0 gives 0)."""
    safe = torch.where(unit == 0, torch.ones_like(unit), unit)
    zero = torch.zeros((), dtype=torch.float64, device=unit.device)
    parts = [zero if g is None else torch.linalg.vector_norm(g / safe, dtype=torch.float64) ** 2 for g in gradient]
    return torch.stack(parts)


def true_norm(gradient: Gradient) -> Tensor:
    """The Euclidean norm over all entries, [] float64."""
    unit = max_abs(gradient)
    return unit.double() * squared_parts(gradient, unit).sum().sqrt()


def naive_norm(gradient: Gradient) -> Tensor:
    """What a plain fp32 square-and-sum gives, [] fp32: zero where every square underflows."""
    return torch.stack([(g * g).sum() for g in present(gradient)]).sum().sqrt()


def cosine(first: Gradient, second: Gradient) -> Tensor:
    """Cosine between two gradients over the same parameters, [] float64; nan where either is zero."""
    a, b = max_abs(first), max_abs(second)
    dots = [
        torch.dot((x / a).double().flatten(), (y / b).double().flatten())
        for x, y in zip(first, second, strict=True)
        if x is not None and y is not None
    ]
    lengths = squared_parts(first, a).sum().sqrt() * squared_parts(second, b).sum().sqrt()
    return torch.stack(dots).sum() / lengths


def zero_counts(gradient: Gradient) -> Tensor:
    """Exactly zero entries per tensor, int64 [tensors]; an absent tensor counts none. nan is not zero."""
    device = present(gradient)[0].device
    none = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([none if g is None else g.numel() - torch.count_nonzero(g) for g in gradient])
