"""GS021: the weights do not move.

Evidence   the learning rate was 0 in every logged step; or the median update is under 1e-7 of the weights in every tower; or one tower
           was not updated once, though a gradient reaches it.
Cause      a rate of 0 or far too small, a scheduler that ended, or an optimizer that does not hold these parameters.
Silent     fewer than ``least`` logged rates or measured batches; no column of rates and no readings of the update.
Mislead    logs round: where the loss of a log falls, its rates of 0 are not believed. At the end of a schedule the rate is meant to
           be near 0: the median is taken over the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gradscope.rules import LOGGED, MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View

TOWERS = ("image", "text")
LEFT_OUT = "The optimizer does not hold this tower's parameters, or its rate is 0, or its gradient is zeroed before the step."


@rules.register("GS021")
@dataclass(frozen=True, kw_only=True)
class NoUpdate:
    id: ClassVar[str] = "GS021"
    title: ClassVar[str] = "The weights do not move"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = (
        "Raise the learning rate (1e-5 is usual for a pretrained CLIP, 1e-4 for small models); check that the scheduler reaches"
        " its peak and that the optimizer holds the trained parameters."
    )
    ratio: float = 1e-7
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        rate = where_measured(lambda: self._rate(view))
        moved = self._moved(view)
        if not rate and not moved:
            self._ratio(view, TOWERS[0])  # raises, and says what records it
        still, resting = bool(moved) and max(e.value for e in moved) < self.ratio, bool(rate) and rate[0].value == 0
        left = () if still or resting else tuple(evidence for tower in TOWERS for evidence in self._left_out(view, tower))
        if not still and not resting and not left:
            return None
        return found(
            self,
            *(rate + moved if resting and not still else left + moved + rate),
            cause=LEFT_OUT
            if left
            else "An update below 6e-8 of a weight is rounded away in fp32: with this rate training only repeats the evaluation.",
            action="Raise --lr (1e-5 is usual for a pretrained CLIP, 1e-4 for small models); check that the scheduler reaches its "
            "peak (--set train.warmup=0) and that the optimizer holds the trained parameters.",
            effect="An update ratio of 1e-6 to 1e-3 per step.",
            verify="readings optimizer/update_ratio.image and .text.",
        )

    def _rate(self, view: View) -> Evidence:
        if view.kind != "run" and _falls(view):  # a rate that a log rounds to 0 is not 0
            raise Unmeasured("the log's learning rates are rounded")
        window = view.column("lr").whole(self.least)
        return window.evidence("largest learning rate", float(window.values.max()), "1")

    def _moved(self, view: View) -> tuple[Evidence, ...]:
        return tuple(evidence for tower in TOWERS for evidence in where_measured(partial(self._ratio, view, tower)))

    def _left_out(self, view: View, tower: str) -> tuple[Evidence, ...]:
        """The gradient of a tower that no update has moved; () for one that moves, or that no gradient reaches."""
        try:
            update = view.reading("optimizer", f"update_ratio.{tower}", "total").whole(self.least)
            norm = view.reading(
                "gradient", f"norm.{tower}", view.term
            ).whole()  # once is enough: it is never zeroed where it is not held
        except Unmeasured:
            return ()
        if update.values.any() or not norm.median():
            return ()
        return (
            norm.evidence(f"gradient norm of the {tower} tower, which was not updated once, median", norm.median(), "nat / weight"),
        )

    def _ratio(self, view: View, tower: str) -> Evidence:
        window = view.reading("optimizer", f"update_ratio.{tower}", "total").whole(self.least)
        return window.evidence(f"update / weights of the {tower} tower, median over the run", window.median(), "ratio")


def _falls(view: View) -> bool:
    """Whether the loss of the last quarter is under 98 % of the first's."""
    values = view.column("loss").whole(LOGGED).values
    size = len(values) // 4
    return float(np.median(values[-size:])) < 0.98 * float(np.median(values[:size]))
