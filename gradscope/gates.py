"""Gates: thresholds that a run must keep, for CI. Each says its definition, its value and its limit.

The numbers are those of the verdict: over the window of ``gradscope.judgement`` (the last epoch; of a run of one, its last quarter), or
with ``over="all"`` of the whole run, of the trained objective unless another term is named. Of measured batches it takes ``LEAST``.
A gate passes where its value keeps the limit, the limit itself included; a value that was not measured, of which a part is not
finite, or that was read of something else than what is trained (GS026), can neither pass nor fail.

How it can mislead: a share belongs to a width; a limit that was set at width 16 says nothing at 128.
This file never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscope.diagnose import Diagnosis
from gradscope.judgement import LEAST, NOT_TRAINED, unit_of
from gradscope.rules import SEVERITIES
from gradscope.rules.gs026_probe_silent import another_direction
from gradscope.run_view import Series, Unmeasured, View, Window

SCHEMA = {"schema": "gradscope.check", "version": 1}
OVER = ("last", "all")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One measurement with a limit. ``largest``: the limit is the largest value allowed, else the smallest."""

    name: str  # the flag without its dashes
    definition: str
    unit: str
    largest: bool
    series: Callable[[View, str], Sequence[Series]]  # one, or one per direction
    summary: Callable[[Window], float]  # of one series; the mean of both directions is the gate's value
    log10: bool = False  # the summary is of log10 values, and so is the mean


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a gate came to. ``state`` is "passed", "failed" or "unevaluated"; ``value`` None if there is none."""

    name: str
    definition: str
    state: str
    value: float | None
    limit: float | str
    unit: str
    detail: str  # where the value was read, why there is none, or what was found


def _both(quantity: str, key: str) -> Callable[[View, str], Sequence[Series]]:
    return lambda view, term: view.directions(quantity, key, term)


def _one(quantity: str, key: str) -> Callable[[View, str], Sequence[Series]]:
    return lambda view, term: [view.reading(quantity, key, term)]


GATES = {
    gate.name: gate
    for gate in (
        Gate(
            name="max-saturated-rows",
            definition="share of anchors with a residual 1 - p under 1e-3, mean over measured batches and both directions",
            unit="share",
            largest=True,
            series=_both("saturation", "rows_below_1e-3"),
            summary=Window.mean,
        ),
        Gate(
            name="max-saturated-batches",
            definition="share of measured batches with a true loss under 1e-3",
            unit="share",
            largest=True,
            series=_one("saturation", "below_1e-3"),
            summary=Window.mean,
        ),
        Gate(
            name="min-residual",
            definition="residual 1 - p, mean over anchors, median over measured batches, both directions",
            unit="probability",
            largest=False,
            series=_both("residual", "log10_mean"),
            summary=Window.median,
            log10=True,
        ),
        Gate(
            name="min-effective-rows",
            definition="anchors that carry the gradient, (sum r)^2 / sum r^2, median over measured batches",
            unit="rows",
            largest=False,
            series=_both("saturation", "effective_rows"),
            summary=Window.median,
        ),
        Gate(
            name="max-exact-zero",
            definition="share of exactly zero entries among the gradient entries that the batch can reach, mean over measured batches",
            unit="share",
            largest=True,
            series=_one("zeros", "entries_reached.parameters"),
            summary=Window.mean,
        ),
        Gate(
            name="max-pull-lost",
            definition="share of anchors whose own cell has gradient 0 while a negative's has not, mean over measured batches",
            unit="share",
            largest=True,
            series=_both("zeros", "positive_zero"),
            summary=Window.mean,
        ),
        Gate(
            name="max-loss",
            definition="logged training loss, median over steps",
            unit="nat",
            largest=True,
            series=lambda view, term: [view.logged_loss()],
            summary=Window.median,
        ),
        Gate(
            name="max-skipped",
            definition="share of steps that mixed precision skipped",
            unit="share",
            largest=True,
            series=lambda view, term: [view.skipped()],
            summary=Window.mean,
        ),
        Gate(
            name="min-recall",
            definition="validation R@1 of the last evaluation, mean of both directions",
            unit="share",
            largest=False,
            series=lambda view, term: [_recall(view)],
            summary=lambda window: float(window.values[-1]),
        ),
    )
}


def evaluate(view: View, limits: Mapping[str, float], *, over: str = "last", term: str = "") -> list[Outcome]:
    """One outcome per limit, in the order of ``GATES``.

    Args:
        view: a run or a log.
        limits: gate name -> limit.
        over: "last" epoch, or "all".
        term: "infonce" or "hn"; "" for the trained one.

    Raises:
        ValueError: a limit that is not finite, or a share outside 0 ... 1.
    """
    for name, limit in limits.items():
        top = 1.0 if GATES[name].unit in ("share", "probability") else math.inf
        if not (math.isfinite(limit) and 0 <= limit <= top):
            allowed = "between 0 and 1" if top == 1.0 else "a finite number, 0 or more"
            raise ValueError(f"--{name} must be {allowed}; got {limit:g}")
    return [_outcome(gate, view, limits[name], over, term or view.term) for name, gate in GATES.items() if name in limits]


def _outcome(gate: Gate, view: View, limit: float, over: str, term: str) -> Outcome:
    value, state = None, "unevaluated"
    try:
        every = gate.series(view, term)
        there = [series for series in every if len(series.values)] or every  # a loss of one direction has only that
        whole = over == "all" or gate.name == "min-recall"
        if any(series.name.startswith("reading") for series in there) and another_direction(view):
            raise Unmeasured(NOT_TRAINED)
        windows = [_window(series, whole) for series in there]
        mean = sum(gate.summary(window) for window in windows) / len(windows)
        value, detail = 10**mean if gate.log10 else mean, "; ".join(window.where for window in windows)
        if left_out := sum(window.left_out for window in windows):
            value, detail = None, f"{left_out} values are not finite: {detail}"
    except Unmeasured as reason:
        detail = str(reason)
    if value is not None and math.isfinite(value):
        state = "passed" if (value <= limit if gate.largest else value >= limit) else "failed"
    return Outcome(name=gate.name, definition=gate.definition, state=state, value=value, limit=limit, unit=gate.unit, detail=detail)


def _window(series: Series, whole: bool) -> Window:
    least = LEAST if series.unit == "measured batches" else 1
    return series.whole(least) if whole else series.recent(least)


def findings_outcome(diagnosis: Diagnosis, severity: str) -> Outcome:
    """The gate --no-findings: passes if no finding is of ``severity`` or graver.

    Raises ValueError for an unknown severity.
    """
    if severity not in SEVERITIES:
        raise ValueError(f"--no-findings takes one of {', '.join(SEVERITIES)}; got '{severity}'")
    graver = SEVERITIES[: SEVERITIES.index(severity) + 1]
    counted = [finding for finding in diagnosis.findings if finding.severity in graver]
    looked = len(diagnosis.findings) + len(diagnosis.silent)
    words = "; ".join(f"{f.id} {f.title}" for f in counted) or f"{looked} rules looked, {len(diagnosis.unmeasured)} could not"
    return Outcome(
        name="no-findings",
        definition=f"no finding of gradscope diagnose of severity {' or '.join(graver)}",
        state=("failed" if counted else "passed") if looked else "unevaluated",
        value=float(len(counted)),
        limit=severity,
        unit="finding" if len(counted) == 1 else "findings",
        detail=words,
    )


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 all passed; 2 if any could not be evaluated (the answer is then not whole); else 1."""
    states = {outcome.state for outcome in outcomes}
    return 2 if "unevaluated" in states else 1 if "failed" in states else 0


def _recall(view: View) -> Series:
    """Validation R@1, mean of both directions, by step."""
    rows = view.evals[(view.evals["metric"] == "R@1") & (view.evals["split"] == "val")] if len(view.evals) else view.evals
    missing = "train with a validation split"
    if rows.empty:
        nothing = np.zeros(0)
        return Series(name="validation R@1", unit="evaluations", missing=missing, steps=nothing, epochs=nothing, values=nothing)
    means = rows.assign(value=rows["value"].astype(float)).groupby("step")["value"].mean()
    steps, values = means.index.to_numpy(), means.to_numpy()
    return Series(name="validation R@1", unit="evaluations", missing=missing, steps=steps, epochs=steps * math.nan, values=values)


# ---- what CI reads


def content(view: View, outcomes: Sequence[Outcome], over: str) -> dict[str, Any]:
    """JSON values, schema "gradscope.check" version 1."""
    rows = [{**vars(outcome)} for outcome in outcomes]
    for row in rows:
        if row["value"] is not None and not math.isfinite(row["value"]):
            row["value"] = str(row["value"])
    return {**SCHEMA, "path": str(view.path), "over": over, "exit_code": exit_code(outcomes), "gates": rows}


def junit(view: View, outcomes: Sequence[Outcome]) -> str:
    """JUnit XML: one test case per gate; a gate that could not be evaluated is an error, not a failure."""
    from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

    suite = TestSuite("gradscope check")
    for outcome in outcomes:
        case = TestCase(name=outcome.name, classname=str(view.path), time=0.0)
        if outcome.state != "passed":
            kind = Failure if outcome.state == "failed" else Error
            problem = kind(message=said(outcome), type_=outcome.state)
            problem.text = f"{outcome.definition}\n{outcome.detail}"
            case.result = [problem]
        suite.add_testcase(case)
    report = JUnitXml()
    report.add_testsuite(suite)
    report.update_statistics()
    return report.tostring().decode("utf-8")


def said(outcome: Outcome) -> str:
    """One line: gate, limit, value."""
    value = "not measured" if outcome.value is None else f"{outcome.value:.4g} {unit_of(outcome.value, outcome.unit)}"
    limit = outcome.limit if isinstance(outcome.limit, str) else f"{outcome.limit:.4g}"
    return f"--{outcome.name} {limit}: {value}"
