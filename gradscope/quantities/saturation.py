"""Which batches and which rows have stopped teaching.

    below_1e-3, below_1e-5        1 if the true batch loss is under the threshold, else 0
    rows_below_1e-3.<direction>   share of anchors whose residual 1 - p_ii is under 1e-3
    effective_rows.<direction>    (sum r)^2 / sum r^2 of the residuals: how many anchors carry the batch's gradient, 1 ... N

First crossings of the two thresholds, with hysteresis, are derived from the log: ``gradscope.metrics.crossing``.
How to read: a mean loss of 1e-2 with effective_rows 1 is one row at work and the rest done.
How it can mislead: a share belongs to a width and to a trajectory; HN training itself drives InfoNCE down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradscope.metrics.softmax import effective_number, log10_mean_loss
from gradscope.quantities import quantities
from gradscope.types import Reading, Step

THRESHOLDS = ("1e-3", "1e-5")
ROW_THRESHOLD = 1e-3


@quantities.register("saturation")
@dataclass(frozen=True, kw_only=True)
class Saturation:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "loss"

    def __call__(self, step: Step) -> list[Reading]:
        readings = []
        for name, head in step.heads.items():
            log10 = log10_mean_loss(head.anchors)
            for threshold in THRESHOLDS:
                # A nan loss is below nothing: the comparison alone would say "not saturated" of it.
                below = (log10 < math.log10(float(threshold))).double() + 0.0 * log10.clamp(-1.0, 1.0)
                readings.append(Reading(quantity="saturation", key=f"below_{threshold}", term=name, value=below, unit="0/1"))
            for direction, x in head.anchors.log_odds.items():
                r = torch.sigmoid(x)  # [N]
                share = (r < ROW_THRESHOLD).double().mean() + 0.0 * r.mean()
                rows = effective_number(r)
                readings += [
                    Reading(quantity="saturation", key=f"rows_below_1e-3.{direction}", term=name, value=share, unit="share"),
                    Reading(quantity="saturation", key=f"effective_rows.{direction}", term=name, value=rows, unit="rows"),
                ]
        return readings
