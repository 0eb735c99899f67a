"""gradscope embedding-geometry"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from gradscope.protocol import Protocol

_TOWERS, _DIRECTIONS = ("image", "text"), ("i2t", "t2i")
#: Row label -> (key, its sides, decimals).
_ROWS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "alignment (E|v-t|²)": ("alignment", (), 4),
    "modality gap": ("modality_gap", (), 4),
    "relative modality gap": ("relative_gap", (), 4),
    "uniformity (nat)": ("uniformity", _TOWERS, 3),
    "mean cosine": ("mean_cosine", _TOWERS, 4),
    "effective rank": ("effective_rank", _TOWERS, 1),
    "  with the mean off": ("effective_rank_centred", _TOWERS, 1),
    "hub skewness": ("hub_skewness", _DIRECTIONS, 2),
    "largest hub (share)": ("hub_largest", _DIRECTIONS, 4),
    "anti-hubs (share)": ("antihubs", _DIRECTIONS, 3),
    "gap, 10 % quantile": ("gap_q10", _DIRECTIONS, 4),
    "gap, median": ("gap_q50", _DIRECTIONS, 4),
    "gap, 90 % quantile": ("gap_q90", _DIRECTIONS, 4),
    "gap below 0 (share)": ("violated", _DIRECTIONS, 4),
}


def embedding_geometry(
    files: Annotated[list[Path], typer.Argument(help="Files of `gradscope eval --save-embeddings`.", show_default=False)],
    k: Annotated[int, typer.Option(help="Nearest candidates counted for hubs.", min=1)] = 10,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Alignment, uniformity, modality gap, rank, hubs and gap of a gallery; several files side by side are a course over time.

    Example: gradscope embedding-geometry start.safetensors epoch1.safetensors epoch3.safetensors
    """
    import json

    from gradscope.console import out, progress
    from gradscope.embeddings_file import load_embeddings
    from gradscope.encoders.load import resolve_device
    from gradscope.metrics.gallery_geometry import embedding_geometry as measured

    place = resolve_device(device)
    found, protocols = [], []
    for file in files:
        embedded, protocol = load_embeddings(file)
        with progress(f"all pairs of {file.name}") as advance:
            values = measured(
                embedded.image.to(place), embedded.text.to(place), embedded.image_of_text.to(place), k=k, progress=advance
            )  # fmt: skip
        found.append(values)
        protocols.append(protocol)
    if json_:
        defined = [{key: value if math.isfinite(value) else None for key, value in values.items()} for values in found]
        told = [{"file": str(file), **p.facts(), "geometry": v} for file, p, v in zip(files, protocols, defined, strict=True)]
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
        return
    out.print(_table(files, protocols, found, k))
    for line in _notes(files, protocols, found):
        out.print(line, soft_wrap=True)


def _table(files: list[Path], protocols: list[Protocol], found: list[dict[str, float]], k: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=f"Geometry of embeddings (hubs among the {k} nearest)", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in _labels(files):
        table.add_column(name, justify="right", overflow="fold")
    table.add_row("encoder", "", *(p.encoder for p in protocols))
    table.add_row("data", "", *(f"{p.data} {p.split}" for p in protocols))
    for label, side, counted in (("rows", "image", "images"), ("", "text", "captions")):
        table.add_row(label, side, *(f"{values[counted]:,.0f}" for values in found))
    for label, (key, sides, decimals) in _ROWS.items():
        for number, side in enumerate(sides or ("",)):
            name = f"{key}.{side}" if side else key
            table.add_row("" if number else label, side, *(f"{values[name]:.{decimals}f}" for values in found))
    return table


def _labels(files: list[Path]) -> list[str]:
    stems = [file.stem for file in files]
    return [stem if stems.count(stem) == 1 else str(file) for stem, file in zip(stems, files, strict=True)]


def _notes(files: list[Path], protocols: list[Protocol], found: list[dict[str, float]]) -> list[str]:
    """What the numbers cannot say."""
    limits = sorted({int(min(values["images"], values["captions"], values["width"])) for values in found})
    notes = [f"effective rank can be at most {' or '.join(f'{limit:,}' for limit in limits)}: the rows, or the width"]
    for file, values in zip(files, found, strict=True):
        if values["excluded.image"] or values["excluded.text"]:
            lost = f"{values['excluded.image']:,.0f} image and {values['excluded.text']:,.0f} caption rows"
            notes.append(f"{file}: {lost} are not finite and were left out")
        if values["k"] >= min(values["images"], values["captions"]):
            notes.append(f"{file}: no more than {values['k']:,.0f} candidates on a side, so each is near to all and hubs say nothing")
    if len({(p.data, p.split, p.images, p.captions) for p in protocols}) > 1:
        notes.append("the files hold different galleries: rank, hubs and gap depend on the number of rows, so compare files of one")
    return notes
