"""``gradscope data``: which data sets there are, what is known about one, and fetching it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope.cli.data_check import check
from gradscope.cli.data_pack import pack, print_shards

if TYPE_CHECKING:
    from gradscope.data.fetch import Fetched, Piece
    from gradscope.data.info import DataInfo

app = typer.Typer(
    name="data",
    help="Data sets: which there are, what they need on disk, and fetching them.",
    epilog="Example: gradscope data info docci",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with data, before $GRADSCOPE_DATA and the cache.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="The same as JSON on stdout.")]

app.command("check")(check)
app.command("pack")(pack)


@app.command("list")
def list_data(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """The registered data sets: published counts, licence, and whether they are on disk.

    Example: gradscope data list
    """
    from rich.table import Table

    from gradscope.console import out
    from gradscope.data import data_sets

    facts = [_facts(name, component.info, data_dir) for name, component in data_sets]
    if as_json:
        _print_json(facts)
        return
    table = Table(title="Data sets", title_justify="left")
    for column in ("name", "what", "published counts", "on disk", "licence"):
        table.add_column(column, overflow="fold")
    for fact in facts:
        counts = ", ".join(f"{split} {count:,}" for split, count in fact["counts"].items())
        table.add_row(fact["name"], fact["title"].split(": ")[0], counts, _where(fact), fact["licence"])
    out.print(table)
    out.print("Any folder or file of your own works too. More about one: gradscope data info NAME", soft_wrap=True)


@app.command("info")
def info_data(
    name: Annotated[str, typer.Argument(help="A name of `gradscope data list`, or tar files of samples.", show_default=False)],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """All that is known about one data set, and what is on disk and missing of it.

    Of tar files: their splits, shards, records and bytes; those of a server are not fetched.

    Example: gradscope data info scenes
    """
    import dataclasses

    from gradscope.data import data_sets
    from gradscope.data.fetch import fetch_folder, piece
    from gradscope.data.shard_names import names_shards

    if name not in data_sets and names_shards(name):
        print_shards(name, as_json=as_json)
        return
    if name not in data_sets and Path(name).exists():
        raise ValueError(f"'{name}' is no public data set but a path; `gradscope data check {name}` looks at what is in it")
    component = data_sets[name]
    info: DataInfo = component.info
    fact = _facts(name, info, data_dir)
    folder = fetch_folder(name, info, data_dir)
    fact["settings"] = {f.name: f.default for f in dataclasses.fields(component) if f.default is not dataclasses.MISSING}
    fact["downloads"] = [dataclasses.asdict(d) | {"state": piece(folder, d).state} for d in info.downloads]
    if as_json:
        _print_json(fact)
        return
    _print_info(fact)


@app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="A name of `gradscope data list`.", show_default=False)],
    data_dir: Annotated[
        Path | None, typer.Option(help="Where NAME goes; else $GRADSCOPE_DATA, else the cache.", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="Fetch the files of this name or pattern only, e.g. '*.json*'.")] = "*",
    tries: Annotated[int, typer.Option(help="Attempts in a row without a new byte before giving up.", min=1)] = 5,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fetched and how much; write nothing.")] = False,
) -> None:
    """Fetch what can be fetched of a data set. Stopped half-way, the same command goes on where it stopped.

    Example: gradscope data fetch docci --data-dir data
    """
    from gradscope.console import console, out
    from gradscope.data import data_sets
    from gradscope.data.fetch import Fetcher, fetch_folder
    from gradscope.data.info import on_disk
    from gradscope.data.transfer import Patience

    info: DataInfo = data_sets[name].info
    if not info.downloads:
        if info.needs():
            raise ValueError(
                f"no part of '{name}' can be fetched by a command; {info.how}. It belongs in {fetch_folder(name, info, data_dir)}."
            )
        out.print(f"{name} needs no download: {info.how}.", soft_wrap=True)
        return
    folder = fetch_folder(name, info, data_dir)
    found = on_disk(name, info, data_dir)
    if found.state == "yes" and found.folder != folder and data_dir in (None, found.folder):
        out.print(f"{name} is on disk already in {found.folder}; nothing to do (--data-dir names another place)", soft_wrap=True)
        return
    console.print(f"{name}: {info.title}. Licence: {info.licence} ({info.homepage}).", soft_wrap=True)
    patience = Patience(tries=tries)
    if dry_run:
        _print_plan(Fetcher(patience=patience).plan(info, folder, only=only), folder)
    else:
        with _bars() as advance:
            done = Fetcher(say=console.print, advance=advance, patience=patience)(info, folder, only=only)
        _print_fetched(done, name, folder)
    missing = on_disk(name, info, folder.parent).missing
    if missing and info.how:
        out.print(f"not all comes by this command: {info.how}.", soft_wrap=True)
    if missing and not dry_run:
        out.print(f"still missing in {folder}: {', '.join(missing)}", soft_wrap=True)


def _facts(name: str, info: DataInfo, data_dir: Path | None) -> dict[str, Any]:
    from gradscope.data.info import on_disk

    found = on_disk(name, info, data_dir)
    return {
        "name": name,
        "title": info.title,
        "licence": info.licence,
        "homepage": info.homepage,
        "citation": info.citation,
        "counts": dict(info.counts),
        "default_split": info.default_split,
        "layout": list(info.layout),
        "how": info.how,
        "on_disk": found.state if info.needs() else "not needed",
        "folder": None if found.folder is None else str(found.folder),
        "missing": list(found.missing),
    }


def _mark(line: str, folder: str | None) -> str:
    """Is what a line of the layout names there? A remark has no mark."""
    from gradscope.data.info import is_there

    paths, gap, _ = line.partition("  ")
    if not gap:
        return ""
    paths = paths.removeprefix("or ").removeprefix("also ")
    return "there    " if folder is not None and is_there(Path(folder), paths) else "missing  "


def _where(fact: dict[str, Any]) -> str:
    return {
        "yes": f"{fact['folder']}",
        "partly": f"partly, in {fact['folder']}; missing: {', '.join(fact['missing'])}",
        "no": "no",
        "not needed": "made on first use",
    }[fact["on_disk"]]


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _print_info(fact: dict[str, Any]) -> None:
    from gradscope.console import out

    lines = {
        "title": fact["title"],
        "home page": fact["homepage"],
        "licence": fact["licence"],
        "cite": fact["citation"],
        "splits": ", ".join(f"{split} {count:,}" for split, count in fact["counts"].items()) or "no published counts",
        "default": fact["default_split"],
        "settings": ", ".join(f"{key} = {value!r}" for key, value in fact["settings"].items()) or "none",
        "on disk": _where(fact),
    }
    for label, value in lines.items():
        out.print(f"{label:10} {value}", soft_wrap=True)
    out.print("needs")
    for line in fact["layout"]:
        out.print(f"  {_mark(line, fact['folder'])}{line}", soft_wrap=True)
    if fact["downloads"]:
        out.print(f"fetched by: gradscope data fetch {fact['name']}", soft_wrap=True)
    for download in fact["downloads"]:
        source = download["url"] or f"hub data set {download['hub']}, {download['hub_file']}"
        out.print(f"  {download['state']:9} {download['to']}, {_amount(download['size'])}, from {source}", soft_wrap=True)
    if fact["how"]:
        out.print(f"{'by hand':10} {fact['how']}", soft_wrap=True)


def _print_plan(pieces: list[Piece], folder: Path) -> None:
    from gradscope.console import out

    for found in pieces:
        source = found.download.url or f"{found.download.hub}/{found.download.hub_file} (hub)"
        what = {"missing": "to fetch", "unchecked": "there, to be compared", "whole": "whole", "by hand": "there, put by hand"}[
            found.state
        ]
        out.print(
            f"{found.download.to}: {what}, {_amount(found.size)}, from {source}{f' ({found.why})' if found.why else ''}", soft_wrap=True
        )
    wanted = [found for found in pieces if not found.settled]
    unknown = sum(found.size is None for found in wanted)
    total = _amount(sum(found.size or 0 for found in wanted))
    out.print(
        f"{len(wanted)} of {len(pieces)} files, {total}{f' and {unknown} of unknown size' if unknown else ''}, would go to {folder}; "
        "nothing was written",
        soft_wrap=True,
    )


def _print_fetched(done: list[Fetched], name: str, folder: Path) -> None:
    from gradscope.console import out

    for one in done:
        files = f", {one.files:,} files" if one.files != 1 else ""
        said = "fetched" if one.new else "already there"
        out.print(f"{one.target.name}: {said}, {_amount(one.size)}{files}, checked by {one.checked}", soft_wrap=True)
    if not any(one.new for one in done):
        out.print(f"{name} is complete in {folder}; nothing to do", soft_wrap=True)


def _amount(size: int | None) -> str:
    from rich.filesize import decimal

    return "size unknown" if size is None else decimal(size)


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """One bar per file, with bytes, speed and the time left; where there is no terminal, a line a minute."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from gradscope.console import console, lines

    if not console.is_interactive:
        started: dict[str, Callable[[int, int | None], None]] = {}
        yield lambda what, done, total: started.setdefault(what, lines(f"{what}, bytes"))(done, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as display:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = display.add_task(what, total=total, completed=done)
            display.update(tasks[what], completed=done, total=total)

        yield advance
