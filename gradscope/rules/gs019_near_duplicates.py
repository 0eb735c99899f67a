"""GS019: most captions of a batch have a near-duplicate in it.

Evidence   at least half of the captions have another at cosine 0.95 or above in their batch, mean over the last epoch.
Cause      captions of a few classes or of one template; or a text tower that maps everything to one place.
Silent     fewer than ``least`` measured batches; the set "loss" (captions are not read).
Mislead    the cosine is the live text tower's: in a collapsed tower different captions count as duplicates (see mean cosine).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, View


@rules.register("GS019")
@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    id: ClassVar[str] = "GS019"
    title: ClassVar[str] = "Most captions have a near-duplicate in their batch"
    severity: ClassVar[str] = "warning"
    share: float = 0.5
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        window = view.reading("captions", "near_duplicates").recent(self.least)
        if window.mean() < self.share:
            return None
        return found(
            self,
            window.evidence("share of captions with another at cosine 0.95 or above", window.mean()),
            *where_measured(lambda: self._mean(view)),
            cause="To the text tower these captions are one: their pictures are pushed apart for differences the "
            "captions do not state, "
            "or the tower has collapsed.",
            action="Mean cosine near 1: the tower has collapsed, lower --lr and look at GS016. Else batch captions that "
            "differ, use longer "
            "captions, and keep --gamma low: the margin is largest on such pairs.",
            effect="With distinct captions the residual lies on true negatives.",
            verify="reading captions/near_duplicates; gradscope caption-geometry on the data set, by width.",
        )

    def _mean(self, view: View) -> Evidence:
        window = view.reading("captions", "mean").recent(self.least)
        return window.evidence("mean cosine between captions", window.mean(), "cosine")
