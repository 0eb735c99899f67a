"""GS025: values that are nan or infinite.

Evidence   any logged loss, gradient norm (of steps that were not skipped), scale or validation recall that is not finite. One is
           enough: the least number of values for this rule is 1.
Cause      overflow in half precision, a rate too large, a zero vector that was normalised, or weights that were broken before.
Silent     no such value.
Mislead    a step that mixed precision skipped has no gradient norm by design, and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import Finding, found, rules
from gradscope.run_view import Evidence, Series, View

COLUMNS = ("loss", "grad_norm", "scale")


@rules.register("GS025")
@dataclass(frozen=True, kw_only=True)
class NonFinite:
    id: ClassVar[str] = "GS025"
    title: ClassVar[str] = "Values are nan or infinite"
    severity: ClassVar[str] = "error"
    any_width: ClassVar[bool] = True
    elsewhere: ClassVar[str] = (
        "Go back to the last checkpoint before the first such step; bf16 or fp32 instead of fp16, a lower learning rate, "
        "gradients clipped at norm 1; look at that step's batch (zero vectors, empty captions)."
    )
    least: int = 1

    def __call__(self, view: View) -> Finding | None:
        if "loop" in view.facts:  # as for View.logged_loss
            series = [view.reading("accumulation", "norm", "total")]
        else:
            series = [view.column(name) for name in COLUMNS]
        series += [view.reading("loss", "trained", view.term), view.reading("scale", "value"), *_recalls(view)]
        if not any(s.values.size for s in series):
            view.column("loss").whole(self.least)
        bad = [evidence for s in series for evidence in _bad(s, view)]
        if not bad:
            return None
        return found(
            self,
            *bad,
            cause="One value that is not finite in a batch spoils every gradient, and one step later every weight.",
            action="Go back to the last checkpoint before the first such step; --precision bf16 or fp32, a lower --lr, --set "
            "train.grad_clip=1; look at that step's batch (zero vectors, empty captions).",
            effect="No step is taken from a gradient that is not finite, so the weights stay whole.",
            verify="no value of the next run that is not finite, up to and beyond that step.",
        )


def _recalls(view: View) -> list[Series]:
    if view.evals.empty:
        return []
    rows = view.evals[view.evals["metric"] == "R@1"]
    steps, values = rows["step"].to_numpy(), rows["value"].astype(float).to_numpy()
    return [Series(name="evaluation R@1", unit="rows", missing="", steps=steps, epochs=np.full(len(rows), np.nan), values=values)]


def _bad(series: Series, view: View) -> list[Evidence]:
    skipped = view.skipped()
    kept = ~np.isin(series.steps, skipped.steps[skipped.values > 0])
    bad = kept & ~np.isfinite(series.values)
    if not bad.any():
        return []
    first = int(series.steps[bad][0])
    return [
        Evidence(
            what="values that are not finite", value=float(bad.sum()), unit="values", where=f"{series.name}, first at step {first}"
        )
    ]
