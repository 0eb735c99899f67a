"""GS014: saturated, with the learned scale held at its limit.

Evidence   at least half of the batches of the last epoch are under 1e-3, and the scale sat at its clamp in nine tenths of them.
Cause      every logit gap is multiplied by the largest scale allowed; with the limit in the way it can only fall.
Silent     batches not saturated (pretrained CLIP starts at the limit: normal by itself); a fixed scale; fewer than ``least`` batches.
Mislead    a lower scale raises the residual at once and weakens HN's margin by the same factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.judgement import SATURATED
from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.rules.saturated import share_evidence, under_1e3
from gradscope.run_view import Evidence, View


@rules.register("GS014")
@dataclass(frozen=True, kw_only=True)
class ScaleAtLimit:
    id: ClassVar[str] = "GS014"
    title: ClassVar[str] = "The scale is at its limit, and the softmax saturated"
    severity: ClassVar[str] = "note"
    elsewhere: ClassVar[str] = (
        "Clamp the scale lower, at 50 say; gradscope what-if on stored embeddings shows loss and residual over scales, without "
        "training."
    )
    share: float = 0.9
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        limit = view.reading("scale", "at_limit").recent(self.least)
        window = under_1e3(view, self.least)
        if limit.mean() < self.share or window.mean() < SATURATED:
            return None
        return found(
            self,
            limit.evidence("share of measured batches with the scale at its clamp", limit.mean()),
            share_evidence(view, window),
            *where_measured(lambda: self._scale(view)),
            cause="Logit gaps are cosine gaps times the scale: at the limit an easy batch saturates soonest.",
            action="--set train.scale_max=50 clamps it lower; gradscope what-if shows loss and residual over scales, without training.",
            effect="At half the scale the log of the residual roughly halves: 1e-6 becomes 1e-3.",
            verify="readings scale/value and residual/mean of the new run, and its validation: a softer softmax may cost recall.",
        )

    def _scale(self, view: View) -> Evidence:
        window = view.reading("scale", "value").recent(self.least)
        return window.evidence("scale, median", window.median(), "1")
