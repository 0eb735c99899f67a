"""Beside Figure 1: what a batch shows as its softmax widens.

Upper panel: expected hardest in-batch caption cosine; lower panel: chance that a neighbour of cosine >= 0.9 is in the batch.
Source: order statistics, `gradscope.metrics.batch_hardness`. How to read it: the step from 16 to 128 is what 16 x 8 gradient
accumulation gives away. How it can mislead: captions only, one encoder; points stop at N, nothing is extrapolated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradscope.figures import figures
from gradscope.figures.geometry_labels import encoders, labels, mark_foreign
from gradscope.figures.style import COLUMN_INCHES, data_colours, new_figure, paper_style
from gradscope.geometry_file import CaptionGeometry

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@figures.register("width")
def width_curve(geometries: list[CaptionGeometry]) -> tuple[Figure, DataFrame]:
    """The figure, and the frame drawn: data, encoder, n, width, expected_hardest, standard_error, near_chance (nan: width > N).

    Raises:
        ValueError: no geometry was given, or none of as many captions as the smallest width.
    """
    import pandas as pd

    if not geometries:
        raise ValueError("the width curve needs at least one geometry; make one with `gradscope caption-geometry DATA`.")
    names = labels(geometries)
    frame = pd.concat([_curve(g, name) for g, name in zip(geometries, names, strict=True)], ignore_index=True)
    if frame["expected_hardest"].isna().all():
        raise ValueError(
            f"the width curve begins at {frame['width'].min()} captions, {', '.join(names)} has fewer; give a larger data set."
        )
    colours = data_colours(names)
    near = geometries[0].width_curve.near
    with paper_style():
        figure = new_figure(COLUMN_INCHES, 3.3)
        upper, lower = figure.subplots(2, 1, sharex=True)
        for name, curve in frame.groupby("data", sort=False):
            look = {"color": colours[str(name)], "marker": "o", "markersize": 2.5, "clip_on": False, "label": str(name)}
            upper.plot(curve.width, curve.expected_hardest, **look)
            lower.plot(curve.width, curve.near_chance, **look)
        upper.set_title("(a) expected hardest caption in the batch", loc="left")
        lower.set_title(f"(b) chance of a caption ≥ {near:g} in the batch", loc="left")
        upper.set_ylabel("cosine")
        lower.set_ylabel("probability")
        for axis in (upper, lower):  # neither goes above 1: captions that are all equal lie on the edge
            axis.set_ylim(top=min(axis.get_ylim()[1], 1.0))
        lower.set_ylim(bottom=0)
        widths = sorted(frame.dropna(subset="expected_hardest").width.unique())
        lower.set_xscale("log", base=2)
        lower.set_xticks(widths, [str(w) if w < 1024 else f"{w // 1024}k" for w in widths])
        lower.minorticks_off()
        lower.set_xlabel(f"width (captions in one softmax)\n{encoders(geometries)}")
        upper.legend(loc="best")
        mark_foreign(figure, geometries)
    return figure, frame


def _curve(geometry: CaptionGeometry, name: str) -> DataFrame:
    import pandas as pd

    curve = geometry.width_curve
    return pd.DataFrame(
        {
            "data": name,
            "encoder": geometry.encoder,
            "n": geometry.n,
            "width": curve.widths,
            "expected_hardest": np.array(curve.expected_hardest, dtype=float),  # None becomes nan
            "standard_error": np.array(curve.standard_error, dtype=float),
            "near_chance": np.array(curve.near_chance, dtype=float),
        }
    )
