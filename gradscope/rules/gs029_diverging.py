"""GS029: the loss has left its best level and stays up.

Evidence   of the last quarter of the logged losses the lower quartile is above the upper quartile of the best earlier stretch of that
           length, and the medians differ by a quarter of ln(width) (0.25 nat where the width is not known).
Cause      a learning rate too large, a broken batch that damaged the weights, or data that changed.
Silent     fewer than ``least`` logged losses; spikes that come back (a quarter of the run must stay up); a loss that only ever fell.
Mislead    a curriculum or a wider softmax from some step on raises the loss by design.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import Finding, found, rules
from gradscope.run_view import View


@rules.register("GS029")
@dataclass(frozen=True, kw_only=True)
class Diverging:
    id: ClassVar[str] = "GS029"
    title: ClassVar[str] = "The loss diverges"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = (
        "Restart from the best checkpoint with a third of the learning rate, a warm-up of some hundred steps and gradients "
        "clipped at norm 1."
    )
    rise: float = 0.25
    least: int = 40

    def __call__(self, view: View) -> Finding | None:
        window = view.column("loss").whole(self.least)
        size = len(window.values) // 4
        every = np.lib.stride_tricks.sliding_window_view(window.values[:-size], size)  # [starts, size]
        stretches = every[:: max(1, size // 8)]  # a median of each of a long log's stretches would fill the memory
        best = stretches[int(np.argmin(np.median(stretches, axis=1)))]
        last = window.values[-size:]
        rise = float(np.median(last) - np.median(best))
        limit = self.rise * (math.log(view.width) if view.width else 1.0)
        if np.quantile(last, 0.25) <= np.quantile(best, 0.75) or rise < limit:
            return None
        return found(
            self,
            window.evidence(f"median loss of the best {size} steps in a row", float(np.median(best)), "nat"),
            window.evidence(f"median loss of the last {size} steps", float(np.median(last)), "nat"),
            cause="The weights have moved to where the loss is worse and do not come back: a rate too large, or a batch that broke "
            "them.",
            action="Restart from the best checkpoint with a lower --lr (a third), --set train.warmup=100 and --set train.grad_clip=1.",
            effect="The loss stays near its best level; single spikes come back within some steps.",
            verify="column loss, and validation R@1 by epoch.",
        )
