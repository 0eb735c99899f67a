"""GS030: the softmax has one candidate.

Evidence   the width is 1: each anchor is compared with its own caption and nothing else.
Cause      a batch of one pair, and no embeddings of other ranks or micro-batches in the softmax.
Silent     width not known, or 2 and more. All rules on saturation, chance, pull and norm are silent then: p is 1 by definition.
Mislead    the width is that of the first measured batch: a short last batch of one pair is not told by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import Finding, found, rules
from gradscope.rules.saturated import width_evidence
from gradscope.run_view import View


@rules.register("GS030")
@dataclass(frozen=True, kw_only=True)
class OneCandidate:
    id: ClassVar[str] = "GS030"
    title: ClassVar[str] = "The softmax has one candidate: the loss is 0 by definition"
    severity: ClassVar[str] = "error"
    any_width: ClassVar[bool] = True
    elsewhere: ClassVar[str] = (
        "Give each anchor negatives: a larger batch; embeddings gathered over ranks with their gradient "
        "(torch.distributed.nn.functional.all_gather); or cached gradients (GradCache, CachedMultipleNegativesRankingLoss, open_clip's "
        "--accum-freq)."
    )

    def __call__(self, view: View) -> Finding | None:
        if view.known_width > 1:
            return None
        return found(
            self,
            width_evidence(view),
            cause="The softmax of one number is 1, whatever the number: the loss and its gradient are 0, and nothing is learned.",
            action="A larger --batch-size, or --accumulate 64 --accumulate-mode cached (one softmax over 64 micro-batches).",
            effect="The loss starts near ln(width) and falls.",
            verify="width of the next run, which the first line of gradscope diagnose says.",
        )
