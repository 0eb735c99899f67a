"""The scale: the multiplier of the cosines, after exp.

    value       the scale at the measured parameters
    at_limit    1 if it sits at the clamp (100 by default), where a learned scale can only fall; no reading where it is fixed

How it can mislead: the margin's weight is scale * gamma, so a falling scale weakens the margin too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.quantities import quantities
from gradscope.types import Reading, Step


@quantities.register("scale")
@dataclass(frozen=True, kw_only=True)
class Scale:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "loss"

    def __call__(self, step: Step) -> list[Reading]:
        scale = step.embeddings.scale
        readings = [Reading(quantity="scale", key="value", term="", value=scale, unit="1")]
        if step.scale_max is not None:
            at_limit = (scale >= step.scale_max * (1 - 1e-6)).double()
            readings.append(Reading(quantity="scale", key="at_limit", term="", value=at_limit, unit="0/1"))
        return readings
