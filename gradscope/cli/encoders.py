"""``gradscope encoders``: which names there are, what one is, whether it is sound, and a copy that plain open_clip loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gradscope.encoders.layouts import Report

app = typer.Typer(
    name="encoders",
    help="Encoders: the names there are, what one is, whether its weights are sound, and copies of it.",
    epilog="Example: gradscope encoders info tiny",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Name = Annotated[
    str,
    typer.Argument(
        help="tiny, a run, a folder (open_clip or Hugging Face CLIPModel), a weights file, ARCH:FILE, longclip-L, an open_clip "
        "NAME:TAG, hf-hub:ORG/REPO; with @248 or @248frozen20 stretched.",
        show_default=False,
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust-archive", help="Open a TorchScript archive that is not one of OpenAI's known files (never called).")
]


@app.command("list")
def list_encoders(containing: Annotated[str, typer.Argument(help="Only names, kinds and tags that contain this.")] = "") -> None:
    """The names that can be loaded: embedded, in the data folders, and open_clip's with their tags.

    Example: gradscope encoders list openai
    """
    from rich.table import Table

    from gradscope.console import out
    from gradscope.encoders.inspection import catalogue

    entries = catalogue(containing)
    if not entries:
        raise ValueError(f"no encoder's name, kind or tag contains '{containing}'; gradscope encoders list shows all")
    table = Table(title="Encoders", title_justify="left")
    for column in ("name", "kind", "tags or place"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(entry.name, entry.kind, entry.note)
    out.print(table)
    out.print("A tag is given as NAME:TAG. Any folder or file of weights works too: gradscope encoders info PATH", soft_wrap=True)


@app.command("info")
def info(name: Name, trust_archive: Trust = False) -> None:
    """Loads an encoder and says what it is: architecture, activation, context, preprocessing, tokenizer, where it comes from.

    Example: gradscope encoders info ViT-B-16:openai
    """
    from rich.table import Table

    from gradscope.console import out
    from gradscope.encoders.inspection import describe
    from gradscope.encoders.load import open_encoder

    table = Table(title=f"Encoder {name}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for fact, value in describe(open_encoder(name, trust_archive=trust_archive)).items():
        table.add_row(fact, value)
    out.print(table)


@app.command("convert")
def convert(
    name: Name,
    output: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.", show_default=False)],
    trust_archive: Trust = False,
) -> None:
    """Writes an encoder as a folder that open_clip loads as local-dir:FOLDER, reads it back and compares embeddings.

    Example: gradscope encoders convert longclip-L models/longclip-L
    """
    import shutil

    from gradscope.checkpoint import save_encoder
    from gradscope.console import out
    from gradscope.encoders.inspection import RELOADED, difference_after_reload
    from gradscope.encoders.load import load_encoder

    if output.exists():
        raise ValueError(f"'{output}' exists already; give a folder that does not")
    encoder = load_encoder(name, trust_archive=trust_archive)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_encoder(partial, encoder)
        found = difference_after_reload(encoder, partial)
        if not found <= RELOADED:
            raise ValueError(f"embeddings of the copy differ by {found:.1e} (at most {RELOADED:g} is allowed); nothing was written")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    out.print(
        f"wrote {output}: embeddings of the copy, read by gradscope and by open_clip, differ by at most {found:.1e}", soft_wrap=True
    )


@app.command("check")
def check(name: Name, trust_archive: Trust = False) -> None:
    """Loads an encoder and looks for what is broken; exit code 2 if anything is.

    Example: gradscope encoders check runs/demo
    """
    from rich.table import Table

    from gradscope.console import out
    from gradscope.encoders.inspection import check_encoder
    from gradscope.encoders.layouts import DoesNotFit
    from gradscope.encoders.load import open_encoder

    try:
        loaded = open_encoder(name, trust_archive=trust_archive)
    except DoesNotFit as error:
        _print_keys(error.report)
        raise
    findings = check_encoder(loaded)
    table = Table(title=f"Check of {name}", title_justify="left")
    for column in ("what", "", "seen"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, "ok" if finding.good else "WRONG", finding.detail)
    out.print(table)
    if loaded.report:
        _print_keys(loaded.report)
    wrong = [finding.name for finding in findings if not finding.good]
    if wrong:
        raise ValueError(f"encoder '{name}' is not sound: {', '.join(wrong)}")


def _print_keys(report: Report) -> None:
    """Every key that did not simply match, none left out."""
    from gradscope.console import out
    from gradscope.encoders.inspection import keys_of

    for became, key in keys_of(report):
        out.print(f"{became}: {key}", soft_wrap=True)
