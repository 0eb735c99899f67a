"""GS031: the scale is large, and the softmax at least partly saturated.

Evidence   the scale at the end is over ``limit``, where CLIP clamps its own, and the run is partly saturated or more; or the scale grew
           more than ``grown`` times within the run, and the run is saturated.
Cause      a scale that is learned without a clamp, or set too high: every cosine gap is multiplied by it.
Silent     not saturated; fewer than ``least`` logged scales, losses or measured batches.
Mislead    the loss falls as the scale rises, though not a single pair changes its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.judgement import saturation_state
from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.rules.saturated import anchors_evidence, share_evidence, under_1e3
from gradscope.run_view import View

ENDS = 5


@rules.register("GS031")
@dataclass(frozen=True, kw_only=True)
class LargeScale:
    id: ClassVar[str] = "GS031"
    title: ClassVar[str] = "The scale saturates the softmax"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Clamp the learned scale after each step (CLIP: model.logit_scale.data.clamp_(max=math.log(100)); lower where it saturates "
        "below that), or hold it fixed: requires_grad_(False)."
    )
    limit: float = 100.0
    grown: float = 3.0
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        window = view.column("scale").whole(self.least)
        first, last = float(np.median(window.values[:ENDS])), float(np.median(window.values[-ENDS:]))
        below = under_1e3(view, self.least)
        anchors = where_measured(lambda: anchors_evidence(view, self.least))
        state = saturation_state(below.mean(), *(evidence.value for evidence in anchors))
        large = last > 1.001 * self.limit and state != "not saturated"
        if not large and not (last > self.grown * first and state == "SATURATED"):
            return None
        return found(
            self,
            window.evidence("scale at the start", first, "1"),
            window.evidence("scale at the end", last, "1"),
            share_evidence(view, below),
            *anchors,
            cause=f"Every gap in cosine is multiplied by the scale: a gap of 0.1 was {first / 10:.1f} logits at the start and is "
            f"{last / 10:.1f} at the end. A larger scale lowers the loss without changing one rank.",
            action="--set train.scale_max=50 (CLIP clamps at 100), or --scale fixed on weights with a small one.",
            effect="At half the scale the log of the residual roughly halves: 1e-6 becomes 1e-3.",
            verify="column scale of the next run; the loss at several scales with gradscope what-if.",
        )
