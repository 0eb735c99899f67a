"""``gradscope data pack``: any data set into tar files that WebDataset reads; and what ``data info`` says of such files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gradscope.cli.evaluate import AllowMissing, Caption, CaptionKey, DataDir, Encoding, ImageKey, ImageRoot

_WORKERS = 4


def pack(
    data: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A registered data set, or a file or folder.", show_default=False)],
    output: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    split: Annotated[list[str] | None, typer.Option(help="A split; repeat for several.", show_default="all")] = None,
    shard_size: Annotated[str | None, typer.Option(help="Bytes of a tar at most, such as 500MB.", show_default="1GB")] = None,
    per_shard: Annotated[int | None, typer.Option(help="Records of a tar, in place of a size.", min=1, show_default=False)] = None,
    size: Annotated[
        int | None,
        typer.Option(help="Resize pictures whose shorter side has more pixels, to JPEG.", min=16, show_default="bytes unchanged"),
    ] = None,
    allow_missing: AllowMissing = False,
    data_dir: DataDir = None,
    image_key: ImageKey = None,
    caption_key: CaptionKey = None,
    image_root: ImageRoot = None,
    encoding: Encoding = None,
    caption: Caption = None,
    workers: Annotated[int, typer.Option(help="Threads that read pictures.", min=1)] = _WORKERS,
    json_: Annotated[bool, typer.Option("--json", help="Print the manifest instead of a table.")] = False,
) -> None:
    """Write a data set as tar files (WebDataset shards) with an index and a manifest. Stopped, the same command goes on.

    Example: gradscope data pack my/folder --output shards --shard-size 500MB
    """
    import json

    from gradscope.console import console, progress
    from gradscope.data.pack import Packer, Sizes, bytes_of
    from gradscope.data.source import open_data

    if shard_size is not None and per_shard is not None:
        raise ValueError("--shard-size and --per-shard both say when a tar is full; give one of them")
    sizes = Sizes(bytes=bytes_of(shard_size or "1GB"), records=per_shard or 0, side=size or 0)
    settings = {
        "folder": data_dir, "image_key": image_key, "caption_key": caption_key, "image_root": image_root, "encoding": encoding,
        "caption": caption,
    }  # fmt: skip
    source = open_data(data, **{key: value for key, value in settings.items() if value is not None})
    with progress("packing") as advance:
        packer = Packer(
            sizes=sizes,
            workers=workers,
            allow_missing=allow_missing,
            say=lambda line: console.print(line, soft_wrap=True),
            advance=advance,
        )
        manifest = packer(source, split or source.splits(), output)
    if json_:
        typer.echo(json.dumps(manifest, ensure_ascii=False, indent=1))
        return
    _print_manifest(str(output), manifest)


def print_shards(name: str, *, as_json: bool) -> None:
    """What is known of tar files without fetching any: of a manifest all, else their number and, on this disk, their bytes.

    Raises:
        ValueError: no such shards.
    """
    import json

    from gradscope.data.shard_names import find_shards

    found = find_shards(name)
    splits = {split: _facts(shards, found.manifest) for split, shards in found.splits.items()}
    if as_json:
        facts = {"name": name, "made_by": found.manifest.get("made_by"), "source": found.manifest.get("source"), "splits": splits}
        typer.echo(json.dumps({**facts, "notes": list(found.notes)}, indent=1, ensure_ascii=False))
        return
    _print_splits(name, splits)
    _print_lines([*found.notes, *(f"{split}: {note}" for split, facts in splits.items() for note in facts["notes"])])
    if not found.manifest:
        _print_lines(["records are counted when the shards are read, by `gradscope data check` and by every run"])


def _facts(shards: Sequence[Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    sizes = [shard.size if shard.size is not None or shard.remote else Path(shard.where).stat().st_size for shard in shards]
    records = [shard.records for shard in shards]
    return {
        "shards": len(shards),
        "records": None if None in records else sum(records),
        "bytes": None if None in sizes else sum(sizes),
        "first": shards[0].where if shards else None,
        "last": shards[-1].where if shards else None,
        "notes": [note for facts in manifest.get("splits", {}).values() if _same(facts, shards) for note in facts["notes"]],
    }


def _same(facts: Mapping[str, Any], shards: Sequence[Any]) -> bool:
    return [shard["name"] for shard in facts["shards"]] == [shard.where.rpartition("/")[2] for shard in shards]


def _print_manifest(output: str, manifest: Mapping[str, Any]) -> None:
    splits = {
        split: {**facts, "shards": len(facts["shards"]), "first": facts["shards"][0]["name"], "last": facts["shards"][-1]["name"]}
        for split, facts in manifest["splits"].items()
    }
    _print_splits(f"{manifest['source']}, packed into {output}", splits)
    _print_lines([f"{split}: {note}" for split, facts in splits.items() for note in facts["notes"]])
    _print_lines([f"read it with --data {output}; WebDataset reads {output}/{_pattern(next(iter(splits.values())))}"])


def _pattern(facts: Mapping[str, Any]) -> str:
    """What WebDataset calls the shards of a split: it knows braces, and no star."""
    stem, _, last = facts["last"].removesuffix(".tar").rpartition("-")
    first = facts["first"].removesuffix(".tar").rpartition("-")[2]
    return facts["last"] if first == last else f"{stem}-{{{first}..{last}}}.tar"


def _print_splits(title: str, splits: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    from gradscope.console import out

    table = Table(title=title, title_justify="left")
    for column in ("split", "records", "shards", "bytes", "first", "last"):
        table.add_column(column, justify="right" if column in ("records", "shards", "bytes") else "left", overflow="fold")
    for split, facts in splits.items():
        records = "not counted" if facts["records"] is None else f"{facts['records']:,}"
        size = "unknown" if facts["bytes"] is None else decimal(facts["bytes"])
        ends = [_base_name(facts[end]) for end in ("first", "last")]
        table.add_row(split, records, f"{facts['shards']:,}", size, *ends)
    out.print(table)


def _base_name(where: str | None) -> str:
    return "" if where is None else where.rpartition("/")[2]


def _print_lines(lines: Sequence[str]) -> None:
    from gradscope.console import out

    for line in lines:
        out.print(line, soft_wrap=True)
