"""Figure 1: (a) density of all pairwise caption cosines, (b) of each caption's hardest neighbour; one curve per data set.

density of a bin = count / (total * bin width), so each curve has area 1; nothing is smoothed. Dotted lines are exact means.
Source: HN-CLIP, Figure 1 (arXiv 2608.18521). How to read it: the further right (a) sits, the narrower the cone; what lies
right of .9 in (b) are the near-twins that decide R@1.
How it can mislead: (b) moves right as a data set grows, whatever its captions (see the width curve); curves of different
encoders do not compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradscope.figures import figures
from gradscope.figures.geometry_labels import encoders, labels, mark_foreign
from gradscope.figures.style import COLUMN_INCHES, data_colours, new_figure, paper_style
from gradscope.geometry_file import CaptionGeometry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_PANELS = (("a", "all pairs", "counts", "mean"), ("b", "hardest neighbour of each caption", "hardest_counts", "hardest_mean"))


@figures.register("1")
def figure1(geometries: list[CaptionGeometry]) -> tuple[Figure, DataFrame]:
    """The figure, and the frame drawn: panel, data, encoder, n, low, high, count, density, mean.

    Raises:
        ValueError: no geometry was given.
    """
    import pandas as pd

    if not geometries:
        raise ValueError("figure 1 needs at least one geometry; make one with `gradscope caption-geometry DATA`.")
    names = labels(geometries)
    frame = pd.concat([_curve(g, name, *panel) for panel in _PANELS for g, name in zip(geometries, names, strict=True)])
    with paper_style():
        figure = new_figure(COLUMN_INCHES, 3.3)
        axes = figure.subplots(2, 1, sharex=True)
        for axis, (panel, title, _, _) in zip(axes, _PANELS, strict=True):
            _draw(axis, frame[frame.panel == panel], data_colours(names))
            axis.set_title(f"({panel}) {title}", loc="left")
        drawn = frame[frame.density > 0.01]
        axes[1].set_xlim(float(drawn.low.min()) - 0.02, 1.0)
        for axis, (panel, *_) in zip(axes, _PANELS, strict=True):
            _place_legend(axis, frame[frame.panel == panel])
        axes[1].set_xlabel(f"caption-caption cosine\n{encoders(geometries)}")
        figure.supylabel("density", fontsize=7.5)
        mark_foreign(figure, geometries)
    return figure, frame.reset_index(drop=True)


def _curve(geometry: CaptionGeometry, name: str, panel: str, title: str, counts: str, mean: str) -> DataFrame:
    import pandas as pd

    count: np.ndarray = getattr(geometry, counts)
    return pd.DataFrame(
        {
            "panel": panel,
            "data": name,
            "encoder": geometry.encoder,
            "n": geometry.n,
            "low": geometry.edges[:-1],
            "high": geometry.edges[1:],
            "count": count,
            "density": count / (count.sum() * geometry.bin_width),
            "mean": getattr(geometry, mean),
        }
    )


def _draw(axis: Axes, frame: DataFrame, colours: dict[str, str]) -> None:
    peak = 1.05 * frame.density.max()  # the mean lines end here, under a legend that lies above the curves
    for name, curve in frame.groupby("data", sort=False):
        colour, mean = colours[str(name)], float(curve["mean"].iloc[0])
        edges = np.append(curve.low.to_numpy(), curve.high.iloc[-1])
        axis.stairs(curve.density.to_numpy(), edges, color=colour, fill=True, alpha=0.12)
        axis.stairs(curve.density.to_numpy(), edges, color=colour, label=f"{name}, mean {mean:.3f}")
        axis.plot([mean, mean], [0, peak], color=colour, linestyle=":", linewidth=1.0)
    axis.set_ylim(0, peak)


def _place_legend(axis: Axes, frame: DataFrame) -> None:
    """In an upper corner that no curve and no mean line reaches, or above them all."""
    names = list(frame["data"].unique())
    low, high = axis.get_xlim()
    width = min(1.0, 0.2 + 0.0205 * max(len(f"{name}, mean 0.000") for name in names)) * (high - low)
    height = min(0.08 + 0.13 * len(names), 0.8)  # a share of the panel
    peak = axis.get_ylim()[1]
    corners = {"upper left": (low, low + width), "upper right": (high - width, high)}
    free = [corner for corner, ends in corners.items() if _reach(frame, *ends) < (1 - height) * peak]
    axis.set_ylim(0, peak if free else peak / (1 - height))
    axis.legend(loc="upper right" if free == ["upper right"] else "upper left")


def _reach(frame: DataFrame, low: float, high: float) -> float:
    """How high curves and mean lines reach between two cosines."""
    if frame["mean"].between(low, high).any():
        return float("inf")
    return float(frame.density[(frame.high > low) & (frame.low < high)].max())
