"""GS016: the model is guessing.

Evidence   the InfoNCE loss of the last epoch is at least 95 % of ln(width), and has not fallen by 2 % since the start; or it came down
           to within 1 % of ln(width) and the medians of the last two quarters of the run both sit there.
Cause      images and captions that do not belong together, captions that are all alike, a rate of 0 or far too large.
Silent     fewer than 30 steps into the run, fewer than ``least`` values, width not known, HN's loss in a log without readings; a loss
           that is still coming down.
Mislead    training from random weights on much data may sit at chance for thousands of steps before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import LOGGED, MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Series, Unmeasured, View
from gradscope.verdict import CHANCE


@rules.register("GS016")
@dataclass(frozen=True, kw_only=True)
class AtChance:
    id: ClassVar[str] = "GS016"
    title: ClassVar[str] = "The loss is that of guessing"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = (
        "Over-fit 100 pairs first: a sound set-up does it within some hundred steps. Then check the pairing, repeated captions,"
        " and the learning rate."
    )
    share: float = CHANCE
    progress: float = 0.98
    at: float = 0.01
    steps: int = LOGGED
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        series = self._infonce(view)
        whole, recent = series.whole(self.least), series.recent(self.least)
        if not series.steps.size or series.steps.max() - series.steps.min() + 1 < self.steps:
            raise Unmeasured(f"{series.name} covers fewer than {self.steps} steps")
        start = float(np.median(whole.values[: max(self.least, len(whole.values) // 4)]))
        fallen = recent.median() < self.progress * start
        if recent.median() < self.share * view.chance or (fallen and not self._sits(whole.values, view.chance)):
            return None
        return found(
            self,
            recent.evidence("InfoNCE loss, median", recent.median(), "nat"),
            Evidence(what=f"chance, ln {view.known_width}", value=view.chance, unit="nat", where="the softmax width"),
            *where_measured(lambda: self._rate(view)),
            *where_measured(lambda: self._repeated(view)),
            cause=self._cause(view),
            action="Over-fit 100 records first (--max-steps 200 --lr 1e-4): a sound set-up does it. Then check the pairing "
            "(gradscope data check), repeated captions, and the rate.",
            effect="Away from chance the loss falls below ln(width) within some tens of steps.",
            verify="loss against ln(width) in the first 100 steps of the new run.",
        )

    def _sits(self, losses: np.ndarray, chance: float) -> bool:
        """Whether both of the last two quarters have their median at chance."""
        size = len(losses) // 4
        quarters = (losses[-2 * size : -size], losses[-size:])
        return size >= self.least and all(abs(float(np.median(quarter)) / chance - 1) < self.at for quarter in quarters)

    def _infonce(self, view: View) -> Series:
        probed = view.reading("loss", "true", "infonce")
        if len(probed.values) or view.trained == "hn":
            return probed
        return view.column("loss")

    def _cause(self, view: View) -> str:
        rate, repeated = where_measured(lambda: self._rate(view)), where_measured(lambda: self._repeated(view))
        if rate and rate[0].value == 0:
            return "The learning rate is 0: nothing moves."
        if self._still(view):
            return "The gradient of every step is 0: nothing moves, whatever the pairs are."
        if repeated and repeated[0].value >= (view.width or 2) / 2:
            return "At least half of the captions repeat another of their batch: no model can tell them apart."
        return "Nothing of the pairing has been learned: wrong pairs, captions too much alike, or a rate that destroys the weights."

    def _still(self, view: View) -> bool:
        norms = view.column("grad_norm").values
        return len(norms) >= self.least and bool((norms == 0).all())

    def _rate(self, view: View) -> Evidence:
        window = view.column("lr").whole()
        return window.evidence("largest learning rate", float(window.values.max()), "1")

    def _repeated(self, view: View) -> Evidence:
        window = view.reading("captions", "exact_duplicates").recent(self.least)
        return window.evidence("captions that repeat another of their batch, mean", window.mean(), "captions")
