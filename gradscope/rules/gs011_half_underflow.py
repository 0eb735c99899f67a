"""GS011: half precision rounds gradients to 0.

Evidence   the towers run in fp16 or bf16, and at least a quarter of the gradient entries that the batches can reach are exactly 0.
Cause      activation gradients below the smallest number of the dtype (fp16: 6e-8) become 0 on their way through the towers.
Silent     fp32 towers; precision not known; fewer than ``least`` measured batches.
Mislead    dead units (ReLU) are exact zeros as well: gradscope zeros tells the causes apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, View

HALF = ("fp16", "bf16")


@rules.register("GS011")
@dataclass(frozen=True, kw_only=True)
class HalfUnderflow:
    id: ClassVar[str] = "GS011"
    title: ClassVar[str] = "Half precision rounds gradients to 0"
    severity: ClassVar[str] = "warning"
    elsewhere: ClassVar[str] = (
        "torch.autocast in bf16 (the exponent range of fp32), or fp32; in fp16 a larger init_scale of the GradScaler."
    )
    share: float = 0.25
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        precision = view.precision
        if precision not in HALF:
            return None
        window = view.reading("zeros", "entries_reached.parameters", view.term).recent(self.least)
        if window.mean() < self.share:
            return None
        return found(
            self,
            window.evidence("share of exactly zero gradient entries among those the batch reaches", window.mean()),
            *where_measured(lambda: self._loss_scale(view)),
            cause=f"In {precision} an activation gradient below the dtype's smallest number is 0, and the fp32 weight gradient with "
            "it.",
            action="--precision bf16 (the exponent range of fp32) or --precision fp32; in fp16 a larger loss scale.",
            effect="The zero share falls to that of an fp32 run (a few in a million); the norm may hardly change.",
            verify="reading zeros/entries_reached.parameters; gradscope audit shows it by precision on one batch.",
        )

    def _loss_scale(self, view: View) -> Evidence:
        window = view.column("loss_scale").recent()
        return window.evidence("loss scale, median", window.median(), "factor")
