"""GS008: every entry of the gradient is exactly 0.

Evidence   in at least a tenth of the measured batches of the last epoch the whole gradient (over all parameters, or where those were
           not measured of the logits) is 0.0.
Cause      underflow in half precision; a logit gap beyond about 100 in fp32; or a loss that does not depend on the parameters.
Silent     fewer than ``least`` measured batches; no readings of the set "full".
Mislead    nothing: exact zeros are counted, not inferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.rules.saturated import residual_evidence
from gradscope.run_view import View


@rules.register("GS008")
@dataclass(frozen=True, kw_only=True)
class GradientZero:
    id: ClassVar[str] = "GS008"
    title: ClassVar[str] = "The whole gradient is exactly 0"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = (
        "Run loss and logits in fp32, the towers in fp32 or bf16; a scale below 50; a wider softmax. gradscope audit on stored "
        "embeddings shows what precision takes away."
    )
    share: float = 0.1
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        parameters = view.reading("zeros", "all_zero.parameters", view.term)
        series = parameters if len(parameters.values) else view.reading("zeros", "all_zero.logits", view.term)
        window = series.recent(self.least)
        if window.mean() < self.share:
            return None
        return found(
            self,
            window.evidence("share of measured batches whose gradient is 0.0 throughout", window.mean()),
            *where_measured(lambda: residual_evidence(view, self.least)),
            cause="Nothing is left to learn from at this precision: either half precision rounds the gradient to 0, or the logit gap "
            "is beyond what fp32 can express (about 100), or the loss does not reach the parameters.",
            action="--precision fp32 (or bf16 with fp32 logits); a smaller multiplier (--scale fixed on weights with a scale below "
            "50); a wider softmax. gradscope zeros tells the causes apart on one batch.",
            effect="Gradients become non-zero again; whether they are large enough to teach is another question (see saturation).",
            verify="reading zeros/all_zero.parameters is 0 in every batch.",
        )
