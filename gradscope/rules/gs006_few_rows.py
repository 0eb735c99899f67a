"""GS006: a few rows carry the whole gradient.

Evidence   nine tenths of the anchors have a residual under 1e-3, and the gradient is carried by a twentieth of the batch or less
           ((sum r)^2 / sum r^2), while the mean loss does not look saturated.
Cause      most pairs are done; a handful of hard, wrong or duplicated ones decide every update.
Silent     saturated batches (GS001, GS002 speak then); fewer than ``least`` measured batches; width not known.
Mislead    at a small width a twentieth of the batch is one row (1.5 are allowed), and any batch has a hardest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.judgement import SATURATED
from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.rules.saturated import under_1e3
from gradscope.run_view import View


@rules.register("GS006")
@dataclass(frozen=True, kw_only=True)
class FewRows:
    id: ClassVar[str] = "GS006"
    title: ClassVar[str] = "A few rows carry everything"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Look at those pairs (captions repeated, pictures wrong?); widen the softmax, or lower the learning rate so that single"
        " rows do not steer the model."
    )
    done: float = 0.9
    carried: float = 0.05
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        done = view.both("saturation", "rows_below_1e-3", view.term).recent(self.least)
        rows = view.both("saturation", "effective_rows", view.term).recent(self.least)
        if under_1e3(view, self.least).mean() >= SATURATED or done.mean() < self.done:
            return None
        width = view.known_width
        if rows.median() > max(1.5, self.carried * width):
            return None
        return found(
            self,
            done.evidence("share of anchors with a residual under 1e-3", done.mean()),
            rows.evidence(f"anchors that carry the gradient, of {width}, median over batches", rows.median(), "rows"),
            cause="The mean loss hides that most pairs are done: the update is made by the hardest few, often wrong or duplicated "
            "pairs.",
            action="Look at those pairs (captions repeated, pictures wrong?); widen the softmax with --accumulate-mode cached, or "
            "lower the rate with --lr so that single rows do not steer the model.",
            effect="A wider softmax gives more anchors a hard negative, and the carried rows rise.",
            verify="reading saturation/effective_rows of the new run.",
        )
