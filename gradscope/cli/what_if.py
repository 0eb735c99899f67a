"""gradscope what-if"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli.evaluate import (
    AllowMissing,
    BatchSize,
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
    SplitName,
    TrustArchive,
    Workers,
    data_settings,
)

if TYPE_CHECKING:
    from pandas import DataFrame

    from gradscope.paired_rows import Pairs
    from gradscope.whatif import Arm, Grid

#: CLIP's clamp and two below it.
_SCALES = (20.0, 50.0, 100.0)
_OBJECTIVES = ("infonce", "hn", "siglip", "dcl", "hardness_weighted")
#: --order -> what the loss path calls it.
_ORDERS = {"last": "scale last", "first": "scale first", "two": "two products"}


def what_if(
    source: Annotated[
        str, typer.Argument(help="Stored embeddings (.safetensors), or a run, a checkpoint, tiny, a folder, an open_clip NAME:TAG.")
    ],
    data: DataName = None,
    split: SplitName = None,
    scale: Annotated[
        str | None, typer.Option(help="Multipliers of the cosines, by commas.", show_default="20,50,100 and the encoder's own")
    ] = None,
    width: Annotated[
        str | None,
        typer.Option(help="Candidates per softmax, by commas; all: the whole set.", show_default="powers of two from 8 to 1,024"),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="infonce, hn, siglip, dcl, hardness_weighted, by commas.", show_default="all of them")
    ] = ",".join(_OBJECTIVES),
    gamma: Annotated[str | None, typer.Option(help="Of hn, by commas.", show_default="0.25,0.5")] = None,
    margin: Annotated[
        str | None, typer.Option(help="Of hn: live, fixed, centred, by commas.", show_default="live,fixed,centred")
    ] = None,
    beta: Annotated[str | None, typer.Option(help="Of hardness_weighted, by commas.", show_default="0.5")] = None,
    bias: Annotated[
        str | None,
        typer.Option(help="Of siglip: a number, or best: where the loss is smallest, found anew per cell.", show_default="best"),
    ] = None,
    precision: Annotated[str, typer.Option(help="Of the loss path: fp64, fp32, bf16, fp16, by commas.")] = "fp32",
    loss_scale: Annotated[str, typer.Option(help="Factors of mixed precision, by commas.")] = "1",
    order: Annotated[
        str, typer.Option(help="last: s (V T'), as here; first: (s V) T', as OpenAI's CLIP; two: that and (s T) V', as open_clip.")
    ] = "last",
    batches: Annotated[
        int | None,
        typer.Option(help="Batches per width at most.", min=1, show_default="32, and no more than 8,192 pairs per width"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of batches; every arm sees the same.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="A .csv with the whole table; two figures go beside it.", show_default="none: tables only")
    ] = None,
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
    batch_size: BatchSize = 128,
    workers: Workers = 0,
    trust_archive: TrustArchive = False,
    device: Device = "auto",
) -> None:
    """What each objective would still teach on these embeddings, at other scales, widths and precisions. Nothing is trained.

    Example: gradscope what-if runs/demo/infonce --data scenes --output what-if.csv
    """
    from gradscope.cli.pair_source import read_pairs
    from gradscope.console import out, progress
    from gradscope.paired_rows import refuse_width
    from gradscope.paths import check_writable
    from gradscope.whatif import check_grid
    from gradscope.whatif import what_if as measured
    from gradscope.whatif_words import RULE, pivots, sentences

    settings = data_settings(
        data, data_dir=data_dir, image_key=image_key, caption_key=caption_key, image_root=image_root, encoding=encoding,
        caption=caption, allow_missing=allow_missing, on_bad_image=on_bad_image, decode=decode, on_too_long=on_too_long,
    )  # fmt: skip
    arms = _arms(objective, gamma, margin, beta, bias)
    scales = None if scale is None else _numbers("--scale", scale)
    check_grid(scales or _SCALES, _grid(arms, _widths(width, 2**62), precision, loss_scale, order, batches, seed))
    if output and output.suffix != ".csv":
        raise ValueError(f"--output needs a name that ends in .csv; got '{output}'.")
    check_writable(output)
    found = read_pairs(
        source, settings, data=data, split=split, batch_size=batch_size, workers=workers, trust_archive=trust_archive, device=device
    )
    grid = _grid(arms, _widths(width, len(found.pairs.image)), precision, loss_scale, order, batches, seed)
    for one in grid.widths:
        refuse_width(one, len(found.pairs.image), found.split)
    scales = scales or _with_own(found.scale)
    _say(source, found.pairs, grid, found.notes)
    with progress("what if") as advance:
        table = measured(found.pairs.image, found.pairs.text, scales, grid, advance=advance)
    for drawn in pivots(table):
        out.print(drawn)
    for line in (_batches(table), RULE, *sentences(table)):
        out.print(line, soft_wrap=True)
    if output:
        _write(table, output)


def _arms(objective: str, gamma: str | None, margin: str | None, beta: str | None, bias: str | None) -> tuple[Arm, ...]:
    """The objectives asked for, each with its own settings. A setting of none of them is refused."""
    from gradscope.whatif import make_arms

    names = _words(objective)
    given = {"--gamma": (gamma, "hn"), "--margin": (margin, "hn"), "--beta": (beta, "hardness_weighted"), "--bias": (bias, "siglip")}
    for flag, (value, owner) in given.items():
        if value is not None and owner not in names:
            raise ValueError(f"{flag} belongs to --objective {owner} and would be ignored; drop it, or add {owner}.")
    settings: dict[str, Any] = {
        "gammas": None if gamma is None else _numbers("--gamma", gamma),
        "margins": None if margin is None else _words(margin),
        "betas": None if beta is None else _numbers("--beta", beta),
        "bias": None if bias in (None, "best") else _one_number("--bias", str(bias)),
    }
    return make_arms(names, **{key: value for key, value in settings.items() if value is not None})


def _one_number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{flag} takes one number, or best; got '{text}'.") from None


def _grid(
    arms: tuple[Arm, ...], widths: tuple[int, ...], precision: str, loss_scale: str, order: str, batches: int | None, seed: int
) -> Grid:
    from gradscope.registry import unknown_name
    from gradscope.whatif import Grid

    if order not in _ORDERS:
        raise ValueError(unknown_name("value of --order", order, list(_ORDERS)))
    return Grid(
        arms=arms,
        widths=widths,
        precisions=tuple(_words(precision)),
        loss_scales=_numbers("--loss-scale", loss_scale),
        order=_ORDERS[order],
        batches=batches,
        seed=seed,
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} takes numbers by commas, as in 20,50; got '{text}'.") from None


def _widths(text: str | None, pairs: int) -> tuple[int, ...]:
    """Whole numbers by commas; "all" is the number of pairs. None leaves the choice to the grid."""
    try:
        return () if text is None else tuple(sorted(pairs if word == "all" else int(word) for word in text.replace(" ", "").split(",")))
    except ValueError:
        raise ValueError(f"--width takes whole numbers by commas, or all, as in 16,128,all; got '{text}'.") from None


def _with_own(own: float | None) -> tuple[float, ...]:
    """The default scales, and the encoder's own if it is known and none of them (to 1 %)."""
    if own is None or any(abs(own / scale - 1) < 0.01 for scale in _SCALES):
        return _SCALES
    return tuple(sorted((*_SCALES, round(own, 2))))


def _say(source: str, pairs: Pairs, grid: Grid, notes: tuple[str, ...]) -> None:
    """What is measured, what was left out, and what a large width will take."""
    from gradscope.cli.pair_source import announce_memory
    from gradscope.console import console

    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    if pairs.left_out:
        console.print(f"note: {pairs.left_out:,} pairs with embeddings that are not finite are left out", soft_wrap=True)
    n = len(pairs.image)
    console.print(f"{source}: {n:,} pairs, {_objectives([arm.label for arm in grid.arms])}", soft_wrap=True)
    announce_memory(max(grid.widths_for(n)))


def _objectives(labels: list[str]) -> str:
    """ "2 objectives in 3 settings of gamma, margin and beta: infonce, hn 0.25, hn 0.5"; the settings only where there are several."""
    kinds = len({label.split()[0] for label in labels})
    words = f"{kinds} objective{'s' * (kinds > 1)}"
    return words if kinds == len(labels) else f"{words} in {len(labels)} settings of gamma, margin and beta: {', '.join(labels)}"


def _batches(table: DataFrame) -> str:
    """How many batches stand behind each column."""
    per_width = table.groupby("width", sort=False)["batches"].first()
    counts = ", ".join(f"{width:,}: {count:,}" for width, count in per_width.items())
    return f"Batches per width (without replacement): {counts}."


def _write(table: DataFrame, output: Path) -> None:
    """The table as CSV, and both figures beside it."""
    from gradscope.console import out
    from gradscope.figures import figures
    from gradscope.figures.style import save

    output.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(output, index=False)
    written = [output]
    for name in ("saturation-map", "gradient-width"):
        drawing, drawn = figures[name](table)
        written += save(drawing, drawn, output.with_name(f"{output.stem}_{name.replace('-', '_')}"))
    for path in written:
        out.print(f"wrote {path}", soft_wrap=True)
