"""Expected R@1 as the gallery grows, one line per evaluation, a panel per direction.

Exact expectations over random smaller galleries, with 95 % bootstrap intervals over images; the last point is the measured recall.
Source: `gradscope.metrics.gallery_curve`. How to read it: compare two data sets at one gallery size, not at their own ones.
How it can mislead: a random part of a large benchmark is not a small benchmark; nothing is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradscope.figures import figures
from gradscope.figures.evaluations import FRAME, direction_panels, label_of, named, series
from gradscope.figures.style import DOUBLE_INCHES, paper_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@figures.register("gallery")
def gallery(evaluations: Sequence[Mapping[str, Any]]) -> tuple[Figure, DataFrame]:
    """The figure and the frame drawn: evaluation, direction, x (gallery size), value, low, high.

    Args:
        evaluations: contents of files that ``gradscope eval`` wrote.

    Raises:
        ValueError: none was given, or one has no curve.
    """
    import pandas as pd

    rows = [
        (label, p["direction"], p["size"], p["value"], p["low"], p["high"])
        for label, content in named(evaluations)
        for p in series(content, "gallery_curve", label_of(content))
    ]
    frame = pd.DataFrame(rows, columns=list(FRAME))
    with paper_style():
        figure = direction_panels(frame, x="gallery size", width=DOUBLE_INCHES)
        ticks = _ticks(sorted(frame["x"].unique()), list(frame.groupby("evaluation")["x"].max().unique()))
        for axes in figure.axes:
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
    return figure, frame


def _ticks(sizes: list[int], measured: list[int]) -> list[int]:
    """The measured sizes, then powers of ten, then other round ones, each if its label has room."""
    rounded = [int(size) for size in sizes if str(size).rstrip("0") in ("1", "2", "5")]
    rounded.sort(key=lambda size: not str(size).startswith("1"))
    span = math.log(max(sizes) / min(sizes)) or 1.0
    kept: list[int] = []
    for size in (*sorted(map(int, measured), reverse=True), *rounded):
        if all(size != other and abs(math.log(size / other)) >= _room(size, other) * span for other in kept):
            kept.append(size)
    return sorted(kept)


def _room(one: int, other: int) -> float:
    """From the middle of one label to the middle of another, with a gap between them: a share of the axis."""
    return 0.02 + 0.011 * (len(f"{one:,}") + len(f"{other:,}"))
