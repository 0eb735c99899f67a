"""GS005: the pull on the positive is rounded to 0, the push on the negatives is not.

Evidence   for at least half of the anchors of the last epoch the gradient of the own cell is exactly 0 and a negative's is not.
Cause      fp32 cross-entropy forms the positive's gradient as p - 1, which is 0 once the residual is under 6e-8.
Silent     fewer than ``least`` measured batches; no readings of the set "full".
Mislead    those rows hold almost no gradient: it is the direction that is wrong, of something already small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.run_view import View


@rules.register("GS005")
@dataclass(frozen=True, kw_only=True)
class PullLost:
    id: ClassVar[str] = "GS005"
    title: ClassVar[str] = "The pull on the positive is rounded to 0"
    severity: ClassVar[str] = "note"
    elsewhere: ClassVar[str] = (
        "Form the loss as log1p of the summed exp(s_neg - s_pos): the same value, and its pull does not round away (gradscope "
        "train has it as --loss-form residual)."
    )
    share: float = 0.5
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        window = view.both("zeros", "positive_zero", view.term).recent(self.least)
        if window.mean() < self.share:
            return None
        return found(
            self,
            window.evidence("share of anchors whose own cell has gradient 0 while a negative's has not", window.mean()),
            cause="The positive's gradient is p - 1, and p is 1.0 in fp32 from a residual of 6e-8 down: negatives push, nothing pulls.",
            action="--loss-form residual (the same loss; the pull is formed from the negatives and does not round away).",
            effect="Row sums of the logit gradient return to 0; a loss scale would not repair it, since it multiplies a zero.",
            verify="readings zeros/positive_zero and zeros/row_sum of the new run: both 0 to rounding.",
        )
