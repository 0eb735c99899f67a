"""GS022: single updates rewrite the weights.

Evidence   the median update of a tower over the run is at least a tenth of its weights.
Cause      a learning rate far above what the weights bear.
Silent     fewer than ``least`` measured updates; no readings of the set "full".
Mislead    a tower whose weights start near 0 has a large ratio at first: hence the median.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.rules.gs021_no_update import TOWERS
from gradscope.run_view import Evidence, View


@rules.register("GS022")
@dataclass(frozen=True, kw_only=True)
class UpdateTooLarge:
    id: ClassVar[str] = "GS022"
    title: ClassVar[str] = "Updates rewrite the weights"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = "Lower the learning rate tenfold or more, with some hundred steps of warm-up."
    ratio: float = 0.1
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        moved = [evidence for tower in TOWERS for evidence in where_measured(partial(self._ratio, view, tower))]
        if not moved:
            self._ratio(view, TOWERS[0])  # raises, and says what records it
        if max(evidence.value for evidence in moved) < self.ratio:
            return None
        return found(
            self,
            *sorted(moved, key=lambda evidence: -evidence.value),
            cause="Each step replaces a sizeable part of the weights: what was pretrained is gone after a few.",
            action=f"Lower --lr tenfold or more (now {view.setting_or('train.lr', 'not known')}), with some warm-up: --set "
            "train.warmup=100.",
            effect="An update ratio of 1e-6 to 1e-3 per step.",
            verify="readings optimizer/update_ratio.image and .text; validation R@1 no longer falls from the start.",
        )

    def _ratio(self, view: View, tower: str) -> Evidence:
        window = view.reading("optimizer", f"update_ratio.{tower}", "total").whole(self.least)
        return window.evidence(f"update / weights of the {tower} tower, median over the run", window.median(), "ratio")
