"""The loss of the measured batch, as trained and true, for InfoNCE and HN at the same parameters.

    trained       fp32 cross-entropy, mean over anchors and directions (nat)
    true          the same mean in float64 from softplus(logsumexp of negatives - positive), from the fp32 logits
    log10_true    its log10: no trace meets a floor
    chance        ln(width), the loss of guessing (a little less for an anchor whose duplicates are excluded)

What was minimised, weighted terms included, is ``accumulation``'s mean_loss: another term than this one is not in these values.

How to read: trained 0.0 with a finite log10_true is rounding, not the end of the gradient.
How it can mislead: width decides the value; 1e-3 at width 16 and at width 128 are two different achievements. HN's value holds the
margin and does not compare with InfoNCE's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gradscope.metrics.softmax import log10_mean_loss
from gradscope.quantities import quantities
from gradscope.types import Reading, Step


@quantities.register("loss")
@dataclass(frozen=True, kw_only=True)
class Loss:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "loss"

    def __call__(self, step: Step) -> list[Reading]:
        readings = []
        for name, head in step.heads.items():
            log10 = log10_mean_loss(head.anchors)
            width = len(head.anchors.positive)
            readings += [
                Reading(quantity="loss", key="trained", term=name, value=head.loss, unit="nat"),
                Reading(quantity="loss", key="true", term=name, value=10.0**log10, unit="nat"),
                Reading(quantity="loss", key="log10_true", term=name, value=log10, unit="log10 nat"),
                Reading(quantity="loss", key="chance", term=name, value=math.log(width), unit="nat"),
            ]
        return readings
