"""GS009: the optimizer's eps is larger than what it divides.

Evidence   for at least half of the entries the batches reach, the median over the last epoch, sqrt(v_hat) is below Adam's eps.
Cause      gradients so small (saturation) or eps so large that the normalised step shrinks to about gradient / eps.
Silent     fewer than ``least`` measured batches; an optimizer without moments; where the rows a batch cannot reach are not known, a
           share under nine tenths (a large token embedding is mostly such rows).
Mislead    entries whose gradient is always 0 (rows of tokens never seen) count as dominated: the unreached share is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View

#: The share that must be dominated where nothing says which entries a batch can reach.
UNKNOWN_REACH = 0.9


@rules.register("GS009")
@dataclass(frozen=True, kw_only=True)
class EpsDominated:
    id: ClassVar[str] = "GS009"
    title: ClassVar[str] = "Updates are dominated by Adam's eps"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = "Bring the gradient back (see saturation), or give the optimizer a smaller eps, such as 1e-12."
    share: float = 0.5
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        window = view.reading("optimizer", "eps_dominated", "total").recent(self.least)
        unreached, limit = self._unreached(view), self.share
        if unreached is None:
            unreached, limit = 0.0, UNKNOWN_REACH
        share = (window.median() - unreached) / (1 - unreached)
        if share < limit:
            return None
        eps = view.setting_or("train.eps", "not known")
        return found(
            self,
            window.evidence("share of entries with sqrt(v_hat) under eps, unreached rows taken off, median over batches", share),
            *where_measured(lambda: self._step(view)),
            cause="Adam divides by sqrt(v_hat) + eps. Where eps is the larger, steps shrink with the gradient: it exists, and moves "
            "nothing.",
            action=f"Bring the gradient back (see saturation), or lower eps: --set train.eps=1e-12 (now {eps}).",
            effect="The median normalised step returns to the order of 0.1 learning rates.",
            verify="readings optimizer/eps_dominated and optimizer/step_q50.",
        )

    def _step(self, view: View) -> Evidence:
        window = view.reading("optimizer", "step_q50", "total").recent(self.least)
        return window.evidence("median normalised step", window.median(), "learning rates")

    def _unreached(self, view: View) -> float | None:
        try:
            return view.reading("zeros", "structural.parameters", view.term).recent(self.least).median()
        except Unmeasured:
            return None
