"""gradscope audit"""

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

    from gradscope.metrics.loss_path import PairLoss
    from gradscope.paired_rows import Pairs
    from gradscope.recipe import Data

#: --order -> what ``pair_loss`` calls it.
_ORDERS = {"last": "scale last", "first": "scale first", "two": "two products"}
#: CLIP's clamp, at which its published weights stand.
_SCALE = 100.0


def audit(
    source: Annotated[
        str | None,
        typer.Argument(help="Stored embeddings (.safetensors), or a run, a checkpoint, tiny, a folder, an open_clip NAME:TAG."),
    ] = None,
    data: DataName = None,
    split: SplitName = None,
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
    synthetic: Annotated[bool, typer.Option("--synthetic", help="No source: made-up pairs at several positive cosines.")] = False,
    cosines: Annotated[
        str | None, typer.Option(help="Positive cosines of --synthetic, by commas.", show_default="0.22,0.28,0.32,0.36,0.5")
    ] = None,
    width: Annotated[int, typer.Option(help="Candidates per softmax.", min=2)] = 64,
    batches: Annotated[int, typer.Option(help="Batches measured; the table shows medians.", min=1)] = 8,
    scale: Annotated[
        float | None, typer.Option(help="Multiplier of the cosines.", show_default="the encoder's own, otherwise 100")
    ] = None,
    objective: Annotated[str, typer.Option(help="infonce, hn or both, by commas.")] = "infonce",
    gamma: Annotated[float | None, typer.Option(help="Of hn.", min=0.0, show_default="0.5")] = None,
    loss_form: Annotated[str, typer.Option(help="plain (cross-entropy) or residual.")] = "plain",
    order: Annotated[
        str, typer.Option(help="last: s (V T'), as here; first: (s V) T', as OpenAI's CLIP; two: that and (s T) V', as open_clip.")
    ] = "last",
    precision: Annotated[
        str, typer.Option(help="Settings by commas: fp64, fp32, bf16, fp16, each with @LOSS_SCALE if there is one.")
    ] = "fp64,fp32,bf16,fp16,fp16@65536",
    seed: Annotated[int, typer.Option(help="Of the choice of batches, or of the made-up pairs.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="A .csv or .json with every batch; the figure goes beside it.", show_default="none: tables only"),
    ] = None,
    batch_size: BatchSize = 128,
    workers: Workers = 0,
    trust_archive: TrustArchive = False,
    device: Device = "auto",
) -> None:
    """What precision and loss scale take away between the embeddings and the loss: zeros, lost pulls, wrong directions.

    Example: gradscope audit runs/demo/hn --data scenes --width 64 --output audit.csv
    """
    from gradscope.console import console, out
    from gradscope.paths import check_writable
    from gradscope.precision_audit import medians, read_settings, sentences, table

    settings = data_settings(
        data, data_dir=data_dir, image_key=image_key, caption_key=caption_key, image_root=image_root, encoding=encoding,
        caption=caption, allow_missing=allow_missing, on_bad_image=on_bad_image, decode=decode, on_too_long=on_too_long,
    )  # fmt: skip
    arms, steps = _arms(objective, gamma, loss_form, order), read_settings(precision)
    if output and output.suffix not in (".csv", ".json"):
        raise ValueError(f"--output needs a name that ends in .csv or .json; got '{output}'.")
    check_writable(output)
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"--scale must be a number above 0; got {scale}.")
    if synthetic:
        _refuse_source(source, data, split)
        frame = _made_up(cosines, arms, steps, scale or _SCALE, width, batches, seed)
        title = f"made-up pairs, {batches} batches of {width}"
    elif cosines is not None:
        raise ValueError("--cosines belongs to --synthetic; leave it out, or add --synthetic.")
    else:
        pairs, own = _pairs(source, settings, data, split, width, batch_size, workers, trust_archive, device)
        frame = _drawn(pairs, arms, steps, scale or own, width, batches, seed)
        title = f"{source}, {frame['batch'].nunique()} batches of {width} from {len(pairs.image):,} pairs"
    if frame["denormals_flushed"].any():
        console.print("note: this process turns numbers under 1.2e-38 into 0; they are counted as exact zeros")
    found = medians(frame)
    out.print(table(found, f"{title}, scale {frame['scale'].iloc[0]:.4g}: medians over batches"))
    for line in sentences(found):
        out.print(line, soft_wrap=True)
    if output:
        _write(frame, output)


def _arms(objective: str, gamma: float | None, loss_form: str, order: str) -> dict[str, PairLoss]:
    """Label -> loss path. The label names what is not the default."""
    from gradscope.metrics.loss_path import pair_loss
    from gradscope.objectives.hn import HN
    from gradscope.objectives.infonce import InfoNCE
    from gradscope.registry import unknown_name

    names = [name.strip() for name in objective.split(",")]
    if gamma is not None and ("hn" not in names or not gamma < float("inf")):
        raise ValueError(f"--gamma is a finite number for --objective hn; got {gamma:g} with --objective {objective}.")
    gamma = 0.5 if gamma is None else gamma
    known = {"infonce": InfoNCE(), "hn": HN(gamma=gamma)}
    for name in names:
        if name not in known:
            raise ValueError(unknown_name("objective", name, list(known)))
    if order not in _ORDERS:
        raise ValueError(unknown_name("value of --order", order, list(_ORDERS)))
    marks = [*(["residual form"] if loss_form == "residual" else []), *([_ORDERS[order]] if order != "last" else [])]
    return {
        ", ".join([f"hn {gamma:g}" if name == "hn" else name, *marks]): pair_loss(known[name], loss_form, _ORDERS[order])
        for name in dict.fromkeys(names)
    }


def _refuse_source(source: str | None, data: str | None, split: str | None) -> None:
    given = [name for name, value in {f"'{source}'": source, "--data": data, "--split": split}.items() if value is not None]
    if given:
        raise ValueError(f"--synthetic makes its own pairs, so {', '.join(given)} would be ignored; leave it out.")


def _made_up(
    cosines: str | None, arms: dict[str, PairLoss], steps: Any, scale: float, width: int, batches: int, seed: int
) -> DataFrame:
    from gradscope.console import progress
    from gradscope.precision_audit import COSINES, positive_sweep

    try:
        values = COSINES if cosines is None else tuple(float(word) for word in cosines.split(","))
    except ValueError:
        raise ValueError(f"--cosines takes numbers by commas, as in 0.22,0.28; got '{cosines}'.") from None
    with progress("auditing") as advance:
        return positive_sweep(
            scale, objectives=arms, settings=steps, cosines=values, width=width, batches=batches, seed=seed, advance=advance
        )


def _drawn(pairs: Pairs, arms: dict[str, PairLoss], steps: Any, scale: float, width: int, batches: int, seed: int) -> DataFrame:
    """The audit of batches drawn from pairs that are given; what there is too little of is said."""
    from gradscope.cli.pair_source import announce_memory
    from gradscope.console import console, progress
    from gradscope.paired_rows import draw_batches
    from gradscope.precision_audit import audit

    if pairs.left_out:
        console.print(f"note: {pairs.left_out:,} pairs with embeddings that are not finite are left out", soft_wrap=True)
    chosen = draw_batches(len(pairs.image), width, batches, seed)
    announce_memory(width)
    if len(chosen) < batches:
        console.print(f"note: {len(pairs.image):,} pairs fill {len(chosen)} batches of {width}, not {batches}", soft_wrap=True)
    with progress("auditing") as advance:
        return audit(pairs.image, pairs.text, scale, objectives=arms, settings=steps, batches=chosen, advance=advance)


def _pairs(
    source: str | None,
    settings: Data,
    data: str | None,
    split: str | None,
    width: int,
    batch_size: int,
    workers: int,
    trust_archive: bool,
    device: str,
) -> tuple[Pairs, float]:
    """The pairs of a file of embeddings or of an encoder, and the scale to read them at."""
    from gradscope.cli.pair_source import read_pairs
    from gradscope.paired_rows import refuse_width

    if source is None:
        raise ValueError("nothing to audit: give stored embeddings, an encoder or a run, or --synthetic.")
    found = read_pairs(
        source, settings, data=data, split=split, batch_size=batch_size, workers=workers, trust_archive=trust_archive, device=device
    )
    refuse_width(width, len(found.pairs.image), found.split)
    return found.pairs, _SCALE if found.scale is None else found.scale


def _write(frame: DataFrame, output: Path) -> None:
    """Every batch as CSV or JSON, and the figure beside it."""
    import json

    from gradscope.console import out
    from gradscope.figures import figures
    from gradscope.figures.style import save

    if output.suffix == ".csv":
        frame.to_csv(output, index=False, na_rep="nan")
    else:
        rows = [{key: _spelled(value) for key, value in row.items()} for row in frame.to_dict("records")]
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    drawing, drawn = figures["precision-audit"](frame)
    for path in (output, *save(drawing, drawn, output.with_name(f"{output.stem}-figure"))):
        out.print(f"wrote {path}", soft_wrap=True)


def _spelled(value: Any) -> Any:
    """Non-finite numbers are data, and JSON has no word for them: "nan", "inf", "-inf"."""
    return str(value) if isinstance(value, float) and not -float("inf") < value < float("inf") else value
