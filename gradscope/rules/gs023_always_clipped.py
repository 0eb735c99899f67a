"""GS023: every gradient is clipped, and by much.

Evidence   at least 95 % of the gradients of the last epoch are above the limit, their median at least twice.
Cause      the limit is below the usual norm: clipping, meant for outliers, sets the length of every step.
Silent     no clipping (or not known); fewer than ``least`` steps.
Mislead    Adam divides a constant factor away again; what changes is the weight of large batches against small ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradscope.rules import Finding, found, rules
from gradscope.run_view import Series, View, Window


@rules.register("GS023")
@dataclass(frozen=True, kw_only=True)
class AlwaysClipped:
    id: ClassVar[str] = "GS023"
    title: ClassVar[str] = "Every gradient is clipped"
    severity: ClassVar[str] = "note"
    elsewhere: ClassVar[str] = "Set the limit of clipping to two or three times the median norm, or do without."
    share: float = 0.95
    factor: float = 2.0
    least: int = 20

    def __call__(self, view: View) -> Finding | None:
        ratio = self._ratio(view)
        if ratio is None:
            return None
        share = ratio.share(ratio.values > 1.0)
        if share < self.share or ratio.median() < self.factor:
            return None
        return found(
            self,
            ratio.evidence("share of gradients that are clipped", share),
            ratio.evidence("norm before clipping / after, median", ratio.median(), "ratio"),
            cause="The limit lies below the usual norm: every gradient is scaled to the same length, a hard batch counts like an "
            "easy one.",
            action="Set the limit to two or three times the median norm (--set train.grad_clip=...), or 0 to do without.",
            effect="Only outliers are clipped.",
            verify="column grad_norm (before clipping) against the limit; readings accumulation/norm and accumulation/norm_clipped.",
        )

    def _ratio(self, view: View) -> Window | None:
        """Norm before / after clipping; None where nothing clips."""
        limit = float(view.setting_or("train.grad_clip", 0.0))
        if limit > 0:
            norm = view.column("grad_norm").recent(self.least)
            return Window(values=norm.values / limit, where=norm.where)
        after = view.reading("accumulation", "norm_clipped", "total")
        if not len(after.values):
            view.setting("train.grad_clip")  # raises where nothing says whether there is clipping
            return None
        before = view.reading("accumulation", "norm", "total")
        return _divided(before, after).recent(self.least)


def _divided(before: Series, after: Series) -> Series:
    at = dict(zip(before.steps.tolist(), before.values.tolist(), strict=True))
    values = [at[step] / value if value else math.nan for step, value in zip(after.steps.tolist(), after.values.tolist(), strict=True)]
    return replace(after, name="readings accumulation/norm and norm_clipped", values=np.array(values))
