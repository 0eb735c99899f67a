"""GS004: the loss prints 0 while it is not 0.

Evidence   at least a tenth of the batches of the last epoch have a loss of exactly 0.0.
Cause      fp32 cross-entropy cannot show a loss under about 6e-8 (1 - p rounds away); the gradient on the negatives is still there.
Silent     fewer than ``least`` measured batches; 30 logged steps without readings.
Mislead    a log of another tool may print 0 because of its own rounding to a few digits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import LOGGED, MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View


@rules.register("GS004")
@dataclass(frozen=True, kw_only=True)
class LossPrintsZero:
    id: ClassVar[str] = "GS004"
    title: ClassVar[str] = "The loss prints 0"
    severity: ClassVar[str] = "note"
    elsewhere: ClassVar[str] = (
        "Read the true loss and the residual instead of the printed loss: gradscope.Probe logs both. If training is to go on, "
        "see the finding on saturation."
    )
    share: float = 0.1
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        probed = view.reading("loss", "trained", view.term)
        window = probed.recent(self.least) if len(probed.values) else view.column("loss").recent(LOGGED)
        share = window.share(window.values == 0)
        if not len(probed.values) and view.resolution("loss") and share:
            raise Unmeasured(f"{view.rounding('loss')}: a 0 need not be one")
        if share < self.share:
            return None
        return found(
            self,
            window.evidence("share with a loss of exactly 0.0", share),
            *where_measured(lambda: self._true(view)),
            *where_measured(lambda: self._gradient(view)),
            cause="Cross-entropy in fp32 rounds to 0 below about 6e-8. The gradient does not: it is formed from the "
            "negatives, and in fp32 "
            "it is exactly 0 only beyond a logit gap of about 100."
            + ("" if view.kind == "run" else " Or the log rounds to a few digits: it does not show which."),
            action="Read the true loss and the residual instead of the printed loss (--log-grads). If training is to go on, see the "
            "finding on saturation.",
            effect="None on training: this is what the printed number cannot show.",
            verify="reading loss/log10_true goes on falling below the floor.",
        )

    def _true(self, view: View) -> Evidence:
        window = view.reading("loss", "log10_true", view.term).recent(self.least)
        return window.evidence("true loss, median over batches", 10 ** window.median(), "nat")

    def _gradient(self, view: View) -> Evidence:
        window = view.reading("zeros", "loss_zero_gradient_not", view.term).recent(self.least)
        return window.evidence("share of measured batches that print 0 while a logit gradient is not", window.mean())
