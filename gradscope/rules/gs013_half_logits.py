"""GS013: the loop's loss is formed from rounded logits.

Evidence   the gradient that passes by at the embeddings differs from the fp32 one by more than fp32 rounds (1 - cosine between 1e-6
           and 1e-2), and its length scatters from batch to batch by half a per cent or more (interquartile range / median).
Cause      logits in bf16 or fp16: at 64 to 128 bf16 has steps of 0.5, which fake saturation and noise.
Silent     loops whose gradient is the fp32 one (``gradscope train`` always forms fp32 logits); fewer than ``least`` measured batches.
Mislead    a further small loss term that varies from batch to batch looks the same: see what the loop adds to its loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, View


@rules.register("GS013")
@dataclass(frozen=True, kw_only=True)
class HalfLogits:
    id: ClassVar[str] = "GS013"
    title: ClassVar[str] = "Logits are rounded to half precision"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "Form logits and loss in fp32: image.float(), text.float() and the scale in fp32, inside torch.autocast(device, "
        "enabled=False); keep half precision for the towers."
    )
    above: float = 1e-6
    below: float = 1e-2
    scatter: float = 5e-3
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        agreement = view.reading("hooks", "agreement", view.term).recent(self.least)
        factor = view.reading("hooks", "factor", view.term).recent(self.least)
        off = 1 - agreement.median()
        quarter, three = np.quantile(factor.values, [0.25, 0.75])
        scatter = float(three - quarter) / abs(factor.median()) if factor.median() else 0.0
        if not self.above <= off <= self.below or scatter < self.scatter:
            return None
        return found(
            self,
            agreement.evidence("1 - cosine with the gradient of fp32 logits, median", off, "1"),
            factor.evidence("scatter of its length over batches", scatter, "ratio"),
            *where_measured(lambda: self._moved(view)),
            cause="The product of the embeddings, or the cross-entropy, runs in bf16 or fp16: logits move by up to a quarter.",
            action=self.elsewhere,
            effect="Agreement 1 to 1e-6 and a constant factor.",
            verify="readings hooks/agreement and hooks/factor; gradscope audit shows loss and gradient by precision on one batch.",
        )

    def _moved(self, view: View) -> Evidence:
        window = view.reading("precision", "moved_bf16", view.term).recent(self.least)
        return window.evidence("share of logits that bf16 would move by more than 0.1", window.mean())
