"""The step as a whole: what its micro-batches add up to, before clipping.

    mean_loss                     mean over micro-batches of the total loss, as trained (nat)
    norm, log10_norm              of the averaged gradient over all parameters: what the optimizer is handed (before clipping)
    entries_zero                  share of exactly zero entries of that gradient

How it can mislead: with narrow accumulation this is an average of small softmaxes, not the gradient of one wide softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.metrics.gradients import present, true_norm, zero_counts
from gradscope.quantities import quantities
from gradscope.types import Reading, Step


@quantities.register("accumulation")
@dataclass(frozen=True, kw_only=True)
class Accumulation:
    phase: ClassVar[str] = "step"
    tier: ClassVar[str] = "default"

    def __call__(self, step: Step) -> list[Reading]:
        assert step.accumulated is not None
        assert step.micro_losses is not None
        norm = true_norm(step.accumulated)
        entries = sum(g.numel() for g in present(step.accumulated))
        zero = zero_counts(step.accumulated).sum().double() / entries
        return [
            Reading(quantity="accumulation", key="mean_loss", term="total", value=step.micro_losses.double().mean(), unit="nat"),
            Reading(quantity="accumulation", key="norm", term="total", value=norm, unit="nat / weight"),
            Reading(quantity="accumulation", key="log10_norm", term="total", value=norm.log10(), unit="log10"),
            Reading(quantity="accumulation", key="entries_zero", term="total", value=zero, unit="share"),
        ]
