"""GS032: the loss that the loop backpropagates sends no gradient to the embeddings.

Evidence   measured batches whose objective has a gradient, while the one that passed by at the embeddings is exactly 0 (its cosine with
           the objective's own is not defined) and so is the whole step's; or steps at which no gradient passed by at a tower at all.
Cause      a loss multiplied by 0, embeddings that are detached or computed again, another loss than the one that is seen.
Silent     the probe was off; fewer than ``least`` such batches; an objective that has no gradient itself (residual under 1e-6).
Mislead    the words on towers without a gradient are those that the probe wrote to console.log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.rules.saturated import residual_evidence
from gradscope.run_view import Evidence, Unmeasured, View

#: How the probe says it.
LOST = ("no gradient passed by", "no backward passed")
RESIDUAL = 1e-6


@rules.register("GS032")
@dataclass(frozen=True, kw_only=True)
class NoGradient:
    id: ClassVar[str] = "GS032"
    title: ClassVar[str] = "The loss sends no gradient to the embeddings"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = (
        "Look between the towers and backward() for detach(), torch.no_grad(), .data, .item() or a weight of 0. If the loss compares "
        "other embeddings than those the towers return, pass them: probe.watch(image, text, scale)."
    )
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        if not view.setting("probe.log_grads"):
            raise Unmeasured("the probe was off; --log-grads turns it on")
        evidence = [*lost(view, self.least), *self._zero(view)]
        if not evidence:
            return None
        return found(
            self,
            *evidence,
            cause="What backward() starts from does not depend on these embeddings, or is multiplied by 0: the towers, or one of "
            "them, learn nothing from it.",
            action="Please report it: this loop sends its own loss through both towers.",
            effect="Cosine 1 with the objective's own gradient, at both towers.",
            verify="reading hooks/agreement of the next run is 1.",
        )

    def _zero(self, view: View) -> list[Evidence]:
        agreement = view.reading("hooks", "agreement", view.term)
        last = agreement.values[-max(self.least, len(agreement.values) // 4) :]
        norm = view.column("grad_norm")
        moved = norm.values[np.isin(norm.steps, agreement.steps[-len(last) :])]
        unknown = len(norm.values) > 0 and len(moved) < len(last)  # a skipped step has no norm
        if len(last) < self.least or np.isfinite(last).any() or unknown or (moved != 0).any():
            return []
        residual = residual_evidence(view, self.least)
        if residual.value < RESIDUAL:
            return []
        what = "last measured batches whose gradient at the embeddings is exactly 0"
        return [Evidence(what=what, value=float(len(last)), unit="batches", where=agreement.name), residual]


def lost(view: View, least: int) -> list[Evidence]:
    """Steps at which a tower saw no gradient, where there are ``least`` of them and as many as were read."""
    if not len(view.readings):
        return []
    rows = view.readings[view.readings["key"] == "failed"]
    read = view.readings.loc[view.readings["quantity"] == "loss", "step"].nunique()
    found_ = []
    for name, failed in rows.groupby("quantity"):
        words = view.failure(str(name))
        if len(failed) >= max(least, read) and words.startswith(LOST):
            what = f"steps of which the probe said: {words}"
            found_.append(Evidence(what=what, value=float(len(failed)), unit="steps", where=f"first at step {failed['step'].min()}"))
    return found_
