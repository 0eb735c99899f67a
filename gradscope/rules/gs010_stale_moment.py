"""GS010: the optimizer remembers larger gradients than it gets.

Evidence   at least a fifth of the entries, median over the last epoch, have a gradient under a hundredth of sqrt(v_hat)
           (of normally distributed gradients 0.8 % do).
Cause      the loss fell by decades and the second moment has not: its half-life is ln 2 / (1 - beta2) steps, 693 at .999.
Silent     fewer than ``least`` measured batches; an optimizer without second moments.
Mislead    heavy-tailed gradients (one hard batch in many) look the same from one batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.run_view import View


@rules.register("GS010")
@dataclass(frozen=True, kw_only=True)
class StaleMoment:
    id: ClassVar[str] = "GS010"
    title: ClassVar[str] = "A stale second moment mutes the gradient"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "A smaller second beta (0.98: half-life 34 steps), or start the optimizer anew from the checkpoint once the loss has fallen."
    )
    share: float = 0.2
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        window = view.reading("optimizer", "stale", "total").recent(self.least)
        if window.median() < self.share:
            return None
        return found(
            self,
            window.evidence("share of entries with a gradient under sqrt(v_hat) / 100, median over batches", window.median()),
            cause=f"Adam divides by a memory of larger gradients ({_half_life(view)}): small ones hardly move.",
            action="--set train.beta2=0.98 (half-life 34 steps), or start the optimizer anew from the checkpoint once the loss has "
            "fallen.",
            effect="The normalised step recovers within a few half-lives.",
            verify="readings optimizer/stale and optimizer/step_q50.",
        )


def _half_life(view: View) -> str:
    beta2 = view.setting_or("train.beta2", None)
    if beta2 is None:
        return "half-life ln 2 / (1 - beta2) steps, 693 at beta2 0.999"
    return f"half-life {math.log(2) / (1 - beta2) if beta2 < 1 else math.inf:.0f} steps at beta2 {beta2:g}"
