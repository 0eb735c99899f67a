"""What the figures of evaluations share: names of the lines, and two panels of R@1 with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradscope.data.shard_names import file_label
from gradscope.figures.style import data_colours, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

FRAME = ("evaluation", "direction", "x", "value", "low", "high")
PANELS = {"i2t": "(a) image to text", "t2i": "(b) text to image"}


def label_of(content: Mapping[str, Any]) -> str:
    """Data set and encoder, short enough for a legend."""
    protocol = content["protocol"]
    return f"{file_label(protocol['data'])} {protocol['split']}, {Path(protocol['encoder']).name}"


def named(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """(label, content) of each; equal labels are numbered. Raises ValueError if there is none."""
    if not evaluations:
        raise ValueError("this figure needs at least one evaluation; make one with `gradscope eval ENCODER --data DATA`.")
    labels = [label_of(content) for content in evaluations]
    return [
        (f"{label} ({labels[: i + 1].count(label)})" if labels.count(label) > 1 else label, content)
        for i, (label, content) in enumerate(zip(labels, evaluations, strict=True))
    ]


def series(content: Mapping[str, Any], key: str, label: str) -> Any:
    """Part of an evaluation. Raises ValueError where an evaluation was written without it (by a sweep or the demo)."""
    if key not in content:
        raise ValueError(f"the evaluation of {label} has no '{key}'; evaluate again with `gradscope eval`.")
    return content[key]


def direction_panels(frame: DataFrame, *, x: str, width: float) -> Figure:
    """R@1 in percent over ``x``, a line per evaluation; call it inside ``paper_style()``."""
    figure = new_figure(width, 2.5)
    panels = figure.subplots(1, 2, sharey=True)
    colours = data_colours(list(frame["evaluation"].unique()))
    for axes, (direction, title) in zip(panels, PANELS.items(), strict=True):
        for name, line in frame[frame["direction"] == direction].groupby("evaluation", sort=False):
            middle = 100 * line["value"]
            bars = [middle - 100 * line["low"], 100 * line["high"] - middle]
            bars = [bar.clip(lower=0) for bar in bars]  # a percentile interval need not contain the value
            look = {"color": colours[str(name)], "marker": "o", "markersize": 2.5, "linewidth": 1.0, "capsize": 1.5}
            axes.errorbar(line["x"], middle, yerr=bars, label=str(name), clip_on=False, **look)  # 0 and 100 lie on the edge
        axes.set_title(title, loc="left")
        axes.set_xlabel(x)
    panels[0].set_ylabel("R@1 (%)")
    highest = 100 * max(frame["value"].max(), frame["high"].max())
    panels[0].set_ylim(0, 103 if highest > 50 else None)  # 103: a marker at 100 is not cut
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 3))  # below: no curve can run under it
    return figure
