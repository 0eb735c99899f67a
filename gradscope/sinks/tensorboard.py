"""TensorBoard: event files in ``tensorboard/`` of the run directory; show them with ``tensorboard --logdir runs``.

A resumed run writes a second file into the same folder, which TensorBoard reads as one run.
How it can mislead: values are kept in fp32, so a loss of 1e-50 is 0 there (its log10 is not); a histogram's mean is read from its bins;
curves are smoothed by default (slider at the left).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gradscope.sinks import Destination, sinks
from gradscope.sinks.points import Histogram, Point

FOLDER = "tensorboard"


@sinks.register("tensorboard")
@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    module: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    def __call__(self, run: Destination) -> EventFiles:
        from torch.utils.tensorboard import SummaryWriter

        return EventFiles(SummaryWriter(str(run.path / FOLDER)), run.path)


class EventFiles:
    def __init__(self, writer: Any, path: Path) -> None:
        self.id = FOLDER
        self.where = f"tensorboard --logdir {path}"
        self._writer = writer

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if isinstance(point.value, Histogram):
                self._writer.add_histogram_raw(point.name, **_raw(point.value), global_step=point.step)
            else:
                self._writer.add_scalar(point.name, point.value, point.step)
        self._writer.flush()  # it holds rows back for two minutes otherwise, and a killed run would lose them

    def close(self, done: bool) -> None:
        self._writer.close()


def _raw(histogram: Histogram) -> dict[str, Any]:
    kept = histogram.trimmed()
    middles = (kept.edges[:-1] + kept.edges[1:]) / 2
    return {
        "min": float(kept.edges[0]),
        "max": float(kept.edges[-1]),
        "num": float(kept.counts.sum()),
        "sum": float(np.dot(kept.counts, middles)),
        "sum_squares": float(np.dot(kept.counts, middles**2)),
        "bucket_limits": kept.edges[1:].tolist(),
        "bucket_counts": kept.counts.tolist(),
    }
