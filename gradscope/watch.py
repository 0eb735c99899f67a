"""A live view of a run: curves of loss and residual in one line each, saturation, zeros, scale, cost, findings, time left.

The same panel follows a run of another process (``gradscope watch``) and stands in for the progress bar of ``gradscope train``.
Shares of the table are over the last ``WINDOW`` measured batches; the state below it is that of ``gradscope.judgement``.
Curves are drawn between their own smallest and largest value, which the numbers beside them give; × marks values that are not finite.
How it can mislead: every curve has a scale of its own, so two lines compare in shape only; a window of few batches moves in jumps.
Findings are those of ``gradscope diagnose``, and lag behind by up to a hundred times what it costs to look for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gradscope.following import Following
from gradscope.judgement import NOT_TRAINED, ONE_CANDIDATE, saturation_state, two_digits
from gradscope.sparkline import sparkline
from gradscope.types import DIRECTIONS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

WINDOW = 20  # measured batches
TALL = 36  # lines
NARROW = 80  # columns that a table of both objectives takes
NAMES = {"infonce": "InfoNCE", "hn": "HN"}
SILENT_AFTER = 60.0  # seconds without a row, or twenty steps if those take longer
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


class Panel:
    """What is drawn of a run. Keeps the findings of its last look, since looking costs more than drawing."""

    def __init__(self, following: Following) -> None:
        self.following = following
        self._findings: list[tuple[str, str, str]] = []
        self._note = "none yet"
        self._next_look = 0.0
        self.looking = 0.0  # seconds that the last drawing spent on findings

    def draw(self, width: int, height: int) -> RenderableType:
        """The panel for a console of ``width`` columns; in less than ``TALL`` lines, only what matters most."""
        from rich import box
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.text import Text

        self._look()
        run, short = self.following, height < TALL
        parts: list[RenderableType] = [Text(line, style="bold") for line in heading(run)]
        parts.append(curves(run, width - 4, short))
        gap = [] if short else [Text("")]
        if run.terms():
            parts += [*gap, saturation(run, short, narrow=width < NARROW), *gap]
        parts += [Text(line) for line in facts(run)]
        parts += [*gap, self._found(2 if short else 5)]
        return Frame(Group(*parts), box=box.ROUNDED, width=width, title=str(run.path), title_align="left")

    def _look(self) -> None:
        """Runs the rules again, unless that would take more than a hundredth of the time."""
        now, self.looking = time.monotonic(), 0.0
        if now < self._next_look or not self.following.steps():
            return
        from gradscope.diagnose import diagnose
        from gradscope.run_view import view_run

        try:
            found = diagnose(view_run(self.following.path)).findings
            self._findings, self._note = [(finding.id, finding.severity, finding.title) for finding in found], "none"
        except Exception as error:  # the view goes on, and says so
            self._findings, self._note = [], f"could not be looked for ({type(error).__name__}: {error})"
        self.looking = time.monotonic() - now
        self._next_look = now + max(10.0, 100 * self.looking)

    def _found(self, most: int) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        if not self._findings:
            return Text(f"findings: {self._note}", style="dim")
        table = Table.grid(padding=(0, 2))
        for rule, severity, title in self._findings[:most]:
            table.add_row(Text(rule, style=_COLOURS[severity]), Text(severity, style=_COLOURS[severity]), Text(title))
        if len(self._findings) > most:
            table.add_row("", "", Text(f"and {len(self._findings) - most} more: gradscope diagnose {self.following.path}", style="dim"))
        return table


def heading(run: Following) -> list[str]:
    """Where the run is, and how it goes."""
    steps = run.steps()
    if not steps:
        return [f"no step yet; {state(run)}"]
    row, total = steps[-1], run.total_steps()
    attempt = run.attempts[-1]["attempt"]
    words = [f"step {row['step']}" + (f" of {total}" if total else "")]
    words += [f"epoch {row['epoch']}"] if run.has_epochs() else []
    words += [f"attempt {attempt}"] if attempt > 1 else []
    words += [f"width {run.width()}"] if run.width() else []
    return [" · ".join(words), state(run)]


def state(run: Following) -> str:
    """Done, running (with the time left) or silent."""
    if run.done:
        return "done"
    seconds = _middle(run.column("seconds")[-WINDOW:])
    usual = seconds if math.isfinite(seconds) else 0.0
    words = f"last row {_clock(run.age)} ago"
    if run.age > max(SILENT_AFTER, 20 * usual):
        return f"{words}: has it stopped?"
    total, steps = run.total_steps(), run.steps()
    return f"{words}, {_clock((total - steps[-1]['step']) * usual)} left" if total and steps and usual else words


def curves(run: Following, width: int, short: bool = False) -> Table:
    """Sparklines: label, curve, first and last value. ``short``: those of the trained objective."""
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    terms = run.terms()[:1] if short else run.terms()
    for label, values in _series(run, terms):
        if values:
            first, last = (f"{round(value, 1) + 0.0:.1f}" for value in (values[0], values[-1]))  # + 0.0 makes -0.0 plain
            table.add_row(label, sparkline(values, max(10, width - 42), least=1e-3), f"{first} → {last}")
    return table


def _series(run: Following, terms: Sequence[str]) -> list[tuple[str, list[float]]]:
    found = [("log10 loss as trained", [math.log10(v) if v > 0 else -math.inf if v == 0 else v for v in run.column("loss")])]
    for term in terms:
        name = NAMES.get(term, term)
        found.append((f"{name} log10 loss", run.reading("loss", "log10_true", term)))
        residuals = [run.reading("residual", f"log10_mean.{d}", term) for d in DIRECTIONS]
        found.append((f"{name} log10 residual", _mean_of(residuals)))
    for term in terms:
        found.append((f"{NAMES.get(term, term)} log10 |g|", run.reading("gradient", "log10_norm", term)))
    found.append(("log10 |g| of the step", run.reading("accumulation", "log10_norm", "total")))
    for direction, values in run.evals("R@1").items():
        found.append((f"R@1 val {direction}, %", [100 * value for value in values]))
    return found


def saturation(run: Following, short: bool = False, narrow: bool = False) -> Table:
    """Rows, batches, effective rows and zeros in the last window, by objective and direction. ``short``: the first rows;
    ``narrow``: of the trained objective."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column(_last(min(WINDOW, _measured(run))), no_wrap=True)
    places = [(term, direction) for term in run.terms()[: 1 if narrow else None] for direction in DIRECTIONS]
    for term, direction in places:
        table.add_column(f"{NAMES.get(term, term)} {direction}", justify="right", no_wrap=True)
    for label, quantity, key, form in _ROWS[:4] if short else _ROWS:
        cells = [_windowed(run, quantity, key, term, direction) for term, direction in places]
        if any(math.isfinite(cell) for cell in cells):
            table.add_row(label, *(form.format(cell) if math.isfinite(cell) else "-" for cell in cells))
    return table


#: Label, quantity, key (with a place for the direction, or none) and format of the table's rows.
_ROWS = (
    ("rows under 1e-3", "saturation", "rows_below_1e-3.{}", "{:.0%}"),
    ("batches under 1e-3", "saturation", "below_1e-3", "{:.0%}"),
    ("rows that carry it", "saturation", "effective_rows.{}", "{:.1f}"),
    ("pull rounded to 0", "zeros", "positive_zero.{}", "{:.0%}"),
    ("loss 0, gradient not", "zeros", "loss_zero_gradient_not", "{:.0%}"),
    ("logit entries 0", "zeros", "entries.logits", "{:.1%}"),
    ("entries 0, reached", "zeros", "entries_reached.parameters", "{:.2%}"),
    ("entries 0, all", "zeros", "entries.parameters", "{:.1%}"),
)


def facts(run: Following) -> list[str]:
    """Saturated or not; scale and optimizer; what the probe costs."""
    return [line for line in (_saturated(run), _optimizer(run), _cost(run)) if line]


def _saturated(run: Following) -> str:
    if not run.terms():
        return ""
    term = run.terms()[0]
    below = run.judged("saturation", "below_1e-3", term)
    anchors = [value for d in DIRECTIONS for value in run.judged("saturation", f"rows_below_1e-3.{d}", term)]
    if not below:
        return ""
    if run.width() == 1:
        return ONE_CANDIDATE
    if run.turned(term, _mean(below)):
        return f"{NAMES.get(term, term)}: {NOT_TRAINED}"
    word = saturation_state(_mean(below), _mean(anchors), judged=len(below))
    shares = f"{_mean(below):.0%} of batches" + (f" and {_mean(anchors):.0%} of anchors" if anchors else "")
    return f"{NAMES.get(term, term)}: {word}; {shares} under 1e-3"


def _optimizer(run: Following) -> str:
    row = run.steps()[-1] if run.steps() else {}
    scale = (run.column("scale") or run.reading("scale", "value") or [math.nan])[-1]
    limit = " (at its limit)" if run.reading("scale", "at_limit")[-1:] == [1.0] else ""
    words = [f"scale {scale:.1f}{limit}"] if math.isfinite(scale) else []
    words += [f"rate {row['lr']:.2g}"] if row.get("lr") is not None else []
    words += [f"|g| {row['grad_norm']:.2g}"] if row.get("grad_norm") is not None else []
    skipped = sum(run.column("skipped"))
    if row.get("loss_scale") not in (None, 1.0) or skipped:
        words.append(f"loss scale {row.get('loss_scale')}, {skipped:.0f} step{'s' * (skipped != 1)} skipped")
    return " · ".join(words)


def _cost(run: Following) -> str:
    cost = run.column("probe_seconds")
    plain = sum(run.column("seconds")) - sum(cost)
    if not sum(cost) or plain <= 0:
        return ""
    measured = f"{_measured(run)} batch{'es' * (_measured(run) != 1)} measured"
    return f"probe: {two_digits(sum(cost) / plain)} on top of the plain step, {measured}"


def _windowed(run: Following, quantity: str, key: str, term: str, direction: str) -> float:
    return _mean(run.reading(quantity, key.format(direction), term)[-WINDOW:])


def _last(count: int) -> str:
    return f"last {count} measured batches" if count != 1 else "the measured batch"


def _measured(run: Following) -> int:
    return len(run.reading("loss", "log10_true", run.terms()[0])) if run.terms() else 0


def _mean_of(directions: Sequence[list[float]]) -> list[float]:
    there = [values for values in directions if values]
    return [sum(pair) / len(pair) for pair in zip(*there, strict=True)] if there else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def watch(path: Path, console: Console, *, every: float = 1.0, once: bool = False) -> None:
    """Draws the run until it is done; once only where ``once`` is set or the console is no terminal.

    Raises:
        ValueError: ``path`` is not a run, or one of its lines is broken.
    """
    from rich.live import Live

    following = Following(path)
    panel = Panel(following)
    following.poll()
    if once or not console.is_terminal:
        console.print(panel.draw(console.width, TALL))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            done = following.done  # asked first: rows written before DONE are then read below
            following.poll()
            live.update(panel.draw(*console.size), refresh=True)
            if done:
                return
            time.sleep(every)
