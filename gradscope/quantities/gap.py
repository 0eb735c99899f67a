"""The gap of an anchor: cosine of its positive minus cosine of its hardest negative.

    mean, min, q10, q50 .<direction>      over anchors; captions excluded as duplicates are no negatives
    violated.<direction>                  share of anchors with a negative gap: retrieval within the batch fails there
    violated_with_margin.<direction>      share whose positive is beaten once the HN margin is added

Where the softmax is streamed the positive's cosine is formed in float64 and its negatives' in fp32: leads under 1e-6 are ties there,
which two equal captions would else win or lose by rounding.
How to read: gap times scale is the logit gap; 0.1 at scale 100 is 10 logits, a residual of about 4e-5 for each such negative.
How it can mislead: in a narrow cone every anchor can be violated under HN: active is not learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.metrics.order_statistics import quantile
from gradscope.quantities import quantities
from gradscope.types import Reading, Step

#: What fp32 products of unit rows, a margin included, may be off by.
TIE = 1e-6


@quantities.register("gap")
@dataclass(frozen=True, kw_only=True)
class Gap:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "loss"

    def __call__(self, step: Step) -> list[Reading]:
        plain, raised = (step.heads[name].anchors for name in ("infonce", "hn"))
        tie = -TIE if step.heads["hn"].scores is None else 0.0
        readings = []
        for direction in step.heads["hn"].directions:
            gap = plain.positive - plain.hardest[direction]  # [N] float64
            beaten = raised.positive - raised.hardest[direction] < tie
            values = {
                "mean": gap.mean(),
                "min": gap.min(),
                "q10": quantile(gap, 0.1),
                "q50": quantile(gap, 0.5),
                "violated": (gap < tie).double().mean() + 0.0 * gap.mean(),
                "violated_with_margin": beaten.double().mean() + 0.0 * gap.mean(),
            }
            readings += [
                Reading(
                    quantity="gap",
                    key=f"{key}.{direction}",
                    term="hn" if key == "violated_with_margin" else "",
                    value=value,
                    unit="share" if key.startswith("violated") else "cosine",
                )
                for key, value in values.items()
            ]
        return readings
