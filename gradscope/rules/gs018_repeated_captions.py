"""GS018: captions of one batch repeat each other.

Evidence   at least 5 % of the captions of a measured batch repeat an earlier one of it, mean over the last epoch.
Cause      the same caption under several pictures: each is a false negative of the other, and HN gives it the largest margin.
Silent     --duplicates exclude or positives; captions not known to the probe; fewer than ``least`` measured batches; width not known.
Mislead    exact strings only: near-duplicates are GS019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View


@rules.register("GS018")
@dataclass(frozen=True, kw_only=True)
class RepeatedCaptions:
    id: ClassVar[str] = "GS018"
    title: ClassVar[str] = "Captions repeat within the batch"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Mask identical captions out of each other's negatives (and of the margin), keep them out of one batch, or give the "
        "pictures captions of their own."
    )
    share: float = 0.05
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        if view.setting_or("objective.duplicates", "keep") != "keep":
            return None
        window = view.reading("captions", "exact_duplicates").recent(self.least)
        share = window.mean() / view.known_width
        if share < self.share:
            return None
        margin = " and the margin is largest exactly there" if view.trained == "hn" else ""
        return found(
            self,
            window.evidence("share of captions that repeat an earlier one of their batch", share),
            *where_measured(lambda: self._pushed(view)),
            *where_measured(lambda: self._in_data(view)),
            cause=f"A repeated caption is a false negative: its picture is pushed away from words that describe it{margin}.",
            action="--duplicates exclude leaves identical captions out of the negatives and of the margin; or give the pictures "
            "captions of their own.",
            effect="The push between equals disappears; the loss falls by what they held.",
            verify="reading captions/exact_duplicates (where they are excluded, column duplicates_excluded); validation R@1 against a "
            "run that keeps them.",
        )

    def _pushed(self, view: View) -> Evidence:
        window = view.reading("false_negatives", "push_identical", view.term).recent(self.least)
        return window.evidence("share of the remaining push between identical captions", window.mean())

    def _in_data(self, view: View) -> Evidence:
        repeated = view.facts.get("repeated_captions")
        if repeated is None:
            raise Unmeasured("repeated captions of the data set are not in the provenance")
        where = "provenance.json, repeated_captions"
        return Evidence(what="captions of the training split that repeat another", value=float(repeated), unit="captions", where=where)
