"""One look for every figure: paper inches, small type, colours that survive colour-blindness and grey print.

Use: ``with paper_style(): figure = new_figure(...)``, draw, then ``save(figure, frame, stem)``. Nothing here touches pyplot,
the backend or the caller's settings, so it works without a display and inside a notebook.
How it can mislead: colours come from one table keyed by name, so a renamed data set may change its colour between two figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

COLUMN_INCHES = 3.25  # one text column
DOUBLE_INCHES = 6.75  # both columns
DPI = 300

#: The one colour table (Okabe and Ito's palette). Keys of objectives are the registry's names.
OBJECTIVE_COLOURS = {
    "infonce": "#D55E00",
    "hn": "#0072B2",
    "siglip": "#009E73",
    "dcl": "#CC79A7",
    "hardness_weighted": "#8C6D31",
}
DATA_COLOURS = {
    "docci": "#0072B2",
    "dci": "#D55E00",
    "long-dci": "#E69F00",
    "urban1k": "#009E73",
    "scenes": "#CC79A7",
}
_SPARE_COLOURS = ("#56B4E9", "#000000", "#8C6D31", "#7F7F7F", "#5B3A8C", "#A6C36F")

_SETTINGS: dict[Any, Any] = {
    "font.size": 7.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # TrueType: text stays text when the PDF is edited
    "ps.fonttype": 42,
    "savefig.dpi": DPI,
}


@contextmanager
def paper_style() -> Iterator[None]:
    """Style inside the block only; the caller's rcParams come back afterwards."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(width: float = COLUMN_INCHES, height: float = 2.0) -> Figure:
    """An empty figure of ``width`` x ``height`` inches with constrained layout. Call it inside ``paper_style()``."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def data_colours(names: Sequence[str]) -> dict[str, str]:
    """One distinct colour per data-set name: the table's where the name starts with a known one, spare ones otherwise.

    ``docci_test_captions`` counts as ``docci``. When two names share a known start, the second takes a spare colour;
    beyond the spare ones colours repeat.
    """
    chosen: dict[str, str] = {}
    spare = 0
    for name in names:
        known = next((key for key in sorted(DATA_COLOURS, key=len, reverse=True) if name.lower().startswith(key)), "")
        colour = DATA_COLOURS.get(known)
        if colour is None or colour in chosen.values():
            colour = _SPARE_COLOURS[spare % len(_SPARE_COLOURS)]
            spare += 1
        chosen[name] = colour
    return chosen


def save(figure: Figure, frame: DataFrame, stem: str | Path) -> list[Path]:
    """Writes ``stem``.pdf, .png (300 dpi) and .csv (the numbers drawn) and returns the three paths.

    Both pictures have the same layout. No creation date is written into the files, so that equal data give equal bytes.
    """
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.parent / f"{stem.name}{suffix}" for suffix in (".pdf", ".png", ".csv")]
    with paper_style(), _laid_out(figure):
        figure.savefig(paths[0], metadata={"CreationDate": None})
        figure.savefig(paths[1], dpi=DPI, metadata={"Software": None})
    frame.to_csv(paths[2], index=False)
    return paths


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Placed once, as the PNG wants it: each file would be placed on its own, and drawn twice for that."""
    engine = figure.get_layout_engine()
    if engine is None:
        yield
        return
    before = figure.dpi
    figure.dpi = DPI
    engine.execute(figure)
    figure.set_layout_engine("none")
    try:
        yield
    finally:
        figure.dpi = before
        figure.set_layout_engine(engine)
