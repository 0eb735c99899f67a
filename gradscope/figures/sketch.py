"""The gradient of a run by size and sign over its steps: a heat map by octave on a signed log axis, exact zeros as bars below.

A panel per tower; colour is the share of the tower's entries in an octave (log scale), bars are the share of exact zeros.
Definition and source: ``gradscope.quantities.sketch`` and ``gradscope.metrics.octaves``.
How to read it: a body that sinks towards the middle dies by decades; a bar that grows while the body stays are entries that stopped
getting any gradient at all. How it can mislead: colour counts entries, and the few large ones carry the norm; entries that no caption
of the batch reaches are zeros by structure (``zeros`` tells the two apart).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradscope.figures import figures
from gradscope.figures.style import DOUBLE_INCHES, new_figure, paper_style
from gradscope.metrics import octaves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from gradscope.runlog import Run

TOWERS = {"image": "image tower", "text": "text tower"}
FAINTEST = 1e-6  # share of entries at the pale end of the colours
DECADES_PER_OCTAVE = 0.30102999566398120


@figures.register("sketch")
def sketch(run: Run) -> tuple[Figure, DataFrame]:
    """The figure and the frame drawn: tower, step, sign (-1, 0, 1), octave (empty for zeros), entries, share; empty octaves left out.

    Raises:
        ValueError: the run holds no sketches; names the setting that records them.
    """
    frame = _frame(run)
    towers = [tower for tower in TOWERS if (frame["tower"] == tower).any()]
    with paper_style():
        figure = new_figure(DOUBLE_INCHES * max(len(towers), 1) / 2, 2.9)
        grid = figure.subplots(2, len(towers), squeeze=False, sharex=True, sharey="row", height_ratios=[4, 1])
        low, high = _range(frame)
        mesh: Any = None
        for column, tower in enumerate(towers):
            own = frame[frame["tower"] == tower]
            mesh = _heat(grid[0, column], own, low, high)
            _zeros(grid[1, column], own)
            grid[0, column].set_title(TOWERS[tower])
            grid[1, column].set_xlabel("step")
            _step_axis(grid[1, column], own)
        grid[0, 0].set_ylabel("gradient entry")
        grid[1, 0].set_ylabel("zeros")
        figure.align_ylabels()
        figure.colorbar(mesh, ax=list(grid[0]), label="share of entries", shrink=0.9, pad=0.02)
    return figure, frame


def _frame(run: Run) -> DataFrame:
    import pandas as pd

    rows: list[tuple[Any, ...]] = []
    present = set(run.readings_of("sketch")["key"])
    wanted = [tower for tower in TOWERS if f"counts.{tower}" in present] or list(TOWERS)  # none: let the run say what is missing
    for tower in wanted:
        for step, counts in run.reading("sketch", f"counts.{tower}", "total")[["step", "value"]].itertuples(index=False):
            negative, zero, positive = octaves.split(counts)
            total = max(float(negative.sum() + zero + positive.sum()), 1.0)
            rows.append((tower, step, 0, None, zero, zero / total))
            for sign, side in ((-1, negative), (1, positive)):
                rows += [(tower, step, sign, octaves.LOWEST + i, n, n / total) for i, n in enumerate(side) if n]
    frame = pd.DataFrame(rows, columns=["tower", "step", "sign", "octave", "entries", "share"])
    return frame.astype({"octave": "Int64", "entries": "int64"})


def _range(frame: DataFrame) -> tuple[int, int]:
    """The octaves to draw, the same for both signs and towers: all that hold more than the faintest share anywhere."""
    seen = frame.loc[(frame["sign"] != 0) & (frame["share"] >= FAINTEST), "octave"]
    return (int(seen.min()), int(seen.max())) if len(seen) else (-30, 0)


def _heat(axes: Axes, frame: DataFrame, low: int, high: int) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm

    steps = np.sort(frame["step"].unique())
    share = np.full((2 * (high - low + 1) + 1, len(steps)), np.nan)  # from the largest negative octave up to the largest positive
    inside = frame[(frame["sign"] != 0) & frame["octave"].between(low, high)]
    middle = high - low + 1
    rows = middle + inside["sign"] * (inside["octave"].astype(int) - low + 1)
    share[rows.to_numpy(), np.searchsorted(steps, inside["step"])] = inside["share"]
    levels = np.arange(high - low + 2) * DECADES_PER_OCTAVE + 0.3
    edges = np.concatenate([-levels[::-1], levels])
    norm = LogNorm(FAINTEST, 0.1, clip=True)
    mesh = axes.pcolormesh(_edges(steps), edges, share, norm=norm, cmap="YlGnBu", rasterized=True)
    axes.axhline(0, color="black", linewidth=0.4)
    _signed_ticks(axes, low, high)
    return mesh


def _signed_ticks(axes: Axes, low: int, high: int) -> None:
    """Round powers of ten on both sides, at most five on each."""
    first, last = low * DECADES_PER_OCTAVE, (high + 1) * DECADES_PER_OCTAVE
    stride = max(1, round((last - first) / 4))
    powers = [power for power in range(-40, 40) if first + 0.2 <= power <= last and power % stride == 0]
    places = [power - first + 0.3 for power in powers]
    labels = [rf"$10^{{{power}}}$" for power in powers]
    axes.set_yticks([-place for place in reversed(places)] + places, [f"$-${text}" for text in reversed(labels)] + labels)


def _zeros(axes: Axes, frame: DataFrame) -> None:
    import numpy as np

    zeros = frame[frame["sign"] == 0].sort_values("step")
    edges = _edges(zeros["step"].to_numpy())
    axes.bar(edges[:-1], zeros["share"], width=np.diff(edges), align="edge", color="#7F7F7F", linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "", "1"])


def _step_axis(axes: Axes, frame: DataFrame) -> None:
    """From the first measured step on, in whole steps."""
    from matplotlib.ticker import MaxNLocator

    edges = _edges(frame["step"].drop_duplicates().sort_values().to_numpy())
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _edges(steps: Any) -> Any:
    """Column edges halfway between steps, [steps + 1]; nothing lies before the first step."""
    import numpy as np

    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    half = np.diff(steps) / 2
    return np.concatenate([[steps[0] - 0.5], steps[:-1] + half, [steps[-1] + half[-1]]])
