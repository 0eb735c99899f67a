"""GS001: saturated, and the softmax is narrow.

Evidence   at least half of the batches of the last epoch have a loss under 1e-3, at fewer than 128 candidates.
Cause      few candidates: the hardest of 15 random negatives is easy, whatever the model has still to learn.
Silent     fewer than ``least`` measured batches (or 30 logged steps of a log without readings); width not known.
Mislead    the share belongs to this width and to this run's trajectory: the same weights at width 128 may be far from saturated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.judgement import SATURATED
from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.rules.saturated import residual_evidence, scale_words, share_evidence, under_1e3, width_evidence
from gradscope.run_view import View

#: From this width on a saturated softmax is no longer put down to its width (2,000 scenes: 80 % saturated at 16, 0 % at 128).
WIDE = 128


@rules.register("GS001")
@dataclass(frozen=True, kw_only=True)
class NarrowSoftmax:
    id: ClassVar[str] = "GS001"
    title: ClassVar[str] = "Saturated in a narrow softmax"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "A wider softmax: a larger batch, embeddings gathered over ranks with their gradient, or cached gradients (GradCache, "
        "CachedMultipleNegativesRankingLoss, open_clip's --accum-freq: the memory of one micro-batch); or batches of captions that "
        "are alike, or a margin at this width."
    )
    share: float = SATURATED
    wide: int = WIDE
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        width, window = view.known_width, under_1e3(view, self.least)
        if width >= self.wide or window.mean() < self.share:
            return None
        accumulate = int(view.setting_or("train.accumulate", 1))
        narrow = view.setting_or("train.accumulate_mode", "none") == "narrow"
        kept = f"--accumulate {accumulate}" if narrow else f"--accumulate {-(-self.wide // width)}"
        margin = "a larger --gamma" if view.trained == "hn" else "--objective hn --gamma 0.25 --margin live"
        captions = f"{width - 1} random caption{'s' * (width > 2)}"
        return found(
            self,
            share_evidence(view, window),
            width_evidence(view),
            *where_measured(lambda: residual_evidence(view, self.least)),
            cause=f"Each anchor is compared with {captions}, and for most it is already right by a wide gap." + scale_words(view),
            action=f"{kept} --accumulate-mode cached (one softmax over the whole step, at the same memory), or {margin} at this width.",
            effect="A wide softmax brings harder negatives into each batch: loss and residual rise by decades at the same weights.",
            verify="gradscope what-if at several widths on the last checkpoint; then diagnose the new run: GS001 should be gone.",
        )
