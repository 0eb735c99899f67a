"""The same start seen through softmaxes of several widths: true InfoNCE loss of each batch, before any training.

One point is one batch: log10 of its true InfoNCE loss in nat. The box holds the quartiles, the bar is the median; the share of
batches below 1e-3 is printed above, and how many losses were not finite ("lost") if any.

How to read it: the weights and the data are the same throughout, so whatever changes from left to right is the width alone; a
share that falls as the width grows says that part of the saturation is a narrow softmax.
How it can mislead: batches of different widths share pictures, so the columns are not independent draws; a wide column has
fewer batches for the same number of pictures, so its share moves in coarse steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from gradscope.figures import figures
from gradscope.figures.style import COLUMN_INCHES, OBJECTIVE_COLOURS, new_figure, paper_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THRESHOLD = -3


@figures.register("start-widths")
def start_widths(frame: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """Strip and box of the loss per batch, by width.

    Args:
        frame: columns ``width`` (candidates per softmax), ``batch`` (any label), ``log10_true`` (log10 nat); one row per batch.

    Returns:
        The figure (column width) and the frame drawn, with ``share_below_1e-3`` and ``batches`` of each width added.

    Raises:
        ValueError: if a column is missing or there are no rows.
    """
    missing = {"width", "batch", "log10_true"} - set(frame.columns)
    if missing or frame.empty:
        raise ValueError(f"start-widths needs rows with width, batch and log10_true; missing: {', '.join(sorted(missing)) or 'rows'}.")
    drawn = _with_shares(frame)
    with paper_style():
        figure = new_figure(COLUMN_INCHES, 2.2)
        axis = figure.subplots()
        for place, (_, column) in enumerate(drawn.groupby("width")):
            _column(axis, place, column)
        _axes(axis, drawn)
    return figure, drawn


def _with_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """A loss that is NaN counts as not below, and as a batch."""
    drawn = frame[["width", "batch", "log10_true"]].sort_values(["width", "batch"]).reset_index(drop=True)
    by_width = (drawn["log10_true"] < THRESHOLD).groupby(drawn["width"])
    return drawn.assign(**{"share_below_1e-3": by_width.transform("mean"), "batches": by_width.transform("size")})


def _column(axis: Axes, place: int, column: pd.DataFrame) -> None:
    colour = OBJECTIVE_COLOURS["infonce"]
    values = np.sort(column["log10_true"][np.isfinite(column["log10_true"])].to_numpy())
    offset = 0.3 * (np.arange(len(values)) * 0.618034 % 1 - 0.5)  # golden-ratio spread: no random numbers, no stripes
    axis.plot(place + offset, values, "o", color=colour, markersize=2, alpha=0.5, markeredgewidth=0)
    if len(values):
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        axis.bar(place, high - low, bottom=low, width=0.5, color="none", edgecolor="0.3", linewidth=0.7)
        axis.plot([place - 0.25, place + 0.25], [middle, middle], color="0.1", linewidth=1.4)
    lost = len(column) - len(values)
    word = f"{100 * column['share_below_1e-3'].iloc[0]:.0f} %" + (f", {lost} lost" if lost else "")
    axis.text(place, 1.02, word, ha="center", va="bottom", color=colour, transform=axis.get_xaxis_transform())


def _axes(axis: Axes, drawn: pd.DataFrame) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    widths = drawn.groupby("width")["batches"].first()
    axis.set_xticks(range(len(widths)), [f"{width}\nn = {count}" for width, count in widths.items()])
    axis.set_xlim(-0.6, len(widths) - 0.4)
    axis.axhline(THRESHOLD, color="0.25", linewidth=0.6, linestyle=(0, (4, 2)), zorder=1)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$10^{{{value:.0f}}}$"))
    axis.set_xlabel("candidates in one softmax (n: batches)")
    axis.set_ylabel("InfoNCE loss at start (nat)")
    axis.set_title(r"batches below $10^{-3}$", loc="left", pad=14)
