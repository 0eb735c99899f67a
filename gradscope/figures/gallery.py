"""Expected R@1 as the gallery grows, one line per evaluation, a panel per direction.

Exact expectations over random smaller galleries, with 95 % bootstrap intervals over images; the last point is the measured recall.
Source: `gradscope.metrics.gallery_curve`. How to read it: compare two data sets at one gallery size, not at their own ones.
How it can mislead: a random part of a large benchmark is not a small benchmark; nothing is extrapolated.
"""

from __future__ import annotations

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
        ticks = _ticks(sorted(frame["x"].unique()))
        for axes in figure.axes:
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
    return figure, frame


def _ticks(sizes: list[int]) -> list[int]:
    """Round sizes only; powers of ten where the others would run into each other."""
    rounded = [int(size) for size in sizes if str(size).rstrip("0") in ("1", "2", "5")]
    return rounded if len(rounded) <= 6 else [size for size in rounded if str(size)[0] == "1"]
