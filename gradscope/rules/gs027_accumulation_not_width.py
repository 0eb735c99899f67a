"""GS027: accumulated batches are not one wide softmax.

Evidence   narrow accumulation whose step holds at least four times the softmax width, with a residual under 1e-2: the negatives of the
           other micro-batches would have mattered.
Cause      each micro-batch contrasts with its own members only; k of them are k easy problems, not one of k times the size.
Silent     cached or no accumulation; a residual that is still large; fewer than ``least`` measured batches.
Mislead    the method's own code accumulates narrowly: then this is what was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.rules.saturated import residual_evidence
from gradscope.run_view import Evidence, View


@rules.register("GS027")
@dataclass(frozen=True, kw_only=True)
class AccumulationNotWidth:
    id: ClassVar[str] = "GS027"
    title: ClassVar[str] = "Accumulation does not widen the softmax"
    severity: ClassVar[str] = "note"
    elsewhere: ClassVar[str] = (
        "Cached gradients: embed all micro-batches without a graph, one loss over all of them, then each micro-batch's backward"
        " from the gradient at its embeddings. Or a larger batch."
    )
    factor: int = 4
    residual: float = 1e-2
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        accumulate = self._accumulated(view)
        if accumulate < self.factor:
            return None
        residual = residual_evidence(view, self.least)
        if residual.value >= self.residual:
            return None
        width = view.known_width
        return found(
            self,
            Evidence(what="records per optimizer step", value=width * accumulate, unit="records", where="the run's settings"),
            Evidence(what="softmax width", value=width, unit="candidates", where="the run's provenance"),
            residual,
            cause=f"{accumulate} micro-batches of {width} are {accumulate} softmaxes with {width - 1} negatives per anchor.",
            action=f"--accumulate {accumulate} --accumulate-mode cached: one softmax of {width * accumulate}, at the memory of "
            f"{width}.",
            effect="The residual rises to that of the wide softmax; a step costs one more forward pass.",
            verify="reading residual/log10_mean of the new run.",
        )

    def _accumulated(self, view: View) -> int:
        """Softmaxes per optimizer step. A loop that is not ours logs the forward passes that the probe saw in one."""
        if "loop" in view.facts:
            return int(view.column("micro_batches").recent(self.least).median())
        return int(view.setting("train.accumulate")) if view.setting("train.accumulate_mode") == "narrow" else 1
