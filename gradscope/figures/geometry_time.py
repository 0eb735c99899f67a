"""Geometry over time: how the two clouds of the measured batch move while a run trains.

    (a) alignment E|v - t|^2        (b) uniformity of each tower        (c) modality gap: distance of the two means
    (d) effective rank, centred     (e) gap image->text                 (f) gap text->image
A thin line is the reading of each measured batch, a thick one its running median; in (e) and (f) the band holds the middle 80 % of
the anchors, the line is the median anchor, both running medians over steps. Solid is the first tower, dashed the second. The words in
(d) say what a batch of this width can show at most, D being the width of the embeddings: min(width - 1, D). Below the dotted line of
(e) and (f), a gap of 0, retrieval in the batch fails.

Source: the quantity "geometry". How to read: (a) and (b) falling together is learning; (a) falling while (b) rises is collapse.
How it can mislead: one run's batches are small, so levels of (c) and (d) are biased by the width (too large, too small): compare
runs of one width, and take levels from ``gradscope embedding-geometry``. Curves of different data sets are of different clouds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from gradscope.figures import figures
from gradscope.figures.figure4 import DIRECTION_LABELS, LABELS
from gradscope.figures.style import COLUMN_INCHES, OBJECTIVE_COLOURS, new_figure, paper_style
from gradscope.runlog import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = ["run", "objective", "panel", "series", "step", "value", "running_median"]
#: Panel -> (title, series of plain readings: key, line style).
PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "a": ("alignment", {"alignment": "-"}),
    "b": ("uniformity (nat)", {"uniformity.image": "-", "uniformity.text": "--"}),
    "c": ("modality gap", {"modality_gap": "-"}),
    "d": ("eff. rank, centred", {"effective_rank_centred.image": "-", "effective_rank_centred.text": "--"}),
}
GAP_PANELS = {"e": "i2t", "f": "t2i"}
#: Where the quantiles .1, .5 and .9 are in a reading of gap_quantiles.
GAP_PLACES = {"gap_q10": 1, "gap_q50": 3, "gap_q90": 5}
SPARE_COLOURS = ("#009E73", "0.25", "#CC79A7")  # for other objectives, and where two runs share one


@figures.register("geometry-time")
def geometry_time(*runs: Run) -> tuple[Figure, pd.DataFrame]:
    """The figure (column width) and the frame drawn, columns ``COLUMNS``.

    Args:
        runs: one to three runs with readings of the full set, e.g. an HN and an InfoNCE run.

    Raises:
        ValueError: too many runs, none, or one without the readings, naming the setting that would record them.
    """
    if not 1 <= len(runs) <= 3:
        raise ValueError(f"figure geometry-time takes one to three runs, {len(runs)} were given.")
    names = _names(runs)
    frame = pd.concat([_data(run, name) for run, name in zip(runs, names, strict=True)], ignore_index=True)
    colours = _colours(runs, names)
    with paper_style():
        figure = new_figure(COLUMN_INCHES, 4.6)
        axes = dict(zip("abcdef", figure.subplots(3, 2, sharex=True).flat, strict=True))
        widths = _line_widths(names)
        for name in names:
            part = frame[frame["run"] == name]
            for panel, (_, series) in PANELS.items():
                for key, style in series.items():
                    _line(axes[panel], part[part["series"] == key], colours[name], style, widths[name])
            for panel in GAP_PANELS:
                _band(axes[panel], part[part["panel"] == panel], colours[name], widths[name])
        _finish(axes, frame, _width(runs))
        figure.legend(handles=_legend(names, colours, widths), loc="outside upper center", ncols=2, columnspacing=1.4)
    return figure, frame


def _names(runs: Sequence[Run]) -> list[str]:
    """A legend's name of each run: its objective, and its folder where two runs share one."""
    objectives = [LABELS.get(_objective(run), _objective(run)) for run in runs]
    names = [o if objectives.count(o) == 1 else f"{o}, {run.path.resolve().name}" for o, run in zip(objectives, runs, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({k})" for k, name in enumerate(names, start=1)]


def _objective(run: Run) -> str:
    """What the recipe says was trained; a run of somebody else's loop may not say."""
    return str(run.recipe.get("objective", {}).get("name", "run"))


def _colours(runs: Sequence[Run], names: Sequence[str]) -> dict[str, str]:
    colours: dict[str, str] = {}
    spare = iter(SPARE_COLOURS)
    for run, name in zip(runs, names, strict=True):
        colour = OBJECTIVE_COLOURS.get(_objective(run))
        colours[name] = next(spare) if colour is None or colour in colours.values() else colour
    return colours


def _line_widths(names: Sequence[str]) -> dict[str, float]:
    """Each run thinner than the one under it, which stays visible where both run along one path."""
    return dict(zip(names, ((1.2,), (2.2, 0.9), (3.0, 1.8, 0.8))[len(names) - 1], strict=True))


def _data(run: Run, name: str) -> pd.DataFrame:
    parts = [_rows(run.reading("geometry", key, ""), panel, key) for panel, (_, series) in PANELS.items() for key in series]
    there = set(run.readings_of("geometry")["key"])
    for panel, direction in GAP_PANELS.items():
        if f"gap_quantiles.{direction}" in there:  # a loss may have one direction only
            gap = run.reading("geometry", f"gap_quantiles.{direction}", "")
            for series, place in GAP_PLACES.items():
                parts.append(_rows(gap.assign(value=[value[place] for value in gap["value"]]), panel, series))
    return pd.concat(parts, ignore_index=True).assign(run=name, objective=_objective(run))[COLUMNS]


def _rows(readings: pd.DataFrame, panel: str, series: str) -> pd.DataFrame:
    values = readings.sort_values("step")["value"].astype(float).reset_index(drop=True)
    steps = readings["step"].sort_values().reset_index(drop=True)
    smooth = values.rolling(_window(len(values)), center=True, min_periods=1).median()
    return pd.DataFrame({"panel": panel, "series": series, "step": steps, "value": values, "running_median": smooth})


def _window(count: int) -> int:
    """Readings in a running median: about a tenth of all, odd, at most 51."""
    return min(51, count // 20 * 2 + 1)


def _line(axis: Axes, part: pd.DataFrame, colour: str, style: str, width: float) -> None:
    finite = part["value"].where(np.isfinite(part["value"]))
    axis.plot(part["step"], finite, color=colour, linewidth=0.5, alpha=0.35, marker="." if len(part) == 1 else "")
    axis.plot(part["step"], part["running_median"], color=colour, linewidth=width, linestyle=style)


def _band(axis: Axes, part: pd.DataFrame, colour: str, width: float) -> None:
    low, middle, high = (part[part["series"] == key] for key in GAP_PLACES)
    axis.fill_between(low["step"], low["running_median"], high["running_median"], color=colour, alpha=0.15, linewidth=0)
    axis.plot(middle["step"], middle["running_median"], color=colour, linewidth=width, marker="." if len(middle) == 1 else "")


def _finish(axes: dict[str, Axes], frame: pd.DataFrame, width: int | None) -> None:
    from matplotlib.ticker import MaxNLocator

    titles = {panel: title for panel, (title, _) in PANELS.items()}
    titles |= {panel: f"gap {DIRECTION_LABELS[direction]}" for panel, direction in GAP_PANELS.items()}
    for panel, axis in axes.items():
        axis.set_title(f"({panel}) {titles[panel]}", loc="left", fontsize=7)
        axis.yaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10], integer=True))
    for panel in GAP_PANELS:
        axes[panel].set_xlabel("optimizer step")
        axes[panel].axhline(0.0, color="0.25", linewidth=0.6, linestyle=":")
        axes[panel].set_visible(panel in set(frame["panel"]))
    if width is not None:
        axes["d"].margins(y=0.25)
        axes["d"].text(0.97, 0.97, f"at most min({width - 1}, $D$)", ha="right", va="top", fontsize=6.5, transform=axes["d"].transAxes)


def _width(runs: Sequence[Run]) -> int | None:
    """The one width that the stamps of all runs name, if they do."""
    stamps = {stamp for run in runs for stamp in run.readings_of("geometry")["stamps"]}
    found = {match.group(1) for stamp in stamps if (match := re.search(r"width (\d+)", stamp))}
    return int(found.pop()) if len(found) == 1 else None


def _legend(names: Sequence[str], colours: dict[str, str], widths: dict[str, float]) -> list[object]:
    from matplotlib.lines import Line2D

    runs = [Line2D([], [], color=colours[name], linewidth=widths[name], label=name) for name in names]
    first = Line2D([], [], color="0.3", label="first tower")
    return [*runs, first, Line2D([], [], color="0.3", linestyle="--", label="second tower")]
