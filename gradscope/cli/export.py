"""gradscope export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradscope.console import out


def export(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(help="A file ending in .csv or .parquet; or tensorboard, wandb, mlflow (joined with commas).", show_default=False),
    ],
    table: Annotated[str | None, typer.Option(help="readings, steps or evals. (default: readings)")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="One row per step, with a column for everything measured there.")] = False,
    sink_all: Annotated[bool, typer.Option("--sink-all", help="To a sink: every scalar instead of a short list.")] = False,
) -> None:
    """Write the tables of runs into one file, or send finished runs to a dashboard.

    Example: gradscope export runs/hn runs/infonce --to readings.parquet --wide
    """
    from gradscope.sinks import sinks

    if any(name.strip() in sinks for name in to.split(",")):
        _refuse_together("a sink", {"--wide": wide, "--table": table is not None})
        _replay(runs, to, sink_all)
        return
    _refuse_together("a file", {"--sink-all": sink_all})
    _refuse_together("--wide", {"--table": wide and table is not None})
    _write(runs, Path(to), table or "readings", wide)


def _refuse_together(what: str, given: dict[str, bool]) -> None:
    for flag, there in given.items():
        if there:
            raise ValueError(f"{flag} has no effect with {what}; drop it")


def _replay(runs: list[Path], names: str, everything: bool) -> None:
    from gradscope.sinks.feed import replay

    for path in runs:
        for name, rows in replay(path, names, everything=everything, say=_say).items():
            _say(f"{path} to {name}: {rows} new rows")


def _say(line: str) -> None:
    out.print(line, soft_wrap=True)


def _write(runs: list[Path], path: Path, table: str, wide: bool) -> None:
    from gradscope.export import TABLES, check_target, long_table, wide_table, write
    from gradscope.registry import unknown_name

    if table not in TABLES:
        raise ValueError(unknown_name("table", table, list(TABLES)))
    check_target(path)
    made = wide_table(runs) if wide else long_table(runs, table)
    write(made, path)
    _say(f"wrote {path}: {len(made.rows)} rows, {len(made.columns)} columns")
    if made.left_out:
        _say(f"lists have no place in a wide table, and are in the long one: {', '.join(made.left_out)}")
