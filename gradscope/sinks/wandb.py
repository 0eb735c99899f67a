"""Weights & Biases. Project, entity and mode are W&B's own settings (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE); the project is called
"gradscope" unless they say otherwise, and the run is called after its directory.

WANDB_MODE=offline needs no account: the run is kept in ``wandb/`` of the run directory, to be sent with ``wandb sync`` (a resumed one
in several parts of one id, which it puts together). All curves are over the metric "step", not over W&B's count of calls.
How it can mislead: a killed process loses what W&B had not written yet, a second's worth, or more with an older W&B. W&B shows a
non-finite value as a word and leaves it out of the line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, cast
from uuid import uuid4

from gradscope.sinks import Destination, sinks
from gradscope.sinks.points import Histogram, Point


@sinks.register("wandb")
@dataclass(frozen=True, kw_only=True)
class Wandb:
    module: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def __call__(self, run: Destination) -> WandbRun:
        import wandb

        opened = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gradscope"),
            name=run.path.resolve().name,
            id=run.id or uuid4().hex[:12],
            resume="allow",
            mode=cast(Any, os.environ.get("WANDB_MODE") or None),  # W&B itself reads it once a process, at its first run
            dir=str(run.path),
            config=dict(run.recipe),
            settings=wandb.Settings(console="off", silent=True, **_write_often(wandb.Settings)),
        )
        opened.define_metric("*", step_metric="step")
        return WandbRun(opened)


def _write_often(settings: Any) -> dict[str, Any]:
    """W&B holds rows back for 15 seconds, which a killed run would lose; not every version can be told."""
    name = "x_transaction_log_flush_interval"
    return {name: 1.0} if name in settings.model_fields else {}


class WandbRun:
    def __init__(self, run: Any) -> None:
        self.id = str(run.id)
        self.where = run.url or f"offline; wandb sync {Path(run.dir).parents[1]}/offline-run-*"
        self._run = run

    def write(self, points: Sequence[Point]) -> None:
        for step, group in groupby(points, key=lambda point: point.step):
            self._run.log({"step": step, **{point.name: _value(point.value) for point in group}})

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


def _value(value: float | Histogram) -> Any:
    if not isinstance(value, Histogram):
        return value
    import wandb

    kept = value.trimmed()
    return wandb.Histogram(np_histogram=(kept.counts.tolist(), kept.edges.tolist()))
