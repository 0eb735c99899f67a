"""What each precision and loss scale prints and passes on, over the positive cosine or the true loss of a batch.

    (a) the printed loss     (b) share of exactly zero entries of the embedding gradient     (c) its norm     (d) its relative error

One line per setting for made-up pairs (medians over batches), one point per batch for drawn ones. Values that are exactly 0 stand,
hollow, on a floor line of their own, since a logarithmic axis has no zero. Source: ``gradscope.precision_audit``.
A setting whose gradient overflows is named so in the legend, with the number of batches; they are left out of (c) and (d).
How to read it: where (a) is on the floor and (c) is not, only the print has ended; where (c) is on the floor, the teaching has.
How it can mislead: lines that agree lie on each other; the widest is drawn first. (b) counts entries, whatever they weigh: read it
beside (c).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscope.figures import figures
from gradscope.figures.style import DOUBLE_INCHES, new_figure, paper_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_NEEDED = ("objective", "setting", "batch", "true_loss_log10", "loss", "zero_share", "gradient_norm", "gradient_error")


@dataclass(frozen=True, kw_only=True)
class _Panel:
    column: str
    title: str
    share: bool  # in percent on a straight axis; otherwise logarithmic, with a floor for zeros


_PANELS = (
    _Panel(column="loss", title="printed loss (nat)", share=False),
    _Panel(column="zero_share", title="exact zeros (%)", share=True),
    _Panel(column="gradient_norm", title="gradient norm", share=False),
    _Panel(column="gradient_error", title="gradient error (%)", share=True),
)
#: Marker, line style and colour by precision; a loss scale takes the next of the spare ones.
_LOOKS = {"fp64": ("o", "-", "#000000"), "fp32": ("s", "-", "#0072B2"), "bf16": ("^", "--", "#E69F00"), "fp16": ("v", "-", "#D55E00")}
_SPARE = (("D", "-.", "#CC79A7"), ("P", ":", "#009E73"), ("X", "-.", "#56B4E9"), ("*", ":", "#7F7F7F"))


@figures.register("precision-audit")
def precision_audit(frame: DataFrame) -> tuple[Figure, DataFrame]:
    """The figure and the frame drawn: objective, setting, x, batch and the four columns of the panels.

    Args:
        frame: what ``gradscope audit`` wrote, or ``gradscope.precision_audit.audit`` returned.

    Raises:
        ValueError: a column is missing, or no row is left.
    """
    missing = [name for name in _NEEDED if name not in frame]
    if missing or frame.empty:
        raise ValueError(
            f"this table is no precision audit: {', '.join(missing) or 'every row'} is missing; make it with `gradscope audit`."
        )
    drawn = _frame(frame)
    swept = "positive_cosine" in frame
    objectives = list(drawn["objective"].unique())
    with paper_style():
        rows, columns = (2, 2) if len(objectives) == 1 else (len(objectives), 4)
        figure = new_figure(DOUBLE_INCHES, 0.5 + (1.9 if columns == 2 else 1.6) * rows)
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for i, objective in enumerate(objectives):
            _draw(list(grid[4 * i : 4 * i + 4]), drawn[drawn["objective"] == objective], swept, first=4 * i)
            if len(objectives) > 1:
                grid[4 * i].set_ylabel(objective)
        for axes in grid[-columns:]:
            axes.set_xlabel("positive cosine" if swept else "true loss (nat)")
        handles, names = grid[0].get_legend_handles_labels()
        labels = [_with_overflow(name, frame[frame["setting"] == name]) for name in names]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names) if labels == names else 3)
    return figure, drawn


def _with_overflow(setting: str, rows: DataFrame) -> str:
    lost = int((~np.isfinite(rows["gradient_norm"])).sum())
    return f"{setting} (overflow in {lost:,} of {len(rows):,})" if lost else setting


def _frame(frame: DataFrame) -> DataFrame:
    """Medians over batches where pairs were made up, every batch otherwise; ``x`` is what the panels are drawn over."""
    columns = [panel.column for panel in _PANELS]
    if "positive_cosine" in frame:
        found = frame.groupby(["objective", "setting", "positive_cosine"], sort=False)[columns].median().reset_index()
        return found.rename(columns={"positive_cosine": "x"})
    return frame[["objective", "setting", "batch", *columns]].assign(x=10.0 ** frame["true_loss_log10"])


def _draw(panels: Sequence[Axes], part: DataFrame, swept: bool, first: int) -> None:
    settings = list(part["setting"].unique())
    looks = _looks(settings)
    for axes, panel, letter in zip(panels, _PANELS, "abcd", strict=True):
        floor = None if panel.share else _floor(part[panel.column])
        for place, setting in enumerate(settings):
            marker, dashes, colour = looks[setting]
            line = part[part["setting"] == setting].sort_values("x")
            wide = 1 + 0.35 * (len(settings) - place)  # the first lies under the others and stays visible
            look: dict[str, Any] = {"color": colour, "linestyle": dashes if swept else "none", "linewidth": 0.8 * wide}
            y = 100 * line[panel.column] if panel.share else line[panel.column].where(line[panel.column] > 0, floor)
            axes.plot(line["x"], y, label=setting, marker=marker, markersize=1.2 + 1.2 * wide, **look)
            if floor is not None:
                zero = line[line[panel.column] == 0]
                axes.plot(zero["x"], [floor] * len(zero), linestyle="none", marker=marker, markersize=1.2 + 1.2 * wide,
                          markerfacecolor="white", markeredgecolor=colour)  # fmt: skip
        _dress(axes, panel, letter if first == 0 else "", part, floor, swept)


def _dress(axes: Axes, panel: _Panel, letter: str, part: DataFrame, floor: float | None, swept: bool) -> None:
    axes.set_title(f"({letter}) {panel.title}" if letter else panel.title, loc="left")
    if not swept:
        _decades(axes, "x", part["x"], None)
        axes.invert_xaxis()  # from easy to done, as for the cosine
    if panel.share:
        finite = 100 * part[panel.column][np.isfinite(part[panel.column])]
        top = max(100.0, finite.max() if len(finite) else 0.0)  # an error may be over 100 %
        axes.set_ylim(-0.04 * top, 1.04 * top)
    else:
        _decades(axes, "y", part[panel.column], floor)


def _decades(axes: Axes, which: str, values: Any, floor: float | None) -> None:
    """A logarithmic axis with ticks at whole decades and at the floor, which reads 0; a straight one where no decade would show."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    positive = values[(values > 0) & (values < math.inf)]
    if floor is None and (positive.empty or positive.max() < 30 * positive.min()):
        axis.set_major_locator(MaxNLocator(3))
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = (math.log10(value) for value in sorted(axes.get_xlim() if which == "x" else axes.get_ylim()))
    step = max(1, math.ceil((high - low) / (6 if which == "y" else 3)))
    start = math.ceil(low if floor is None else math.log10(floor) + 1)
    powers = range(step * math.ceil(start / step), math.floor(high) + 1, step)
    ticks, labels = [10.0**p for p in powers], [f"$10^{{{p}}}$" for p in powers]
    if floor is not None:
        axes.axhline(floor, color="#B0B0B0", linewidth=0.6, zorder=0)
        ticks, labels = [floor, *ticks], ["0", *labels]
    axis.set_ticks(ticks, labels)
    axis.set_minor_locator(NullLocator())


def _floor(values: Any) -> float | None:
    """Where zeros are drawn: two decades under the smallest positive value; None where nothing is 0."""
    if not (values == 0).any():
        return None
    positive = values[values > 0]
    return 10.0 ** (math.floor(math.log10(positive.min())) - 2) if len(positive) else 1e-2


def _looks(settings: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    spare = iter(_SPARE * len(settings))
    return {setting: _LOOKS[setting] if setting in _LOOKS else next(spare) for setting in settings}
