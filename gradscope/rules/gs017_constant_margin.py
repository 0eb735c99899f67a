"""GS017: the margin is one constant, and beats every anchor.

Evidence   HN is trained; the margin beats at least 95 % of the anchors though without it at most half are beaten; its mean over pairs
           is at least 10 logits; and the loss has not fallen below 70 % of where it started.
Cause      captions in a narrow cone: every pair has a similar cosine, so the margin is scale * gamma * that cosine for all of them.
Silent     infonce; a run under ``least`` measured batches; a loss that is coming down.
Mislead    a loss in the tens with residual near 1 is active, which is not yet learning; nor is it proof that nothing is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View


@rules.register("GS017")
@dataclass(frozen=True, kw_only=True)
class ConstantMargin:
    id: ClassVar[str] = "GS017"
    title: ClassVar[str] = "The margin is a constant"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Take the constant off the margin (the mean cosine between captions), or a smaller gamma; a fixed margin of that size "
        "is the control that shows what the constant alone does."
    )
    beaten: float = 0.95
    beaten_without: float = 0.5
    logits: float = 10.0
    kept: float = 0.7
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        if not view.trained:
            raise Unmeasured("no objective is known to be trained")
        if view.trained != "hn":
            return None
        beaten = view.both("gap", "violated_with_margin", "hn").recent(self.least)
        without = view.both("gap", "violated").recent(self.least)
        constant = view.reading("captions", "margin_logits").recent(self.least)
        loss = view.reading("loss", "true", "hn")
        start = float(np.median(loss.whole(self.least).values[: self.least // 2]))
        if beaten.mean() < self.beaten or without.mean() > self.beaten_without or constant.median() < self.logits:
            return None
        if loss.recent(self.least).median() < self.kept * start:
            return None
        return found(
            self,
            beaten.evidence("share of anchors beaten once the margin is added", beaten.mean()),
            without.evidence("share beaten without it", without.mean()),
            constant.evidence("the margin's mean over pairs", constant.median(), "logits"),
            *where_measured(lambda: self._alike(view)),
            cause="Captions lie in a narrow cone, so nearly the same margin is added to every negative: the objective pushes all of "
            "them, not the hard ones.",
            action="--margin centred (the constant taken off), or a smaller --gamma; --margin fixed is the control that shows what "
            "the constant alone does.",
            effect="Centred, the margin separates hard from easy negatives and most anchors start unbeaten.",
            verify="readings captions/margin_logits (0 when centred) and gap/violated_with_margin; validation against an infonce run.",
        )

    def _alike(self, view: View) -> Evidence:
        window = view.reading("captions", "mean").recent(self.least)
        return window.evidence("mean cosine between captions", window.mean(), "cosine")
