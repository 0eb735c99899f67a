"""R@1 by the hardness of a caption, one line per evaluation, a panel per direction.

Points stand at the mean hardest-neighbour cosine of their bin; bars are 95 % bootstrap intervals over images. Definition and source:
`gradscope.metrics.hardness_recall`. How to read it: a line that falls to the right fails where captions resemble each other.
How it can mislead: each encoder measures hardness itself, so points of two encoders at one cosine are not the same captions.
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


@figures.register("hardness")
def hardness(evaluations: Sequence[Mapping[str, Any]]) -> tuple[Figure, DataFrame]:
    """The figure and the frame drawn: evaluation, direction, x (cosine), value, low, high, queries.

    Args:
        evaluations: contents of files that ``gradscope eval`` wrote.

    Raises:
        ValueError: none was given, or one has no bins.
    """
    import pandas as pd

    rows = [
        (label, b["direction"], b["mean_cosine"], b["value"], b["low"], b["high"], b["n_queries"])
        for label, content in named(evaluations)
        for b in series(content, "hardness", label_of(content))["bins"]
    ]
    frame = pd.DataFrame(rows, columns=[*FRAME, "queries"])
    with paper_style():
        figure = direction_panels(frame, x="mean cosine to the hardest caption of another image", width=DOUBLE_INCHES)
    return figure, frame
