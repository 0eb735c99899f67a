"""``gradscope figure``: draw one figure again from the files that runs and caption-geometry left."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

#: Figures that are drawn from one CSV file, and where it comes from.
_TABLES = {
    "start-widths": "with columns width, batch, log10_true, as the demo writes it",
    "precision-audit": "that audit wrote",
    "saturation-map": "that what-if wrote",
    "gradient-width": "that what-if wrote",
}


def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="1, 4, width, start-widths, sketch, hardness, gallery, precision-audit, saturation-map, gradient-width, "
            "geometry-time or concentration.",
            show_default=False,
        ),
    ],
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="4: one or two run directories. 1 and width: folders of one data set each that caption-geometry wrote "
            "(runs/geometry/NAME). start-widths: the CSV of the demo. sketch: a run directory. "
            "hardness and gallery: JSON files that eval wrote. precision-audit: the CSV of audit. "
            "saturation-map and gradient-width: the CSV of what-if. "
            "geometry-time: one to three runs. concentration: a run directory.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for PDF, PNG and CSV.", show_default="figures/ in the first run, or beside the first source"),
    ] = None,
) -> None:
    """Draw a figure from logged numbers alone, as PDF and PNG, with the numbers drawn as CSV.

    Example: gradscope figure 4 runs/hn runs/infonce
    """
    from gradscope.console import out

    with _no_collection():
        written = _write(name, sources, output)
    for path in written:
        out.print(f"wrote {path}", soft_wrap=True)


def _write(name: str, sources: list[Path], output: Path | None) -> list[Path]:
    from gradscope.figures import figures
    from gradscope.figures.style import save

    figures[name]  # an unknown name is answered before any file is opened
    drawing, frame, home = _draw(name, sources)
    stem = {"width": "width_curve"}.get(name, f"figure{name}" if name.isdigit() else name.replace("-", "_"))
    return save(drawing, frame, (output or home) / stem)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Cycles are left alone, here and when the process ends: imports and artists make hundreds of thousands of objects that live as
    long as it does, and looking through them time and again was a quarter of its work (2026-11-30, pandas 3.1, matplotlib 3.11)."""
    wanted = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if wanted:
            gc.enable()


def _draw(name: str, sources: list[Path]) -> tuple[Figure, DataFrame, Path]:
    """The figure, its frame, and the folder it goes to unless the user says otherwise."""
    from gradscope.figures import figures

    if name == "4":
        from gradscope.runlog import Run

        if len(sources) > 2:
            raise ValueError(f"figure 4 takes one run, or an HN and an InfoNCE run; {len(sources)} were given.")
        runs = [Run(path) for path in sources]
        return *figures[name](*runs), runs[0].figures_dir
    if name == "geometry-time":
        from gradscope.runlog import Run

        runs = [Run(path) for path in sources]
        return *figures[name](*runs), runs[0].figures_dir
    if name in ("sketch", "concentration"):
        from gradscope.runlog import Run

        if len(sources) != 1:
            raise ValueError(f"figure {name} takes one run directory; {len(sources)} were given.")
        run = Run(sources[0])
        return *figures[name](run), run.figures_dir
    if name in _TABLES:
        return *figures[name](_table(name, sources)), sources[0].parent
    if name in ("hardness", "gallery"):
        return *figures[name]([_evaluation(path) for path in sources]), sources[0].resolve().parent
    from gradscope.geometry_file import load_geometry

    geometries = [load_geometry(path) for path in sources]
    return *figures[name](geometries), sources[0].resolve().parent


def _evaluation(path: Path) -> dict[str, Any]:
    """The contents of a JSON file that eval wrote."""
    import json

    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"'{path}' is not the JSON of an evaluation ({error}); give a file that `gradscope eval` wrote.") from error
    if not isinstance(content, dict) or content.get("schema") != "gradscope.evaluation" or "protocol" not in content:
        raise ValueError(f"'{path}' is not the JSON of an evaluation; give a file that `gradscope eval` wrote.")
    return content


def _table(name: str, sources: list[Path]) -> DataFrame:
    import pandas as pd

    if len(sources) != 1 or not sources[0].is_file():
        raise ValueError(f"{name} takes one CSV file {_TABLES[name]}.")
    try:
        return pd.read_csv(sources[0])
    except (ValueError, pd.errors.ParserError) as error:
        raise ValueError(f"{sources[0]} cannot be read as CSV: {error}.") from None
