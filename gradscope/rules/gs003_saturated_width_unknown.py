"""GS003: the loss is all but zero, and the log does not say how wide the softmax is.

Evidence   at least half of the logged steps at the end have a loss under 1e-3.
Cause      saturation; whether of a narrow softmax, an easy data set or memorising cannot be told from a loss alone.
Silent     width known (GS001, GS002 speak then); fewer than ``least`` logged steps.
Mislead    a loss averaged over steps before it was logged hides the few batches that still teach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.judgement import SATURATED
from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.rules.saturated import share_evidence, under_1e3
from gradscope.run_view import View


@rules.register("GS003")
@dataclass(frozen=True, kw_only=True)
class SaturatedWidthUnknown:
    id: ClassVar[str] = "GS003"
    title: ClassVar[str] = "The loss is all but zero"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Give --width N (candidates per softmax: batch size, times ranks if features are gathered) for a closer answer; "
        "attach gradscope.Probe to see the residual, the rows that still teach and the gradient."
    )
    share: float = SATURATED
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        if view.width is not None:
            return None
        window = under_1e3(view, self.least)
        if window.mean() < self.share:
            return None
        return found(
            self,
            share_evidence(view, window),
            window.evidence("median loss", view.column("loss").recent(self.least).median(), "nat"),
            cause="Every positive wins its softmax by a wide gap. That is expected with few or easy negatives; it is no proof that "
            "retrieval among thousands works.",
            action=self.elsewhere,
            effect="Below width 128 a wider batch or cached accumulation brings the loss back; above it, harder negatives or a margin.",
            verify="Recall on a gallery of a thousand or more; the loss of the same weights at twice the batch size.",
        )
