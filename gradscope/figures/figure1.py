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
            corner = _free_corner(axis)
            _make_room(axis, frame[frame.panel == panel], corner)
            axis.legend(loc=corner)
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
    for name, curve in frame.groupby("data", sort=False):
        colour, mean = colours[str(name)], float(curve["mean"].iloc[0])
        edges = np.append(curve.low.to_numpy(), curve.high.iloc[-1])
        axis.stairs(curve.density.to_numpy(), edges, color=colour, fill=True, alpha=0.12)
        axis.stairs(curve.density.to_numpy(), edges, color=colour, label=f"{name}, mean {mean:.3f}")
        axis.axvline(mean, color=colour, linestyle=":", linewidth=1.0)
    axis.set_ylim(0, frame.density.max() * 1.05)


def _make_room(axis: Axes, frame: DataFrame, corner: str) -> None:
    """Raises the axis above what would lie under the legend."""
    names, (low, high) = frame.data.unique(), axis.get_xlim()
    share = 1.0 if max(map(len, names)) > 24 else 0.5  # of the width; long names are wider than a corner
    width = share * (high - low)
    under = frame[frame.high > high - width] if corner == "upper right" else frame[frame.low < low + width]
    axis.set_ylim(0, max(axis.get_ylim()[1], under.density.max() / (1.0 - min(0.08 + 0.13 * len(names), 0.8))))


def _free_corner(axis: Axes) -> str:
    """The upper corner away from the mean lines."""
    low, high = axis.get_xlim()
    means = [float(np.asarray(line.get_xdata())[0]) for line in axis.lines]
    return "upper right" if sum(means) / len(means) < (low + high) / 2 else "upper left"
