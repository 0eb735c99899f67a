"""Do the hooks see the truth? The gradient that passed by at the embeddings, against the one the objective itself has there.

    agreement    cosine between the two, over the rows of both towers: 1 if this objective, and nothing else, is what is trained
    factor       length of the projection of the one that passed by, in units of the other: 1; 1/k where the loop divides by its k
                 micro-batches; the number of ranks where a gather sends gradients back

Of an objective that is not trained only where a quantity beyond the set "loss" is read: else its gradient is not formed.
Units: cosine, ratio; float64. How to read: agreement below .999 says that the loop trains something else as well, or something else
(another scale, a bias, a mask); a factor of 65536 is a loss scale that the probe was not told. How it can mislead: in a loop of ours
without further terms the two are one by construction, and only the other objective's agreement says anything: how far the two pull
in one direction at the embeddings. Logits in bf16 or fp16 lower the agreement by their rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.metrics.gradients import agreement_and_factor
from gradscope.quantities import quantities
from gradscope.types import Reading, Step


@quantities.register("hooks")
@dataclass(frozen=True, kw_only=True)
class Hooks:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "loss"

    def __call__(self, step: Step) -> list[Reading]:
        if not step.passed:
            return []
        readings = []
        for name, head in step.heads.items():
            if head.image_grad is None or head.text_grad is None:
                continue
            own = {"image": head.image_grad, "text": head.text_grad}
            agreement, factor = agreement_and_factor(step.passed, {tower: own[tower][step.rows] for tower in step.passed})
            readings += [
                Reading(quantity="hooks", key="agreement", term=name, value=agreement, unit="cosine"),
                Reading(quantity="hooks", key="factor", term=name, value=factor, unit="ratio"),
            ]
        return readings
