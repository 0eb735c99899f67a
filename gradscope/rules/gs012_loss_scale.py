"""GS012: mixed precision keeps skipping steps, or its loss scale collapses.

Evidence   at least a tenth of the steps of the last epoch were skipped, not counting the search before the first accepted step; or
           the loss scale ended under 1.
Cause      gradients overflow fp16 again and again: too high a rate, a wide logit range, or a module that does not bear fp16.
Silent     fewer than ``least`` steps after the first accepted one; no column of skipped steps.
Mislead    the scaler's search at the start, and one skip in a few thousand steps when it tries a larger factor, are normal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View


@rules.register("GS012")
@dataclass(frozen=True, kw_only=True)
class LossScale:
    id: ClassVar[str] = "GS012"
    title: ClassVar[str] = "Mixed precision skips steps"
    severity: ClassVar[str] = "error"
    any_width: ClassVar[bool] = True
    elsewhere: ClassVar[str] = (
        "torch.autocast in bf16 (no GradScaler needed) or fp32; else a lower learning rate, or gradients clipped at norm 1 "
        "after scaler.unscale_."
    )
    share: float = 0.1
    least: int = 20

    def __call__(self, view: View) -> Finding | None:
        every = view.skipped()
        every.whole()  # raises where there is no such column
        accepted = np.flatnonzero(every.values == 0)  # before the first one the scaler looks for a factor that fits
        after = every.values[int(accepted[0]) if accepted.size else 0 :]
        if len(after) < self.least:
            raise Unmeasured(f"column skipped covers {len(after)} steps after the first accepted one, at least {self.least} are needed")
        share = float(after.mean())
        if share < self.share and self._last_scale(view) >= 1.0:
            return None
        steps = (every.whole().evidence("share of steps skipped after the first accepted one", share),)
        scale = where_measured(lambda: self._scale_evidence(view))
        return found(
            self,
            *(scale + steps if share < self.share else steps + scale),
            cause="The scaled gradient overflows fp16: those batches teach nothing, and the factor falls until small gradients round "
            "to 0.",
            action="--precision bf16 (no loss scale needed) or fp32; else a lower --lr or --set train.grad_clip=1.",
            effect="No step is skipped after the first few.",
            verify="column skipped; gradscope check --max-skipped 0.01.",
        )

    def _last_scale(self, view: View) -> float:
        found_scale = where_measured(lambda: self._scale_evidence(view))
        return found_scale[0].value if found_scale else 1.0

    def _scale_evidence(self, view: View) -> Evidence:
        window = view.column("loss_scale").whole()
        return window.evidence("loss scale at the end", float(window.values[-1]), "factor")
