"""Where an objective stops teaching: the share of batches under 1e-3 over scale and softmax width, one panel per objective.

Beside it, as a figure of its own, the gradient norm at the embeddings (median batch) against the width. Both are drawn from the table
that `gradscope what-if --output` writes; its columns are explained in `gradscope.whatif`. Source: paper facts, section 7.7.

How to read it: a dark cell has stopped. Dark on the left and pale on the right is a narrow softmax, which a wider one repairs without
any margin; dark up to the right edge is a set too easy for that objective at that scale. How it can mislead: the rows are those of one
set of weights, so this is the next step and not the end of a run; wide cells have few batches, so their shares move in coarse steps.
A loss without a floor at 0 is never under 1e-3 in earnest: its panel is left blank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gradscope.figures import figures
from gradscope.figures.style import COLUMN_INCHES, OBJECTIVE_COLOURS, new_figure, paper_style
from gradscope.whatif_words import arm_name, arms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

#: Columns that the two figures draw.
CELL = ["objective", "precision", "loss_scale", "scale", "width", "batches"]
_COLUMNS = 2
#: Characters that fit over one of two panels, and into one of two columns of a legend.
_TITLE = 24
#: The k-th arm of one objective takes the k-th look.
_LOOKS: tuple[dict[str, Any], ...] = (
    {"linestyle": "-", "marker": "o"},
    {"linestyle": "-", "marker": "s", "alpha": 0.55},
    {"linestyle": "--", "marker": "^"},
    {"linestyle": "--", "marker": "v", "alpha": 0.55},
    {"linestyle": ":", "marker": "D"},
    {"linestyle": ":", "marker": "x", "alpha": 0.55},
)


@figures.register("saturation-map")
def saturation_map(table: DataFrame) -> tuple[Figure, DataFrame]:
    """Heat maps at column width, and the frame drawn: ``CELL`` and below_1e-3.

    Args:
        table: what ``gradscope.whatif.what_if`` returned, or its CSV.

    Raises:
        ValueError: a column is missing, or there are no rows.
    """
    drawn = _part(table, "below_1e-3")
    panels = arms(drawn)
    widths, scales = _values(drawn, "width"), _values(drawn, "scale")
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with paper_style():
        height = 0.95 + rows * (0.3 + 0.2 * len(scales))
        figure = new_figure(COLUMN_INCHES, height)
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axis in grid.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (arm, part) in zip(grid.flat, panels, strict=False):
            image = _panel(axis, part, widths, scales)
            name = arm_name(drawn, arm)
            axis.set_title(name, loc="left", fontsize=min(7.0, 7.0 * _TITLE / len(name)), pad=3)
        for column in range(columns):
            below = [axis for axis in grid[:, column] if axis.get_visible()]
            if below:
                below[-1].tick_params(labelbottom=True)
        figure.supxlabel("candidates in one softmax", fontsize=7.5)
        figure.supylabel("scale", fontsize=7.5)
        bar = figure.colorbar(image, ax=grid, location="top", shrink=0.6, aspect=30, pad=0.08 / height, ticks=[0, 0.5, 1])
        bar.ax.set_xticklabels(["0 %", "50 %", "100 %"])
        bar.set_label("batches with a true loss under $10^{-3}$ nat", fontsize=7)
        bar.outline.set_linewidth(0.4)
    return figure, drawn


@figures.register("gradient-width")
def gradient_width(table: DataFrame) -> tuple[Figure, DataFrame]:
    """Gradient norm against width, a panel per scale; and the frame drawn: ``CELL`` and log10_gradient.

    A gradient of exactly 0 stands on the lower edge as a cross. Arguments and errors as ``saturation_map``.
    """
    drawn = _part(table, "log10_gradient")
    scales = _values(drawn, "scale")
    finite = drawn["log10_gradient"][np.isfinite(drawn["log10_gradient"])]
    floor, top = np.floor(finite.min() if len(finite) else 0.0), np.ceil(finite.max() if len(finite) else 0.0)
    if np.isneginf(drawn["log10_gradient"]).any():
        floor -= 1  # a place of its own for exact zeros
    with paper_style():
        labels = [arm_name(drawn, arm) for arm, _ in arms(drawn)]
        columns = _COLUMNS if max(map(len, labels)) <= _TITLE else 1
        legend_inches = 0.15 * -(-len(labels) // columns)
        figure = new_figure(COLUMN_INCHES, 0.6 + 1.25 * len(scales) + legend_inches)
        axes = figure.subplots(len(scales), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axis, scale in zip(axes, scales, strict=True):
            _lines(axis, drawn, scale, floor)
            axis.set_title(f"scale {scale:g}", loc="left", fontsize=7, pad=2)
            axis.set_ylim(floor, top)
            axis.set_ylabel("gradient norm")
        _width_axis(axes[-1], _values(drawn, "width"))
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=6.5, handlelength=2.6)
    return figure, drawn


def _part(table: DataFrame, value: str) -> DataFrame:
    missing = [column for column in [*CELL, value] if column not in table.columns]
    if missing or table.empty:
        what = f"columns {', '.join(missing)}" if missing else "rows"
        raise ValueError(f"the table of a what-if lacks {what}; write it with `gradscope what-if SOURCE --output F.csv`.")
    return table[[*CELL, value]].reset_index(drop=True)


def _values(table: DataFrame, column: str) -> list[Any]:
    return sorted(table[column].unique())


def _panel(axis: Axes, part: DataFrame, widths: list[int], scales: list[float]) -> Any:
    """One heat map with its numbers; blank where the share is undefined."""
    shares = part.pivot(index="scale", columns="width", values="below_1e-3").reindex(index=scales, columns=widths).to_numpy()
    image = axis.imshow(shares, cmap="Oranges", vmin=0, vmax=1, origin="lower", aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        if np.isfinite(share):
            colour = "white" if share > 0.6 else "0.2"
            axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=5, color=colour)
    if np.isnan(shares).all():
        axis.text(0.5, 0.5, "no floor at 0", ha="center", va="center", fontsize=6, color="0.4", transform=axis.transAxes)
    axis.set_xticks(range(len(widths)), [_short(width) for width in widths], fontsize=5.5, rotation=90 if len(widths) > 9 else 0)
    axis.set_yticks(range(len(scales)), [f"{scale:g}" for scale in scales], fontsize=6)
    axis.tick_params(length=0)
    axis.spines[["top", "right"]].set_visible(True)
    return image


def _lines(axis: Axes, drawn: DataFrame, scale: float, floor: float) -> None:
    """All arms at one scale."""
    seen: dict[str, int] = {}
    for arm, part in arms(drawn):
        name = arm[0].split()[0]
        look = _LOOKS[seen.setdefault(name, 0) % len(_LOOKS)]
        seen[name] += 1
        line = part[part["scale"] == scale].sort_values("width")
        zero = np.isneginf(line["log10_gradient"].to_numpy(dtype=float))
        colour = OBJECTIVE_COLOURS.get(name, "0.4")
        heights = np.where(zero, np.nan, line["log10_gradient"])
        axis.plot(
            line["width"], heights, color=colour, markersize=2.5, linewidth=0.9, clip_on=False, label=arm_name(drawn, arm), **look
        )
        if zero.any():
            axis.plot(line["width"][zero], np.full(zero.sum(), floor), "x", color=colour, markersize=4, clip_on=False)


def _width_axis(axis: Axes, widths: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_xscale("log", base=2)
    axis.set_xticks(widths, [_short(width) for width in widths])
    axis.minorticks_off()
    axis.set_xlabel("candidates in one softmax")
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$10^{{{value:.0f}}}$"))


def _short(width: int) -> str:
    return f"{width // 1024}k" if width >= 1024 and width % 1024 == 0 else str(width)
