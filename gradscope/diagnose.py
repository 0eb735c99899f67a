"""Runs the rules over a run or a log: findings ranked, rules that could not look named with the reason.

    diagnosis = diagnose(look(path))            # findings, gravest first; then by id
    content(diagnosis)                          # plain values, schema "gradscope.diagnosis" version 1

How it can mislead: silence of a rule says that its own pattern was not seen in what was logged, not that nothing is wrong.
This file never imports torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradscope.judgement import unit_of
from gradscope.loss_log import view_log
from gradscope.registry import unknown_name
from gradscope.rules import SEVERITIES, Finding, rules, told
from gradscope.run_state import run_state
from gradscope.run_view import GIVE_WIDTH, Evidence, Unmeasured, View, view_run
from gradscope.runlog import is_run

#: What other tools call their logs.
LOG_NAMES = ("trainer_state.json", "metrics.csv", "out.log")

SCHEMA = {"schema": "gradscope.diagnosis", "version": 1}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """``findings`` gravest first; ``silent`` ids of rules that looked and found nothing; ``unmeasured`` id -> what was missing."""

    view: View
    findings: tuple[Finding, ...]
    silent: tuple[str, ...]
    unmeasured: dict[str, str]
    muted: tuple[str, ...]


def look(path: str | Path, *, loss_column: str | None = None, step_column: str | None = None, width: int | None = None) -> View:
    """A run directory, or the log of another tool (or the folder that holds it).

    Raises ValueError if it is neither, or if a setting does not apply.
    """
    path = _log_within(Path(path))
    if path.is_dir():
        given = {"--loss-column": loss_column, "--step-column": step_column, "--width": width}
        if flags := [flag for flag, value in given.items() if value is not None]:
            raise ValueError(f"{' and '.join(flags)} is for logs of other tools, and '{path}' is a directory: a run says this itself")
        return view_run(path)
    return view_log(path, loss_column=loss_column, step_column=step_column, width=width)


def _log_within(path: Path) -> Path:
    """The one log of a known name in a folder that is no run (an output folder of open_clip or the Trainer); else ``path`` itself."""
    logs = [path / name for name in LOG_NAMES if (path / name).is_file()]
    return logs[0] if len(logs) == 1 and not is_run(path) else path


def diagnose(view: View, mute: Sequence[str] = ()) -> Diagnosis:
    """Every rule that is not muted, over one view. Raises ValueError for an unknown id in ``mute``."""
    muted = set(_known(mute))
    findings, silent, unmeasured = [], [], {}
    for name, rule in rules:
        if name in muted:
            continue
        if view.width == 1 and not getattr(rule, "any_width", False):
            unmeasured[name] = "the softmax has one candidate (GS030)"
            continue
        try:
            finding = rule()(view)
        except Unmeasured as reason:
            unmeasured[name] = str(reason)
            continue
        if finding is None:
            silent.append(name)
        else:
            findings.append(finding if view.own else replace(finding, action=rule.elsewhere))
    ranked = sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), f.id))
    return Diagnosis(view=view, findings=tuple(ranked), silent=tuple(silent), unmeasured=unmeasured, muted=tuple(sorted(muted)))


def _known(names: Sequence[str]) -> list[str]:
    """Ids as they are registered. Raises ValueError for an unknown one."""
    ids = [name.strip().upper() for name in names]
    for name in sorted(ids):
        if name not in rules:
            raise ValueError(unknown_name("rule", name, rules.names()))
    return ids


def content(diagnosis: Diagnosis) -> dict[str, Any]:
    """JSON values of one diagnosis; numbers that are not finite become words."""
    view = diagnosis.view
    return {
        "path": str(view.path),
        "kind": view.kind,
        "width": view.width,
        "trained": view.trained or None,
        "state": _finite(dataclasses.asdict(run_state(view))),
        "notes": list(view.notes),
        "findings": [_plain(finding) for finding in diagnosis.findings],
        "silent": list(diagnosis.silent),
        "unmeasured": diagnosis.unmeasured,
        "muted": list(diagnosis.muted),
    }


def _plain(finding: Finding) -> dict[str, Any]:
    row = dataclasses.asdict(finding)
    row["evidence"] = [_finite(e) for e in row["evidence"]]
    return row


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}


def heading(diagnosis: Diagnosis) -> str:
    """Two lines: what was looked at and its state; the numbers, and what came out."""
    view = diagnosis.view
    what = {"infonce": "InfoNCE", "hn": "HN"}.get(view.trained, "InfoNCE as read")
    width = "width not known" if view.width is None else f"width {view.width}"
    count = {s: sum(f.severity == s for f in diagnosis.findings) for s in SEVERITIES}
    found = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in count.items() if n) or "nothing found"
    state = run_state(view)
    return f"{view.path} ({view.kind}; {what}; {width}): {state.word}\n" + "; ".join(filter(None, (state.numbers, found)))


def lines(finding: Finding) -> list[tuple[str, str]]:
    """A finding as (label, text) pairs, in the order they are read."""
    evidence = [("seen" if i == 0 else "", _said(e)) for i, e in enumerate(finding.evidence)]
    rest = [("cause", finding.cause), ("do", finding.action), ("expect", finding.effect), ("verify", finding.verify)]
    return [*evidence, *rest]


def _said(evidence: Evidence) -> str:
    value = evidence.value
    unit = "" if evidence.unit == "1" else unit_of(value, evidence.unit)
    number = f"{value:.0%}" if evidence.unit == "share" else f"{value:.3g} {unit}".rstrip()
    return f"{evidence.what}: {number}   [{evidence.where}]"


def print_diagnosis(diagnosis: Diagnosis, *, unmeasured: bool = False) -> None:
    """To stdout: the findings, how the log was read, and how many rules had too little to look at (``unmeasured``: which, and why)."""
    from gradscope.console import out

    out.print(heading(diagnosis), soft_wrap=True, style="bold")
    for finding in diagnosis.findings:
        out.print()
        _print_part(finding, lines(finding))
    out.print()
    if diagnosis.view.notes:
        out.print(f"Read: {'; '.join(diagnosis.view.notes)}.", style="dim")
    out.print(_looked(diagnosis))
    if diagnosis.muted:
        out.print(f"Muted: {', '.join(diagnosis.muted)}.")
    if unmeasured and diagnosis.unmeasured:
        _print_unmeasured(diagnosis)


def _print_part(of: Finding | type[Any], rows: Sequence[tuple[str, str]]) -> None:
    """A finding, or a rule: its id, severity and title, and below them (label, text)."""
    from rich.table import Table
    from rich.text import Text

    from gradscope.console import out

    colours = {"error": "red", "warning": "yellow", "note": "cyan"}
    out.print(Text.assemble((f"{of.id} {of.severity}", colours[of.severity]), f"  {of.title}"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(f"  {label}", Text(text))
    out.print(grid)


def _looked(diagnosis: Diagnosis) -> str:
    """How many rules looked, and what keeps the others from it."""
    looked, rest = len(diagnosis.silent) + len(diagnosis.findings), list(diagnosis.unmeasured.values())
    words = f"{looked} rule{'s' * (looked != 1)} looked, {len(diagnosis.silent)} found nothing"
    if not rest:
        return f"{words}."
    if diagnosis.view.width == 1:
        return f"{words}; {len(rest)} say nothing of one candidate."
    widths = sum(reason.endswith(GIVE_WIDTH) for reason in rest)
    more = f"; --width N lets {widths} more look" if widths else ""
    return f"{words}; {len(rest)} had too little to look at (--unmeasured lists them{more})."


def _print_unmeasured(diagnosis: Diagnosis) -> None:
    from rich.table import Table

    from gradscope.console import out

    remedies: dict[str, list[str]] = {}
    for name, reason in diagnosis.unmeasured.items():
        remedies.setdefault(reason.split("; ")[-1], []).append(name)  # the setting that records it, where that is said
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold", max_width=42)
    grid.add_column(overflow="fold")
    for remedy, names in remedies.items():
        grid.add_row("", ", ".join(names), remedy, style="dim")
    out.print(grid)


def print_rules(names: Sequence[str] = ()) -> None:
    """Every rule: id, severity, title; of those named, all that they say of themselves. Raises ValueError for an unknown id."""
    from rich.table import Table

    from gradscope.console import out

    for number, name in enumerate(_known(names)):
        if number:
            out.print()
        _print_part(rules[name], told(rules[name]))
    if names:
        return
    table = Table()
    for column in ("id", "severity", "what it finds"):
        table.add_column(column)
    for name, rule in rules:
        table.add_row(name, rule.severity, rule.title)
    out.print(table)
    out.print(f"gradscope diagnose --rules {rules.names()[0]} prints evidence, cause, remedy and when it stays silent.")
