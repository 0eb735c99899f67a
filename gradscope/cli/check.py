"""gradscope check"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradscope.cli.diagnose import LossColumn, Mute, StepColumn, Width, muted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradscope.gates import Outcome
    from gradscope.run_view import View

STYLE = {"passed": "green", "failed": "red", "unevaluated": "yellow"}


def check(
    run: Annotated[Path, typer.Argument(help="A run directory, or the log of another tool.")],
    max_saturated_rows: Annotated[float | None, typer.Option(help="Largest share of anchors with a residual under 1e-3.")] = None,
    max_saturated_batches: Annotated[float | None, typer.Option(help="Largest share of batches with a loss under 1e-3.")] = None,
    min_residual: Annotated[float | None, typer.Option(help="Smallest mean residual 1 - p, median over batches.")] = None,
    min_effective_rows: Annotated[float | None, typer.Option(help="Fewest anchors that carry the gradient, median.")] = None,
    max_exact_zero: Annotated[float | None, typer.Option(help="Largest share of zeros among reached gradient entries.")] = None,
    max_pull_lost: Annotated[float | None, typer.Option(help="Largest share of anchors whose pull is rounded to 0.")] = None,
    max_loss: Annotated[float | None, typer.Option(help="Largest median of the logged training loss.")] = None,
    max_skipped: Annotated[float | None, typer.Option(help="Largest share of steps that mixed precision skipped.")] = None,
    min_recall: Annotated[float | None, typer.Option(help="Smallest validation R@1 of the last evaluation.")] = None,
    no_findings: Annotated[str | None, typer.Option(help="No finding of this severity or graver: error, warning or note.")] = None,
    over: Annotated[str, typer.Option(help="The last epoch (of one epoch, its last quarter), or all of the run.")] = "last",
    term: Annotated[str | None, typer.Option(help="Whose readings: infonce or hn. (default: the trained one)")] = None,
    mute: Mute = None,
    loss_column: LossColumn = None,
    step_column: StepColumn = None,
    width: Width = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the outcome as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write the outcome as JUnit XML.")] = None,
) -> None:
    """Gates for CI: exit code 0 if every one passed, 1 if one failed, 2 if one could not be evaluated or the input is bad.

    Example: gradscope check runs/demo/hn --max-saturated-rows 0.5 --min-residual 1e-4 --no-findings error --junit gates.xml
    """
    given = dict(locals())  # the parameters above

    import json

    from gradscope import gates
    from gradscope.diagnose import diagnose, look
    from gradscope.paths import check_writable
    from gradscope.registry import unknown_name
    from gradscope.verdict import TERMS

    limits = {name: given[name.replace("-", "_")] for name in gates.GATES if given[name.replace("-", "_")] is not None}
    if not limits and no_findings is None:
        raise ValueError(f"nothing to check: give at least one of --{', --'.join(gates.GATES)} or --no-findings")
    if over not in gates.OVER:
        raise ValueError(unknown_name("value of --over", over, list(gates.OVER)))
    if term is not None and term not in TERMS:
        raise ValueError(unknown_name("value of --term", term, list(TERMS)))
    if mute and no_findings is None:
        raise ValueError("--mute has no effect without --no-findings")
    check_writable(json_, junit)
    view = look(run, loss_column=loss_column, step_column=step_column, width=width)
    outcomes = gates.evaluate(view, limits, over=over, term=term or "")
    if no_findings is not None:
        outcomes.append(gates.findings_outcome(diagnose(view, muted(mute)), no_findings))
    _print(view, outcomes)
    if json_:
        json_.write_text(json.dumps(gates.content(view, outcomes, over), indent=2) + "\n", encoding="utf-8")
    if junit:
        junit.write_text(gates.junit(view, outcomes), encoding="utf-8")
    raise typer.Exit(gates.exit_code(outcomes))


def _print(view: View, outcomes: Sequence[Outcome]) -> None:
    from rich.table import Table
    from rich.text import Text

    from gradscope.console import out
    from gradscope.gates import said

    out.print(f"{view.path} ({view.kind})", soft_wrap=True, style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for outcome in outcomes:
        grid.add_row(Text(outcome.state, style=STYLE[outcome.state]), Text(said(outcome)))
        grid.add_row("", Text(f"{outcome.definition}\n{outcome.detail}", style="dim"))
    out.print(grid)
