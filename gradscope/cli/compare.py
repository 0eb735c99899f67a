"""gradscope compare"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
    Resamples,
    SplitName,
    TrustArchive,
    Workers,
    data_settings,
    embed,
    refuse_settings_of_files,
)


def compare(
    a: Annotated[str, typer.Argument(help="An encoder as for eval, or stored embeddings (.safetensors).")],
    b: Annotated[str, typer.Argument(help="The other one.")],
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
    examples: Annotated[int, typer.Option(help="Flips shown of each kind; the JSON has all.", min=0)] = 3,
    output: Annotated[
        Path | None, typer.Option(help="Where the JSON goes.", show_default="compare-DATA-SPLIT-with-B.json beside A")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the JSON instead of tables.")] = False,
    resamples: Resamples = 2000,
    batch_size: BatchSize = 128,
    workers: Workers = 0,
    trust_archive: TrustArchive = False,
    device: Device = "auto",
) -> None:
    """Two models on the same gallery: paired differences with intervals, an exact test, and the queries they disagree on.

    Example: gradscope compare runs/demo/hn runs/demo/infonce --data scenes
    """
    import json

    from gradscope.compare import compare as compared
    from gradscope.console import console, out, progress
    from gradscope.embeddings_file import is_embeddings_file, load_embeddings
    from gradscope.encoders.load import resolve_device
    from gradscope.evaluation_file import comparison_content, comparison_path, comparison_table, flip_lines, write_json
    from gradscope.gallery import protocol_of, read_gallery
    from gradscope.paths import check_writable

    settings = data_settings(
        data, data_dir=data_dir, image_key=image_key, caption_key=caption_key, image_root=image_root, encoding=encoding,
        caption=caption, allow_missing=allow_missing, on_bad_image=on_bad_image, decode=decode, on_too_long=on_too_long,
    )  # fmt: skip
    check_writable(output)
    place = resolve_device(device)
    gallery = None
    if is_embeddings_file(a) and is_embeddings_file(b):
        refuse_settings_of_files(f"{a}' and '{b}", {"--data": data, "--split": split})
    else:
        with progress("checking pictures") as advance:
            gallery = read_gallery(settings, split, workers=workers, advance=advance)
    sides = []
    for name in (a, b):
        if gallery is None or is_embeddings_file(name):
            sides.append(load_embeddings(name))
        else:
            embedded = embed(name, gallery, settings, batch_size=batch_size, workers=workers, trust_archive=trust_archive, place=place)
            sides.append((embedded, protocol_of(name, gallery, embedded)))
    (first, protocol_a), (second, protocol_b) = sides
    comparison = compared(first, second, resamples=resamples)
    content = comparison_content(comparison, protocol_a, protocol_b)
    path = output or comparison_path(a, b, protocol_a.data, protocol_a.split)
    written = (
        f"JSON: {write_json(path, content)}" if path else f"no JSON is kept, as '{a}' is no folder or file; --output gives it a place"
    )
    if json_:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        console.print(written, soft_wrap=True)
        return
    title = f"{protocol_a.data} {protocol_a.split}: {comparison.images:,} images, {comparison.captions:,} captions"
    out.print(comparison_table(comparison, protocol_a.encoder, protocol_b.encoder, title))
    for side, protocol in (("a", protocol_a), ("b", protocol_b)):
        out.print(f"{side}: {'; '.join(protocol.sentences())}", soft_wrap=True)
        if lost := comparison.non_finite[side]:
            out.print(f"{side}: {lost:,} queries are not finite and count as misses", soft_wrap=True)
    for line in flip_lines(comparison, examples):
        out.print(line, soft_wrap=True)
    out.print(written, soft_wrap=True)
