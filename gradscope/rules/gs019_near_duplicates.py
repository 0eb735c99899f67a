"""GS019: most captions of a batch have a near-duplicate in it.

Evidence   at least half of the captions have another at cosine 0.95 or above in their batch, and the nearest other caption stands out
           from the mean of all by 0.1 or more; means over the last epoch.
Cause      captions of a few classes, or of one template.
Silent     an InfoNCE loss above 90 % of chance, where the tower has not learned to tell captions apart; a tower that maps all of them
           to one place (nothing stands out); fewer than ``least`` measured batches; the set "loss" (captions are not read).
Mislead    the cosine is the live text tower's, which may be blind to what tells two captions apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.run_view import View


@rules.register("GS019")
@dataclass(frozen=True, kw_only=True)
class NearDuplicates:
    id: ClassVar[str] = "GS019"
    title: ClassVar[str] = "Most captions have a near-duplicate in their batch"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Batch captions that differ, use longer captions, keep a margin small (it is largest on such pairs), and mask those "
        "that are identical."
    )
    share: float = 0.5
    apart: float = 0.1
    guessing: float = 0.9
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        window = view.reading("captions", "near_duplicates").recent(self.least)
        nearest = view.reading("captions", "hardest_mean").recent(self.least)
        mean = view.reading("captions", "mean").recent(self.least)
        loss = view.reading("loss", "true", "infonce").recent(self.least)
        if window.mean() < self.share or nearest.mean() - mean.mean() < self.apart or loss.median() > self.guessing * view.chance:
            return None
        return found(
            self,
            window.evidence("share of captions with another at cosine 0.95 or above", window.mean()),
            nearest.evidence("cosine of the nearest other caption, mean", nearest.mean(), "cosine"),
            mean.evidence("cosine over all pairs, mean", mean.mean(), "cosine"),
            cause="To the text tower these captions are one: their pictures are pushed apart for what the captions do not state.",
            action="Batch captions that differ, use longer captions, keep --gamma low (the margin is largest on such pairs), and "
            "--duplicates exclude where they are identical.",
            effect="With distinct captions the residual lies on true negatives.",
            verify="reading captions/near_duplicates; gradscope caption-geometry on the data set, by width.",
        )
