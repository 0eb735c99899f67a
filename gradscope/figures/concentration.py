"""Concentration: by how much a negative's probability rises with the similarity of its caption, measured against predicted.

One panel per direction. Across: s gamma (G_ij - mean of G over the anchor's negatives), the push that the margin is to give, in nat.
Up: log p_ij against its mean over the anchor's negatives, in nat, for InfoNCE and HN at the same parameters, and for HN at equal
cosine: its gradient's log p with scale * cosine taken off. A point is the mean of a twentieth of one batch's negatives. Lines have
the median slope over the measured batches; the dashed diagonal is slope 1.

Source: HN-CLIP, appendix B; the quantity "concentration".
How to read: points at equal cosine off the diagonal mean a broken loss path. The distance of HN's slope from InfoNCE's is 1;
InfoNCE's own says how far cosines follow captions without a margin.
How it can mislead: x holds the margin of the step it was measured at, so a run in which s or G moves spreads its points; means over
a twentieth hide the spread of single negatives (see the reading "explained"). Slopes are undefined where a margin ranks nothing
(gamma 0, a fixed margin, a width of 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gradscope.figures import figures
from gradscope.figures.figure4 import DIRECTION_LABELS
from gradscope.figures.style import COLUMN_INCHES, OBJECTIVE_COLOURS, new_figure, paper_style
from gradscope.runlog import Run
from gradscope.types import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Series -> (label, term, key of its points, key of its slope, colour, marker).
SERIES = {
    "infonce": ("InfoNCE", "infonce", "binned_log_ratio", "slope", OBJECTIVE_COLOURS["infonce"], "o"),
    "hn": ("HN", "hn", "binned_log_ratio", "slope", OBJECTIVE_COLOURS["hn"], "^"),
    "equal": ("HN at equal cosine", "hn", "binned_at_equal_cosine", "slope_at_equal_cosine", "0.15", "s"),
}
WORD_POINTS = 8  # height of a line of words above a panel
COLUMNS = ["direction", "series", "step", "bin", "predicted", "measured", "slope"]


@figures.register("concentration")
def concentration(run: Run) -> tuple[Figure, pd.DataFrame]:
    """The figure (column width) of one run, and the frame drawn, columns ``COLUMNS``; ``slope`` is that batch's own.

    Raises:
        ValueError: the run has no such readings (naming the setting that would record them), or no finite point.
    """
    frame = _data(run)
    if not np.isfinite(frame[["predicted", "measured"]]).all(axis=1).any():
        raise ValueError(f"{run.path} has no finite point of concentration; look for the cause of nan in its embeddings.")
    directions = list(dict.fromkeys(frame["direction"]))
    with paper_style():
        figure = new_figure(COLUMN_INCHES, 2.55 if len(directions) == 2 else 2.85)
        axes = figure.subplots(1, len(directions), sharex=True, sharey=True, squeeze=False)[0]
        for axis, direction in zip(axes, directions, strict=True):
            _panel(axis, frame[frame["direction"] == direction])
            axis.set_title(DIRECTION_LABELS[direction], loc="left", pad=5 + WORD_POINTS * len(SERIES))
        axes[0].set_ylabel(r"$\log p_{ij}$ against its row's mean (nat)")
        figure.supxlabel(r"predicted: $s\,\gamma\,(G_{ij}-\overline{G_i})$ (nat)", fontsize=7.5)
        figure.legend(handles=_legend(), loc="outside upper center", ncols=3, columnspacing=1.0, handletextpad=0.3)
    return figure, frame


def _data(run: Run) -> pd.DataFrame:
    predicted = _points(run, "binned_predicted", "", "predicted")
    there = set(run.readings_of("concentration")["key"])
    parts = []
    for direction in [d for d in DIRECTIONS if f"slope.{d}" in there]:
        for series, (_, term, points, slope, _, _) in SERIES.items():
            measured = _points(run, f"{points}.{direction}", term, "measured")
            slopes = run.reading("concentration", f"{slope}.{direction}", term)[["step", "value"]].rename(columns={"value": "slope"})
            both = predicted.merge(measured, on=["step", "bin"], validate="one_to_one").merge(slopes, on="step")
            parts.append(both.assign(direction=direction, series=series))
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def _points(run: Run, key: str, term: str, name: str) -> pd.DataFrame:
    """One row per step and bin."""
    readings = run.reading("concentration", key, term)
    rows = [
        (step, place, value)
        for step, values in zip(readings["step"], readings["value"], strict=True)
        for place, value in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=["step", "bin", name])


def _panel(axis: Axes, frame: pd.DataFrame) -> None:
    drawn = frame[np.isfinite(frame["predicted"]) & np.isfinite(frame["measured"])]
    ends = np.array([drawn["predicted"].min(), drawn["predicted"].max()])
    axis.plot(ends, ends, color="0.6", linewidth=0.6, linestyle=(0, (4, 2)), zorder=4)
    words = []
    for series, (_, _, _, _, colour, marker) in SERIES.items():
        part = drawn[drawn["series"] == series]
        look: dict[str, Any] = {"s": 4, "color": colour, "marker": marker, "alpha": _alpha(len(part)), "linewidths": 0}
        axis.scatter(part["predicted"], part["measured"], rasterized=True, **look)
        slope = part.drop_duplicates("step")["slope"].median()
        axis.plot(ends, slope * ends, color=colour, linewidth=1.0, zorder=3)
        words.append(("slope undefined" if np.isnan(slope) else f"slope {slope:.{4 if series == 'equal' else 2}f}", colour))
    for place, (word, colour) in enumerate(words, start=1):  # above the panel, where no point lies; the title's padding keeps the room
        at = {
            "xy": (0, 1),
            "xycoords": "axes fraction",
            "xytext": (0, 3 + WORD_POINTS * (len(words) - place)),
            "textcoords": "offset points",
        }
        axis.annotate(word, **at, color=colour, fontsize=6.5).set_in_layout(False)  # type: ignore[arg-type]


def _alpha(points: int) -> float:
    return float(np.clip(150 / max(points, 1), 0.12, 0.7))


def _legend() -> list[object]:
    from matplotlib.lines import Line2D

    looks = [(label, colour, marker) for label, _, _, _, colour, marker in SERIES.values()]
    return [Line2D([], [], color=colour, marker=marker, markersize=3, linewidth=1, label=label) for label, colour, marker in looks]
