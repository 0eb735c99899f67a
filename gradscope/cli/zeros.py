"""gradscope zeros"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli.evaluate import (
    AllowMissing,
    Caption,
    CaptionKey,
    DataDir,
    DataName,
    Decode,
    Device,
    Encoding,
    ImageKey,
    ImageRoot,
    OnBadImage,
    OnTooLong,
    TrustArchive,
    data_settings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from gradscope.zeros.accounting import Tally
    from gradscope.zeros.encoder_batch import ZeroBatch

_LABELS = {
    "frozen": "frozen",
    "unused": "unused",
    "structural": "structural",
    "dead_unit": "dead unit",
    "dtype_underflow": "dtype underflow",
    "saturation_underflow": "saturation underflow",
    "unexplained": "unexplained",
    "squared_underflow": "square is 0 in fp32",
    "eps_dominated": "sqrt(v_hat) < eps",
    "stale": "stale second moment",
}
_TOWERS = ("image", "text", "scale")


def zeros(
    encoder: Annotated[str, typer.Argument(help="A run, a checkpoint, tiny, a folder or an open_clip NAME:TAG.")],
    data: DataName = None,
    split: Annotated[str, typer.Option(help="A split of the data; the only one there is if none has this name.")] = "train",
    data_dir: DataDir = None,
    image_key: ImageKey = None,
    caption_key: CaptionKey = None,
    image_root: ImageRoot = None,
    encoding: Encoding = None,
    caption: Caption = None,
    allow_missing: AllowMissing = False,
    on_bad_image: OnBadImage = "error",
    decode: Decode = "fast",
    on_too_long: OnTooLong = "truncate",
    width: Annotated[int, typer.Option(help="Candidates in the softmax: records of the batch.", min=2)] = 16,
    precision: Annotated[
        str | None, typer.Option(help="Of the towers: fp32, bf16 or fp16.", show_default="the run's own, otherwise fp32")
    ] = None,
    objective: Annotated[str | None, typer.Option(help="infonce or hn.", show_default="the run's own, otherwise infonce")] = None,
    gamma: Annotated[float | None, typer.Option(help="Of --objective hn.", show_default="0.5")] = None,
    loss_scale: Annotated[
        float | None,
        typer.Option(
            help="The loss is multiplied by it before backward, as GradScaler does.", show_default="in fp16 the run's, otherwise 1"
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run: last or best (on validation).")] = "last",
    seed: Annotated[int, typer.Option(help="Of the choice of the batch.")] = 42,
    output: Annotated[
        Path | None, typer.Option(help="A .json; the same by tensor goes beside it as .csv.", show_default="none: tables only")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the JSON instead of tables.")] = False,
    trust_archive: TrustArchive = False,
    device: Device = "auto",
) -> None:
    """Why entries of the gradient are zero: every exact zero of one batch by cause, and the non-zero ones that nobody sees.

    Example: gradscope zeros runs/demo/infonce --data scenes --precision fp16 --loss-scale 65536
    """
    from gradscope.console import out
    from gradscope.zeros.encoder_batch import account_encoder

    settings = data_settings(
        data, data_dir=data_dir, image_key=image_key, caption_key=caption_key, image_root=image_root, encoding=encoding,
        caption=caption, allow_missing=allow_missing, on_bad_image=on_bad_image, decode=decode, on_too_long=on_too_long,
    )  # fmt: skip
    _check_output(output)
    found = account_encoder(
        encoder, data=settings, split=split, width=width, precision=precision, objective=_objective(objective, gamma),
        loss_scale=loss_scale, seed=seed, device=device, which=checkpoint, trust_archive=trust_archive,
    )  # fmt: skip
    _show(found, json_)
    if output is not None:
        _write(found, output)
        out.print(f"JSON: {output}; by tensor: {output.with_suffix('.csv')}", soft_wrap=True)


def _check_output(output: Path | None) -> None:
    from gradscope.paths import check_writable

    if output is not None and output.suffix != ".json":
        raise ValueError(f"--output needs a name that ends in .json; got '{output}'")
    check_writable(output)


def _objective(name: str | None, gamma: float | None) -> dict[str, Any] | None:
    """What was asked for as the recipe's table; None for the run's own."""
    if gamma is not None and name != "hn":
        raise ValueError("--gamma belongs to --objective hn; give both, or leave it out for the run's own objective")
    if name is None:
        return None
    return {"name": name, **({"gamma": 0.5 if gamma is None else gamma} if name == "hn" else {})}


def _show(found: ZeroBatch, as_json: bool) -> None:
    from gradscope.console import out
    from gradscope.zeros.words import content, explanation

    if as_json:
        import json

        typer.echo(json.dumps(content(found), indent=2, ensure_ascii=False))
        return
    accounting = found.accounting
    scale = f", loss scale {accounting.loss_scale:g}" if accounting.loss_scale != 1 else ""
    out.print(
        f"{found.encoder} on {found.data} {found.split}: one batch of {found.width}, {found.objective}, loss {accounting.loss:.3g}",
        soft_wrap=True,
    )
    out.print(_exact(found, f"Exactly zero, {found.precision}{scale}: disjoint, first match wins"))
    out.print(_invisible(found, "Non-zero but invisible: an entry may be in several rows"))
    for note in accounting.notes:
        out.print(f"note: {note}", soft_wrap=True)
    out.print(explanation(accounting), soft_wrap=True)


def _columns(found: ZeroBatch) -> Mapping[str, Tally]:
    accounting = found.accounting
    towers = {tower: accounting.total(tower) for tower in _TOWERS if tower in accounting.groups}
    return {**towers, "total": accounting.total()}


def _exact(found: ZeroBatch, title: str) -> Table:
    from gradscope.metrics.zero_causes import CAUSES
    from gradscope.zeros.words import share

    columns = _columns(found)
    tallies, total = list(columns.values()), columns["total"]
    details = {"structural": ("  of these key bias", [t.key_bias for t in tallies])}
    if found.accounting.exponent is not None:
        details["dtype_underflow"] = (f"  back at 2^{found.accounting.exponent}", [t.comes_back for t in tallies])
    table = _table(title, [*columns, "of zeros"])
    for cause in CAUSES:
        counts = (f"{tally.zeros[cause]:,}" for tally in tallies)
        table.add_row(_LABELS[cause], *counts, share(total.zeros[cause], total.zero_entries))
        if cause in details and details[cause][1][-1]:
            table.add_row(details[cause][0], *(f"{count:,}" for count in details[cause][1]), "")
    table.add_section()
    table.add_row("all zeros", *(f"{tally.zero_entries:,}" for tally in tallies), "")
    table.add_row("entries", *(f"{tally.entries:,}" for tally in tallies), "")
    table.add_row("zero share", *(share(tally.zero_entries, tally.entries) for tally in tallies), "")
    return table


def _invisible(found: ZeroBatch, title: str) -> Table:
    from gradscope.metrics.zero_causes import INVISIBLE
    from gradscope.zeros.words import share

    columns = _columns(found)
    total = columns["total"]
    table = _table(title, [*columns, "share"])
    for key in INVISIBLE:
        counts = [f"{tally.invisible[key]:,}" if key in tally.invisible else "unknown" for tally in columns.values()]
        whole = total.entries - total.zero_entries if key in total.invisible else 0
        table.add_row(_LABELS[key], *counts, share(total.invisible.get(key, 0), whole))
    return table


def _table(title: str, heads: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))  # nine digits three times fit in 80 columns
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _write(found: ZeroBatch, path: Path) -> None:
    """The JSON, and one row per tensor as CSV beside it."""
    import pandas as pd

    from gradscope.evaluation_file import write_json
    from gradscope.zeros.words import content, rows

    write_json(path, content(found))
    pd.DataFrame(rows(found.accounting)).to_csv(path.with_suffix(".csv"), index=False)
