"""`gradscope data check`: parse, call one function, print. Exit code 0: clean, 1: something would change a result, 2: bad input."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli.evaluate import Caption, CaptionKey, DataDir, Encoding, ImageKey, ImageRoot

if TYPE_CHECKING:
    from rich.table import Table

    from gradscope.data.check import Checked, Lengths, Tokenize
    from gradscope.data.check_sets import Piece, Report, SplitOverlap
    from gradscope.data.source import DataSource

_CONTEXTS = (77, 248)
_SHOWN = 10
_SHOWN_GROUPS = 3
_DEFAULT_WORKERS = min(8, os.cpu_count() or 1)


def check(
    data: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A registered data set, or a file or folder.", show_default=False)],
    split: Annotated[list[str] | None, typer.Option(help="A split; repeat for several.", show_default="all")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:SPLIT]", help="Data to look for the records in; repeat.", show_default=False),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Whose tokens are counted.", show_default="CLIP's byte pairs, no weights needed")
    ] = None,
    captions_only: Annotated[bool, typer.Option("--captions-only", help="Leave the pictures alone.")] = False,
    data_dir: DataDir = None,
    image_key: ImageKey = None,
    caption_key: CaptionKey = None,
    image_root: ImageRoot = None,
    encoding: Encoding = None,
    caption: Caption = None,
    output: Annotated[Path | None, typer.Option(help="Write everything found to this JSON file.", show_default=False)] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the JSON instead of tables.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Threads that read pictures.")] = _DEFAULT_WORKERS,
) -> None:
    """Look for missing, unreadable and repeated pictures and captions, cut captions, and overlap between splits and sets.

    Exit code 0: clean; 1: something was found that would change a result; 2: the data could not be read.

    Example: gradscope data check my/folder --against docci:train --output check.json
    """
    import json

    from gradscope.console import console, progress
    from gradscope.data.check_sets import check_data, read_piece
    from gradscope.data.source import open_data
    from gradscope.paths import check_writable

    check_writable(output)
    _refuse_idle_folder(data_dir, [data, *(against or [])])
    settings = {
        "image_key": image_key, "caption_key": caption_key, "image_root": image_root, "encoding": encoding, "caption": caption,
    }  # fmt: skip
    source = open_data(data, **_folder(data, data_dir), **{key: value for key, value in settings.items() if value is not None})
    pieces = [read_piece(source, name) for name in split or source.splits()]
    others = [piece for name in against or [] for piece in _against(name, data_dir)]
    tokenize, context, tokens_of = _tokenizer(encoder)
    report = check_data(
        data,
        pieces,
        against=others,
        tokenize=tokenize,
        contexts=sorted({*_CONTEXTS, context}),
        pictures=not captions_only,
        workers=workers,
        progress=progress,
    )
    text = json.dumps({"tokens_of": tokens_of, **report.as_dict()}, ensure_ascii=False, indent=1)
    if json_:
        typer.echo(text)
    else:
        _print(report, tokens_of)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
        console.print(f"wrote {output}", soft_wrap=True)
    if report.findings():
        raise typer.Exit(1)


def _print(report: Report, tokens_of: str) -> None:
    from gradscope.console import out

    for table in _tables(report, tokens_of):
        out.print(table)
        out.print()
    for line in _lines(report):
        out.print(line, soft_wrap=True)


def _folder(name: str, data_dir: str | None) -> dict[str, str]:
    """--data-dir is for data sets that have a folder; a path says where it is by itself."""
    import dataclasses

    from gradscope.data import data_sets

    takes_folder = name in data_sets and any(field.name == "folder" for field in dataclasses.fields(data_sets[name]))
    return {"folder": data_dir} if data_dir is not None and takes_folder else {}


def _refuse_idle_folder(data_dir: str | None, names: list[str]) -> None:
    if data_dir is not None and not any(_folder(part, data_dir) for name in names for part in (name, name.rpartition(":")[0])):
        raise ValueError(f"--data-dir {data_dir} is for public data sets (gradscope data list), and none was named; leave it out.")


def _against(name: str, data_dir: str | None) -> list[Piece]:
    """NAME[:SPLIT] -> its splits; a path may hold a colon of its own."""
    from gradscope.data import data_sets
    from gradscope.data.check_sets import read_piece
    from gradscope.data.source import open_data

    split = ""
    if name not in data_sets and not Path(name).expanduser().exists() and ":" in name:
        name, _, split = name.rpartition(":")
    source: DataSource = open_data(name, **_folder(name, data_dir))
    return [read_piece(source, part, label=f"{name}:{part}") for part in ([split] if split else source.splits())]


def _tokenizer(name: str | None) -> tuple[Tokenize, int, str]:
    """(texts -> token lengths, context length, what it is called)."""
    tokenizer: Any
    if name is None:
        from gradscope.encoders.tokenizer import make_tokenizer

        tokenizer, called = make_tokenizer({"text_cfg": {}}), "CLIP's byte pairs"
    else:
        from gradscope.encoders.load import load_encoder

        tokenizer, called = load_encoder(name), name

    def lengths(texts: Sequence[str]) -> list[int]:
        found: list[int] = tokenizer.tokenize(texts).lengths.tolist()
        return found

    return lengths, int(tokenizer.context), called


# ---- tables


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _tables(report: Report, tokens_of: str) -> list[Table]:
    found = report.splits
    heads = [checked.split for checked in found]
    lengths = [(c.split, c.lengths) for c in found]
    lengths += [(f"{c.split}, parts", c.segment_lengths) for c in found if c.segment_lengths is not None]
    tables = [
        _table(f"Records of {report.name}", heads, _records(found)),
        _table(f"Tokens ({tokens_of})", [label for label, _ in lengths], _tokens([one for _, one in lengths])),
    ]
    if any(checked.pictures is not None and checked.pictures.decoded for checked in found):
        tables.append(_table("Pictures", heads, _pictures(found)))
    if report.overlaps:
        tables.append(_table("Overlap", ["id", "file", "content", "caption", "any", "of"], map(_overlap, report.overlaps)))
    return tables


def _overlap(found: SplitOverlap) -> list[str]:
    """Files that were not looked at are a dash, not a zero."""
    unseen = ("file", "content") if found.uncompared == found.records else ()
    cells = ["-" if level in unseen else f"{found.counts[level]:,}" for level in ("id", "file", "content", "caption", "any")]
    return [f"{found.evaluated} in {found.trained}", *cells, f"{found.records:,}"]


def _records(found: Sequence[Checked]) -> list[list[str]]:
    kinds = {
        "id": "repeated ids",
        "path": "repeated pictures: path",
        "content": "repeated pictures: content",
        "caption": "repeated captions: word for word",
        "caption_normalised": "repeated captions: normalised",
    }
    rows = [
        ["records", *(f"{c.records:,}" for c in found)],
        ["captions", *(f"{c.captions:,}" for c in found)],
        ["captions per record", *(_range(c.captions_per_record) for c in found)],
        ["records with an empty caption", *(f"{len(c.empty):,}" for c in found)],
    ]
    if any(c.pictures is not None for c in found):
        rows.append(["pictures listed", *(f"{c.pictures.listed:,}" if c.pictures else "" for c in found)])
        rows.append(["missing", *(f"{len(c.pictures.missing):,}" if c.pictures else "" for c in found)])
        rows.append(["unreadable", *(f"{len(c.pictures.unreadable):,}" if c.pictures else "" for c in found)])
    surplus = [c.duplicates.surplus() for c in found]
    return rows + [[label, *(f"{s[kind]:,}" for s in surplus)] for kind, label in kinds.items()]


def _range(counts: Any) -> str:
    numbers = sorted(counts)
    return "" if not numbers else f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _tokens(found: Sequence[Lengths]) -> list[list[str]]:
    from gradscope.data.check import QUANTILES

    rows = [[level, *(f"{one.quantiles[level]:,}" for one in found)] for level in QUANTILES]
    for context in found[0].longer if found else ():
        counts = [(one.longer[context], max(1, one.captions)) for one in found]
        rows.append([f"cut at {context}", *(f"{longer:,} ({longer / captions:.1%})" for longer, captions in counts)])
    return rows


def _pictures(found: Sequence[Checked]) -> list[list[str]]:
    pictures = [c.pictures for c in found]
    assert all(p is not None for p in pictures)
    sides = ("shorter side", "longer side")
    rows = [["decoded", *(f"{p.decoded:,}" for p in pictures if p)]]
    rows += [[f"{side}: min, median, max", *(_three(p.sides.get(side)) for p in pictures if p)] for side in sides]
    modes = dict.fromkeys(mode for p in pictures if p for mode in p.modes)
    rows += [[f"mode {mode}", *(f"{p.modes.get(mode, 0):,}" for p in pictures if p)] for mode in modes]
    rows.append(["orientation to apply", *(f"{p.rotated:,}" for p in pictures if p)])
    rows.append(["animated (first frame is used)", *(f"{p.animated:,}" for p in pictures if p)])
    rows.append(["transparency (put on white)", *(f"{p.alpha:,}" for p in pictures if p)])
    return rows


def _three(sides: tuple[int, int, int] | None) -> str:
    return "" if sides is None else " ".join(f"{side:,}" for side in sides)


# ---- lines


def _lines(report: Report) -> list[str]:
    lines: list[str] = []
    for checked in report.splits:
        lines += [f"{checked.split}: {note}" for note in checked.notes]
        lines += _names(checked)
    if any(found.uncompared for found in report.overlaps):
        lines.append("overlap: records whose picture was not looked at were compared by id and caption only")
    for found in report.overlaps:
        if found.counts["name_only"]:
            lines.append(
                f"{found.evaluated}: {found.counts['name_only']:,} more share a file name with {found.trained}, and nothing else"
            )
    findings = report.findings()
    lines += [f"finding: {said}" for said in findings]
    if findings:
        return lines
    noted = any(checked.notes for checked in report.splits)
    return [*lines, "nothing found that would change a result" + " beyond what the notes above say was left out or changed" * noted]


def _names(checked: Checked) -> list[str]:
    """The first few of everything that has a name."""
    lines = []
    pictures = checked.pictures
    if pictures is not None and pictures.missing:
        if len(pictures.missing) == pictures.listed:
            lines.append(f"{checked.split}: no picture is on disk (looked for {pictures.missing[0]}, ...); only captions were checked")
        else:
            named = [f"{p} (there is {Path(pictures.other_case[p]).name})" if p in pictures.other_case else p for p in pictures.missing]
            lines.append(f"{checked.split}: missing {_first(named)}")
    if pictures is not None and pictures.unreadable:
        lines += [f"{checked.split}: {reason}" for reason in list(pictures.unreadable.values())[:_SHOWN]]
    if checked.empty:
        lines.append(f"{checked.split}: empty captions in {_first(checked.empty)}")
    duplicates = vars(checked.duplicates)
    for kind, what in {"path": "picture file", "content": "picture content", "caption_normalised": "caption"}.items():
        lines += [f"{checked.split}: one {what} in {_first(group)}" for group in duplicates[kind][:_SHOWN_GROUPS]]
    longest = [f"{identity} ({tokens:,})" for identity, tokens in checked.lengths.longest[:_SHOWN_GROUPS]]
    if longest:
        lines.append(f"{checked.split}: longest captions {', '.join(longest)}")
    return lines


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
