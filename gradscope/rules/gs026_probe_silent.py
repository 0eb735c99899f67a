"""GS026: the probe does not see what is trained.

Evidence   parts of the probe that failed; a probe that was on and read nothing; gradients that passed by at the embeddings in another
           direction than the objective's own (cosine under ``agreement``), or thousands of times longer.
Cause      a dead hook, a further loss term, another scale or mask in the loop's loss, a loss scale the probe was not told.
Silent     on the direction: a weighted token term (its gradient is meant to be in it), and saturated batches, where rounding alone
           turns what is left of a gradient; objective not known; fewer than ``least`` measured batches.
Mislead    half-precision logits lower the agreement by their rounding, to about .999.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.judgement import AGREEMENT, turned
from gradscope.rules import LOGGED, MEASURED, Finding, found, rules, where_measured
from gradscope.rules.gs032_no_gradient import lost
from gradscope.rules.saturated import under_1e3
from gradscope.run_view import Evidence, Unmeasured, View


@rules.register("GS026")
@dataclass(frozen=True, kw_only=True)
class ProbeSilent:
    id: ClassVar[str] = "GS026"
    title: ClassVar[str] = "The probe does not see what is trained"
    severity: ClassVar[str] = "error"
    any_width: ClassVar[bool] = True
    elsewhere: ClassVar[str] = (
        "Read the lines of the probe in console.log. Give the Probe its loss=, scaler= and trained=, or call probe.watch(image,"
        " text, scale) with what the loss compares."
    )
    agreement: float = AGREEMENT
    factor: float = 1e3
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        if not view.setting("probe.log_grads"):
            raise Unmeasured("the probe was off; --log-grads turns it on")
        evidence = [*self._nothing(view), *self._failed(view), *self._disagrees(view)]
        if not evidence:
            return None
        return found(
            self,
            *evidence,
            cause="What the readings describe is not, or not only, the loss that the loop minimises.",
            action="Read the lines of the probe in console.log. In a loop of your own give the Probe its loss=, scaler= and "
            "trained=, or call probe.watch(image, text, scale) with what the loss compares.",
            effect="Agreement 1 and factor 1 (1/k with k accumulated micro-batches).",
            verify="readings hooks/agreement and hooks/factor; no reading with key failed.",
        )

    def _nothing(self, view: View) -> list[Evidence]:
        if len(view.readings) or len(view.steps) < LOGGED:
            return []
        return [Evidence(what="readings of a probe that was on", value=0.0, unit="readings", where="readings.jsonl")]

    def _failed(self, view: View) -> list[Evidence]:
        if not len(view.readings):
            return []
        if lost(view, MEASURED):
            return []  # GS032 says it
        failed = view.readings[view.readings["key"] == "failed"]
        return [_failures(view, str(name), rows["step"].tolist()) for name, rows in failed.groupby("quantity")]

    def _disagrees(self, view: View) -> list[Evidence]:
        return [*another_direction(view, self.agreement), *self._long(view)]

    def _long(self, view: View) -> tuple[Evidence, ...]:
        if not judged(view):
            return ()
        factor = where_measured(lambda: self._factor(view))
        return tuple(evidence for evidence in factor if evidence.value > self.factor)

    def _factor(self, view: View) -> Evidence:
        factor = view.reading("hooks", "factor", view.trained).recent(self.least)
        return factor.evidence("its length in units of the objective's own, median", factor.median(), "ratio")


def judged(view: View) -> bool:
    """Whether the gradient at the embeddings should be the objective's own: known, and without a weighted token term."""
    return bool(view.trained) and not view.setting_or("objective.token_weight", 0.0) > 0


def another_direction(view: View, limit: float = AGREEMENT) -> tuple[Evidence, ...]:
    """The cosine that says that what was read is not what is trained; () where it is, or where that cannot be told."""
    if not judged(view):
        return ()
    try:
        agreement = view.reading("hooks", "agreement", view.trained).recent(MEASURED)
        batches = under_1e3(view, MEASURED).mean()
    except Unmeasured:
        return ()
    if not turned(agreement.values, batches, limit):
        return ()
    return (agreement.evidence("cosine with the objective's own gradient, median", agreement.median(), "cosine"),)


def _failures(view: View, name: str, steps: list[int]) -> Evidence:
    """With the probe's own words, where it wrote any."""
    words = view.failure(name)
    what = f"failures of '{name}'" + (f" ({words})" if words else "")
    return Evidence(what=what, value=float(len(steps)), unit="steps", where=f"first at step {min(steps)}")
