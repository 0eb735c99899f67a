"""gradscope probe"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def probe(
    checkpoints: Annotated[list[str], typer.Argument(help="Runs, checkpoints, tiny, folders or open_clip NAME:TAG.")],
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
    width: Annotated[int, typer.Option(help="Candidates per softmax.", min=2)] = 16,
    batches: Annotated[int, typer.Option(help="Measured batches per checkpoint.", min=1)] = 20,
    gamma: Annotated[float, typer.Option(help="At which HN is read.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the choice of batches; the same for every checkpoint.")] = 42,
    trust_archive: TrustArchive = False,
    device: Device = "auto",
    output: Annotated[Path, typer.Option(help="One run directory per checkpoint goes here.")] = Path("runs/probe"),
) -> None:
    """Take the full set of readings at given checkpoints, without training: the same batches for each, both objectives.

    Example: gradscope probe tiny runs/demo/hn --data scenes --width 128
    """
    from gradscope.console import out
    from gradscope.probe_checkpoints import probe_checkpoints
    from gradscope.verdict import summarise, summary_table

    settings = data_settings(
        data, data_dir=data_dir, image_key=image_key, caption_key=caption_key, image_root=image_root, encoding=encoding,
        caption=caption, allow_missing=allow_missing, on_bad_image=on_bad_image, decode=decode, on_too_long=on_too_long,
    )  # fmt: skip
    paths = probe_checkpoints(
        checkpoints, data=settings, split=split, width=width, batches=batches, gamma=gamma, seed=seed, device=device, output=output,
        trust_archive=trust_archive,
    )  # fmt: skip
    out.print(summary_table([summarise(path) for path in paths]))
    for name, path in zip(checkpoints, paths, strict=True):
        out.print(f"{name}: all readings in {path}", soft_wrap=True)
