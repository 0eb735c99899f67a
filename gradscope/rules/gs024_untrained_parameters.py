"""GS024: parameters that should train get no gradient.

Evidence   trainable tensors without a gradient in at least half of the measured batches of the last epoch; or a whole tower whose
           gradient is 0 while the other's is not.
Cause      the loss does not reach them: a module outside the graph, reentrant checkpointing of a frozen tower, a detached branch.
Silent     fewer than ``least`` measured batches; no readings of the set "full"; parameters frozen by the settings.
Mislead    a tower frozen in a loop of your own is not in the list of trainable parameters, and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.rules.gs021_no_update import TOWERS
from gradscope.run_view import Evidence, Unmeasured, View


@rules.register("GS024")
@dataclass(frozen=True, kw_only=True)
class UntrainedParameters:
    id: ClassVar[str] = "GS024"
    title: ClassVar[str] = "Parameters that should train get no gradient"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = (
        "Name them (p.grad is None after backward), then connect or freeze them: look for a detach() or no_grad() on the way, "
        "and use use_reentrant=False where activations are checkpointed."
    )
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        unused = view.reading("zeros", "unused.parameters", view.term).recent(self.least)
        evidence = [unused.evidence("trainable tensors without a gradient, median", unused.median(), "tensors")]
        dead = self._dead_towers(view)
        if unused.median() < 1 and not dead:
            return None
        return found(
            self,
            *(evidence if unused.median() >= 1 else ()),
            *dead,
            cause="The loss does not depend on them in this graph: they stay where they started, and nothing says so.",
            action="Name them (the first lines of console.log), then connect or freeze them (--freeze): with --grad-checkpointing "
            "use the non-reentrant form, and look for a detach() or no_grad() on the way.",
            effect="Every trainable tensor has a gradient, so updates are spread over the model that was meant to train.",
            verify="reading zeros/unused.parameters is 0, and gradient/norm of both towers is not.",
        )

    def _dead_towers(self, view: View) -> list[Evidence]:
        windows = {}
        for tower in TOWERS:
            try:
                windows[tower] = view.reading("gradient", f"norm.{tower}", view.term).recent(self.least)
            except Unmeasured:
                continue
        dead = {tower for tower, window in windows.items() if not window.values.any()}
        if not dead or dead == set(windows):
            return []
        return [windows[tower].evidence(f"largest gradient norm of the {tower} tower", 0.0, "nat / weight") for tower in sorted(dead)]
