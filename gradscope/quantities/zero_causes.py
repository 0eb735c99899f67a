"""What can be said of the causes of zeros without another pass: counts of entries over all parameters, by objective.

    entries, zeros                all of the model, and those without a gradient: frozen + unused + structural + other
    frozen, unused                of parameters that do not train; of those that train and that the loss does not reach
    structural                    exact zeros in rows that this batch cannot reach, and of the bias of attention keys
    other                         the remaining exact zeros: dead units, underflow, saturation. ``gradscope zeros`` tells them apart
    squared_underflow             non-zero, but with a square of 0 in fp32 (|g| <= 2^-75): missing from a plain norm, and not a zero

Definitions and source: ``gradscope.metrics.zero_causes``. How to read: ``other`` alone may speak of precision or saturation.
How it can mislead: without the batch's token ids (a loop that is not ours) nothing is known to be structural beside the key bias, and
the untouched rows of the token table count as ``other``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradscope.metrics.gradients import statistics
from gradscope.metrics.zero_causes import is_key_bias, name_parts, zeros_in_rows
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Step


@quantities.register("zero_causes")
@dataclass(frozen=True, kw_only=True)
class ZeroCauses:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "full"
    needs: ClassVar[tuple[str, ...]] = ("param_grads",)

    def __call__(self, step: Step) -> list[Reading]:
        return [
            Reading(quantity="zero_causes", key=key, term=head.name, value=value, unit="entries")
            for head in step.heads.values()
            if head.param_grads is not None and any(g is not None for g in head.param_grads)
            for key, value in _counts(step, head).items()
        ]


def _counts(step: Step, head: Head) -> dict[str, Tensor | float]:
    assert head.param_grads is not None
    found = statistics(head.param_grads, step.memo)
    zeros = found.zeros  # [tensors]
    unused = sum(p.numel() for p, g in zip(step.parameters, head.param_grads, strict=True) if g is None)
    structural = torch.stack([zeros.sum() * 0, *_structural(step, head)]).sum()
    squares = found.plain_squares(head.param_factor)[1].sum()
    entries = sum(g.numel() for g in head.param_grads if g is not None)
    return {
        "entries": float(sum(p.numel() for p in step.parameters) + step.frozen_entries),
        "zeros": zeros.sum() + unused + step.frozen_entries,
        "frozen": float(step.frozen_entries),
        "unused": float(unused),
        "structural": structural,
        "other": zeros.sum() - structural,
        "squared_underflow": entries - zeros.sum() - squares,
    }


def _structural(step: Step, head: Head) -> Iterator[Tensor]:
    """Exact zeros of this cause in each tensor that has any, int64 []."""
    assert head.param_grads is not None
    for name, gradient in zip(step.names, head.param_grads, strict=True):
        if gradient is None:
            continue
        if name in step.structural_rows:
            yield zeros_in_rows(gradient, step.structural_rows[name])
        elif gradient.ndim == 1:
            for part, rows in name_parts(name, len(gradient)).items():
                if is_key_bias(part):
                    yield (gradient[rows] == 0).sum()
