"""GS002: saturated although the softmax is wide.

Evidence   at least half of the batches of the last epoch have a loss under 1e-3, at 128 candidates or more.
Cause      the data hold few negatives this model confuses, or it has memorised them; more width alone will not help much.
Silent     fewer than ``least`` measured batches (or 30 logged steps of a log without readings); width not known, or narrow.
Mislead    done may simply be done: look at the validation before changing anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.judgement import SATURATED
from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.rules.gs001_narrow_softmax import WIDE
from gradscope.rules.saturated import residual_evidence, scale_words, share_evidence, under_1e3, width_evidence
from gradscope.run_view import View


@rules.register("GS002")
@dataclass(frozen=True, kw_only=True)
class SaturatedThoughWide:
    id: ClassVar[str] = "GS002"
    title: ClassVar[str] = "Saturated although the softmax is wide"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Look at the validation first. To go on: a margin where captions are alike, batches of similar captions, harder data, "
        "or stop earlier."
    )
    share: float = SATURATED
    wide: int = WIDE
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        width, window = view.known_width, under_1e3(view, self.least)
        if width < self.wide or window.mean() < self.share:
            return None
        margin = "a larger --gamma" if view.trained == "hn" else "--objective hn --gamma 0.25 (a margin where captions are alike)"
        return found(
            self,
            share_evidence(view, window),
            width_evidence(view),
            *where_measured(lambda: residual_evidence(view, self.least)),
            cause="Random negatives of this data no longer confuse the model: it has learned them, or memorised the training set."
            + scale_words(view),
            action=f"Look at the validation first. To go on: {margin}, batches of similar captions, harder data, or stop earlier.",
            effect="The margin keeps a residual on look-alike captions; stopping costs nothing if the validation has levelled off.",
            verify="The validation R@1 by epoch; gradscope what-if with --objective hn: from which gamma on the residual is above "
            "1e-3.",
        )
