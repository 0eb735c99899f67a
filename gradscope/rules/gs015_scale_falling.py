"""GS015: the learned scale keeps falling.

Evidence   the scale at the end is at most ``kept`` of that at the start, and it ended within 10 % of its lowest value.
Cause      the model flattens its softmax because the pairs contradict each other (wrong or repeated captions, false negatives), or
           because the rate is too large for a single number.
Silent     fewer than ``least`` logged values; a dip that has come back.
Mislead    a scale that starts at the limit has only one way to go: small falls are normal, so the line is drawn at a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import LOGGED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, View

ENDS = 5


@rules.register("GS015")
@dataclass(frozen=True, kw_only=True)
class ScaleFalling:
    id: ClassVar[str] = "GS015"
    title: ClassVar[str] = "The scale keeps falling"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Check that captions and pictures belong together and do not repeat; lower the learning rate; or hold the scale fixed "
        "(requires_grad_(False))."
    )
    kept: float = 0.8
    lowest: float = 1.1
    least: int = LOGGED

    def __call__(self, view: View) -> Finding | None:
        window = view.column("scale").whole(self.least)
        first, last = float(np.median(window.values[:ENDS])), float(np.median(window.values[-ENDS:]))
        if last > self.kept * first or last > self.lowest * window.values.min():
            return None
        return found(
            self,
            window.evidence("scale at the start", first, "1"),
            window.evidence("scale at the end", last, "1"),
            *where_measured(lambda: self._repeated(view)),
            cause="A falling scale flattens every softmax: the cheapest answer to pairs that contradict each other, or a rate that "
            "is too large for this one parameter.",
            action="Check that captions and pictures belong together and do not repeat (gradscope data check); lower --lr; or hold "
            "it with --scale fixed.",
            effect="With consistent pairs the scale stays or recovers; held fixed, the loss shows what the scale was hiding.",
            verify="column scale: it levels off.",
        )

    def _repeated(self, view: View) -> Evidence:
        window = view.reading("captions", "exact_duplicates").whole(ENDS)
        return window.evidence("captions that repeat another of their batch, mean", window.mean(), "captions")
