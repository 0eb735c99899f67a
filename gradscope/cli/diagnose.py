"""gradscope diagnose"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

LossColumn = Annotated[str | None, typer.Option(help="Of another tool's log: the column of the training loss. (default: guessed)")]
StepColumn = Annotated[str | None, typer.Option(help="Of another tool's log: the column of the step. (default: guessed)")]
Width = Annotated[int | None, typer.Option(help="Of another tool's log: candidates per softmax (batch size, times ranks).", min=2)]
Mute = Annotated[list[str] | None, typer.Option(help="Rules to leave out, e.g. GS004; repeatable, or joined with commas.")]


def muted(mute: list[str] | None) -> list[str]:
    """GS001,GS002 and GS004 -> three ids."""
    return [name for given in mute or [] for name in given.split(",") if name.strip()]


def diagnose(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or logs: .csv, .jsonl, trainer_state.json, out.log.")
    ] = None,
    mute: Mute = None,
    loss_column: LossColumn = None,
    step_column: StepColumn = None,
    width: Width = None,
    unmeasured: Annotated[bool, typer.Option("--unmeasured", help="List the rules that had too little to look at, and why.")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write everything as JSON.")] = None,
    list_rules: Annotated[
        bool, typer.Option("--rules", help="List the rules and stop; with ids (--rules GS025), print all that they say of themselves.")
    ] = False,
) -> None:
    """What is wrong with a run, and what to do: each finding with its evidence, cause, remedy and check. Exit code 0 whatever is found.

    Reads runs of gradscope train and of gradscope.Probe, and loss logs that other tools wrote.

    Example: gradscope diagnose runs/demo/infonce runs/demo/hn
    """
    import json

    from gradscope.diagnose import SCHEMA, content, look, print_diagnosis, print_rules
    from gradscope.diagnose import diagnose as run
    from gradscope.paths import check_writable

    if list_rules:
        print_rules(muted([str(name) for name in runs or []]))
        return
    if not runs:
        raise ValueError("give a run directory or a log to diagnose, or --rules to list the rules")
    if json_:
        check_writable(json_)
    views = [look(path, loss_column=loss_column, step_column=step_column, width=width) for path in runs]
    diagnoses = [run(view, muted(mute)) for view in views]
    for index, diagnosis in enumerate(diagnoses):
        if index:
            typer.echo()
        print_diagnosis(diagnosis, unmeasured=unmeasured)
    if json_:
        json_.write_text(json.dumps({**SCHEMA, "runs": [content(d) for d in diagnoses]}, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"JSON: {json_}")
