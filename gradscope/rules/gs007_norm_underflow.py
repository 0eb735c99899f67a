"""GS007: the gradient norm prints 0 while the gradient does not.

Evidence   in at least a tenth of the batches a plain fp32 square-and-sum over all parameters is 0 though entries are not; or, in a log
           without readings, the logged gradient norm is 0 in a tenth of the steps.
Cause      squares of entries under about 1e-23 are below the smallest fp32 number.
Silent     fewer than ``least`` measured batches; 30 logged steps without readings.
Mislead    without readings a norm of 0 may also be a gradient that really is 0 (GS008 tells them apart in runs of ours).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import LOGGED, MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View, Window


@rules.register("GS007")
@dataclass(frozen=True, kw_only=True)
class NormUnderflow:
    id: ClassVar[str] = "GS007"
    title: ClassVar[str] = "The gradient norm prints 0"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Read max-abs and the true norm (readings gradient/norm, accumulation/norm of gradscope.Probe); do not clip by this "
        "norm, and see the finding on saturation for the cause."
    )
    share: float = 0.1
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        window = self._zero(view)
        if window.mean() < self.share:
            return None
        return found(
            self,
            window.evidence("share with a norm of 0 in fp32", window.mean()),
            *where_measured(lambda: self._true(view)),
            cause="An fp32 norm squares its entries: below about 1e-23 every square is 0, and so is the norm that is printed and "
            "clipped."
            + ("" if len(view.readings) else " This log cannot tell it from a gradient that really is 0, which a probe can."),
            action="Read max-abs and the true norm (readings gradient/norm, accumulation/norm); do not clip by this norm (--set "
            "train.grad_clip=0), and see the finding on saturation for the cause.",
            effect="The readings show how small the gradient is instead of 0.",
            verify="reading gradient/log10_norm is finite.",
        )

    def _zero(self, view: View) -> Window:
        series = view.reading("zeros", "naive_norm_zero", view.term)
        if len(series.values):
            return series.recent(self.least)
        if "loop" in view.facts:  # its grad_norm is formed without underflow: a 0 there is a gradient of 0 (GS008, GS032)
            series.recent(self.least)
        norm = view.column("grad_norm").recent(LOGGED)
        if view.resolution("grad_norm") and (norm.values == 0).any():
            raise Unmeasured(f"{view.rounding('grad_norm')}: a 0 need not be one")
        return Window(values=(norm.values == 0).astype(float), where=norm.where)

    def _true(self, view: View) -> Evidence:
        window = view.reading("gradient", "log10_norm", view.term).recent(self.least)
        return window.evidence("true norm, median over batches", 10 ** window.median(), "nat / weight")
