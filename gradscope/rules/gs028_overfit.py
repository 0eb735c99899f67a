"""GS028: the training loss is near 0 and the validation is not what it was, or poor.

Evidence   the median training loss of the last epoch is at most a tenth of ln(width), and validation R@1 (mean of both directions) is
           below the lower end of the 95 % interval of its best, earlier value; or the loss is under a hundredth and R@1 under 10 %.
Cause      memorised training pairs; updates that only move batches that were solved already; or batches far easier than the gallery.
Silent     fewer than ``least`` logged losses; fewer than two validations; a fall within the interval, or where there is none.
Mislead    two validations of one run use the same queries: the interval is wider than that of their difference, so this is cautious.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradscope.rules import MEASURED, Finding, found, rules
from gradscope.run_view import Evidence, Unmeasured, View

if TYPE_CHECKING:
    import pandas as pd


@rules.register("GS028")
@dataclass(frozen=True, kw_only=True)
class Overfit:
    id: ClassVar[str] = "GS028"
    title: ClassVar[str] = "The loss is near 0 and the validation has fallen, or is poor"
    severity: ClassVar[str] = "error"
    elsewhere: ClassVar[str] = (
        "Evaluate the checkpoint with the best recall. Then a lower learning rate, fewer epochs, a wider softmax or harder batches, or "
        "one tower frozen."
    )
    loss: float = 0.1
    solved: float = 0.01
    poor: float = 0.1
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        series = view.column("loss") if view.trained != "hn" else view.reading("loss", "true", "infonce")
        loss, recall = series.recent(self.least), _recall(view)
        values, lows = recall["value"].tolist(), recall["low"].tolist()
        at = max(range(len(values) - 1), key=values.__getitem__)
        best, last = int(recall["step"].iloc[at]), int(recall["step"].iloc[-1])
        level = loss.median() / view.chance
        fallen = level <= self.loss and values[-1] < lows[at]
        poor = level <= self.solved and values[-1] < self.poor
        if not fallen and not poor:
            return None
        where = f"evals.jsonl, step {best}"
        return found(
            self,
            loss.evidence("training loss, median", loss.median(), "nat"),
            Evidence(what="validation R@1 at its best", value=values[at], unit="share", where=f"evals.jsonl, step {best}"),
            *[Evidence(what="lower end of its interval", value=lows[at], unit="share", where=where)] * math.isfinite(lows[at]),
            Evidence(what="validation R@1 now", value=values[-1], unit="share", where=f"evals.jsonl, step {last}"),
            cause="The batches are solved and the gallery is not: what is still updated does not carry over, or undoes what was "
            "pretrained.",
            action=self._action(best, fallen),
            effect="Validation R@1 stays at or above its start.",
            verify="gradscope compare of the two checkpoints on the test split, with intervals.",
        )

    def _action(self, best: int, fallen: bool) -> str:
        if not fallen:
            return "A wider softmax (--accumulate-mode cached) or harder batches: these are solved, the gallery is not."
        start = " (the start: do not fine-tune like this)" if best == 0 else ""
        retry = "a lower --lr, fewer --epochs, a wider softmax (--accumulate-mode cached), or --freeze for one tower"
        return f"Use the checkpoint of step {best}{start}; then {retry}."


def _recall(view: View) -> pd.DataFrame:
    """The mean of both directions by rising step: ``step``, ``value``, ``low``."""
    if view.evals.empty:
        raise Unmeasured("no evaluation was logged" + _recorded(view))
    rows = view.evals[(view.evals["metric"] == "R@1") & (view.evals["split"] == "val")]
    numbers = rows.assign(value=rows["value"].astype(float), low=rows["low"].astype(float))
    by_step = numbers.groupby("step")[["value", "low"]].mean().dropna(subset=["value"]).reset_index()
    if len(by_step) < 2:
        count = f"{len(by_step)} time{'s' * (len(by_step) != 1)}"
        raise Unmeasured(f"validation R@1 was logged {count}, at least 2 are needed{_recorded(view)}")
    return by_step


def _recorded(view: View) -> str:
    """A loop that is not ours tells the probe what it measured."""
    return "" if view.kind != "run" else "; probe.log_recall(...) records it" if not view.own else "; a validation split records it"
