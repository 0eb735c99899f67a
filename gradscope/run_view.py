"""What a rule or a gate may look at: the tables of a run, or of another tool's log, as series with a stated origin.

    view.reading("zeros", "naive_norm_zero", "infonce").recent(6).mean()

A series gives its finite values in a window: ``whole`` (everything) or ``recent`` (the last epoch; of a run of one epoch, or without
epochs, the last quarter; and where that holds fewer than were asked for, the last so many). Too few values, or none, raise
``Unmeasured``, which names what is missing and what would record it: whoever asks is silent, and says so.

A missing cell (null, an empty one of a table) is no value: the series has no such step. A nan that was written is one.
How it can mislead: non-finite values are left out of a window, so a run of nan looks short; rule GS025 counts them.
This file never imports torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradscope.judgement import unit_of, window
from gradscope.recording import measured_by, recorded_by
from gradscope.run_tables import was_streamed, with_gaps
from gradscope.runlog import Run
from gradscope.types import DIRECTIONS
from gradscope.verdict import TERMS

if TYPE_CHECKING:
    import pandas as pd


GIVE_WIDTH = "give --width"


class Unmeasured(Exception):
    """What was asked for is not in the log, or not often enough. The message says what, and after a semicolon what would record it."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One number behind a finding: what it is, its unit, and where it was read."""

    what: str
    value: float
    unit: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Window:
    """Finite values [n] in the order of their steps, and words for where they were read."""

    values: np.ndarray
    where: str
    left_out: int = 0  # values of the window that are not finite

    def mean(self) -> float:
        return float(self.values.mean())

    def median(self) -> float:
        return float(np.median(self.values))

    def share(self, true: np.ndarray) -> float:
        """Share of the values for which ``true`` [n] holds."""
        return float(np.mean(true))

    def evidence(self, what: str, value: float, unit: str = "share") -> Evidence:
        return Evidence(what=what, value=value, unit=unit, where=self.where)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One reading or column over the run. ``unit`` names what one value belongs to, e.g. "measured batches"."""

    name: str
    unit: str
    missing: str  # what would record it, if anything is to be said of that
    steps: np.ndarray  # int [n], rising
    epochs: np.ndarray  # float [n], nan where unknown
    values: np.ndarray  # float64 [n]
    denser: str = ""  # what would record more of it

    def whole(self, least: int = 1) -> Window:
        """Every finite value. Raises Unmeasured if there are fewer than ``least``."""
        return self._window(np.ones(len(self.values), dtype=bool), least, "whole run")

    def recent(self, least: int = 1) -> Window:
        """The finite values of the last epoch (or quarter), or the last ``least``. Raises Unmeasured if there are fewer in all."""
        chosen, words = window(self.epochs, self.values, least)
        return self._window(chosen, least, words)

    def _window(self, chosen: np.ndarray, least: int, words: str) -> Window:
        values = self.values[chosen & np.isfinite(self.values)]
        if not len(self.values):
            raise Unmeasured(f"{self.name} is not in the log" + (f"; {self.missing}" if self.missing else ""))
        if len(values) < max(least, 1):
            words = f"{self.name} has {len(values)} {unit_of(len(values), self.unit)}, at least {max(least, 1)} are needed"
            raise Unmeasured(words + (f"; {self.denser}" if self.denser else ""))
        where = f"{self.name}, {words} ({len(values)} {unit_of(len(values), self.unit)})"
        return Window(values=values, where=where, left_out=int(chosen.sum()) - len(values))


@dataclass(frozen=True, kw_only=True)
class View:
    """A run, or a log of another tool, as rules see it.

    ``kind`` is "run" or the kind of log; ``trained`` "infonce", "hn" or "" (not known, or nothing is trained); ``width`` None where it
    is not known. ``steps`` holds None where a step has no number, and nan where that was written. ``notes`` are facts on how the log
    was read, to be shown; ``decimals`` column -> digits that the log rounds it to.
    """

    path: Path
    kind: str
    trained: str
    width: int | None
    steps: pd.DataFrame
    readings: pd.DataFrame
    evals: pd.DataFrame
    recipe: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    decimals: Mapping[str, int] = field(default_factory=dict)

    def resolution(self, column: str) -> float:
        """10^-decimals of a column that the log rounds; 0 where it does not."""
        return 10.0 ** -self.decimals[column] if column in self.decimals else 0.0

    def rounding(self, column: str) -> str:
        """Words for that, of a column that is rounded."""
        digits = self.decimals[column]
        name = {"grad_norm": "gradient norm"}.get(column, column)
        under = f"{5 * 10.0 ** -(digits + 1):.0e}"
        return f"the log rounds the {name} to {digits} decimal{'s' * (digits != 1)}, so that its 0 is anything under {under}"

    def failure(self, quantity: str) -> str:
        """What the probe wrote of the first failure of a quantity; "" where nothing is found."""
        said = re.search(rf"'{re.escape(quantity)}' of the probe failed: (?:\w+: )?(.*)", self._console)
        return said[1] if said else ""

    @cached_property
    def _console(self) -> str:
        file = self.path / "console.log"
        return file.read_text(encoding="utf-8", errors="replace") if self.kind == "run" and file.is_file() else ""

    @property
    def term(self) -> str:
        """The objective whose readings describe training."""
        return self.trained or "infonce"

    @property
    def own(self) -> bool:
        """Whether ``gradscope train`` made it, so that its flags are a remedy."""
        return self.kind == "run" and "loop" not in self.facts

    @property
    def chance(self) -> float:
        """ln(width), the loss of guessing. Raises Unmeasured where the width is not known."""
        return math.log(self.known_width)

    @property
    def known_width(self) -> int:
        if self.width is None:
            raise Unmeasured(f"the softmax width is not in the log; {GIVE_WIDTH}")
        return self.width

    @property
    def precision(self) -> str:
        """Of the towers: by the recipe, or by the stamps of the readings. Raises Unmeasured where neither says it."""
        stamps = str(self.readings["stamps"].iloc[-1]) if len(self.readings) else ""
        stamped = re.search(r"towers (\w+)", stamps)
        return str(self.setting_or("train.precision", None) or (stamped[1] if stamped else self.setting("train.precision")))

    def setting(self, name: str) -> Any:
        """ "train.lr" of the resolved recipe. Raises Unmeasured for a log that has no recipe."""
        value = self.setting_or(name, None)
        if value is None:
            raise Unmeasured(f"the setting {name} is not known of this log")
        return value

    def setting_or(self, name: str, otherwise: Any) -> Any:
        """ "train.lr" of the resolved recipe, or ``otherwise`` where it is not known."""
        table, _, key = name.partition(".")
        return self.recipe.get(table, {}).get(key, otherwise)

    def reading(self, quantity: str, key: str, term: str = "") -> Series:
        """One reading over the run."""
        name = f"reading {quantity}/{key}" + (f" of {term}" if term else "")
        chosen = self._readings.get((quantity, key, term))
        series = self._series(name, "measured batches", self.recorded_by(quantity, key), chosen, "value")
        return replace(series, denser=measured_by(self.recipe, own=self.own))

    def recorded_by(self, quantity: str, key: str) -> str:
        """Which setting of this kind of run records a reading that is not there; "" where none is known."""
        return recorded_by(quantity, key, self.recipe, kind=self.kind, own=self.own, streamed=was_streamed(self.readings))

    def directions(self, quantity: str, key: str, term: str = "") -> list[Series]:
        """``key``.i2t and ``key``.t2i."""
        return [self.reading(quantity, f"{key}.{direction}", term) for direction in DIRECTIONS]

    def both(self, quantity: str, key: str, term: str = "") -> Series:
        """The mean over the two directions of ``key``.i2t and ``key``.t2i, batch by batch; one of them where a loss has only that."""
        there = self.directions(quantity, key, term)
        if not all(len(series.values) for series in there):
            return max(there, key=lambda series: len(series.values))
        steps = np.intersect1d(there[0].steps, there[1].steps)
        values = [series.values[np.isin(series.steps, steps)] for series in there]
        return Series(
            name=f"reading {quantity}/{key}.i2t and .t2i" + (f" of {term}" if term else ""),
            unit=there[0].unit,
            missing=there[0].missing,
            denser=there[0].denser,
            steps=steps,
            epochs=there[0].epochs[np.isin(there[0].steps, steps)],
            values=(values[0] + values[1]) / 2,
        )

    def column(self, name: str) -> Series:
        """One column, over the steps that have it."""
        chosen = self.steps if name in self.steps else None
        return self._series(f"column {name}", "steps", "", chosen, name)

    def logged_loss(self) -> Series:
        """The training loss as it was logged. In a loop that is not ours it is the reading, which the column repeats."""
        return self.reading("loss", "trained", self.term) if "loop" in self.facts else self.column("loss")

    def skipped(self) -> Series:
        """0/1 for every step between the first and the last that was logged. In a loop that is not ours only probed and skipped steps
        have a row: one without a row was not skipped, unless a later row counts it (a fused optimizer tells only then)."""
        logged = self.column("skipped")
        if not len(logged.steps):
            return logged
        skipped = _skipped_steps(logged)
        steps = np.arange(min([logged.steps[0], *skipped]), logged.steps[-1] + 1)
        before = np.searchsorted(logged.steps, steps, side="right") - 1  # the last logged step up to each
        return replace(logged, steps=steps, epochs=logged.epochs[before.clip(0)], values=np.isin(steps, skipped) * 1.0)

    def _series(self, name: str, unit: str, missing: str, frame: pd.DataFrame | None, column: str) -> Series:
        if frame is None or frame.empty:
            nothing = np.zeros(0)
            return Series(name=name, unit=unit, missing=missing, steps=nothing, epochs=nothing, values=nothing)
        ordered = frame[[cell is not None for cell in frame[column]]].sort_values("step", kind="stable")
        steps = ordered["step"].to_numpy()
        values = np.array([math.nan if isinstance(value, list) else float(value) for value in ordered[column]])
        return Series(name=name, unit=unit, missing=missing, steps=steps, epochs=self._epochs(steps), values=values)

    def _epochs(self, steps: np.ndarray) -> np.ndarray:
        known = self._epoch_of_step
        return np.array([known.get(step, math.nan) for step in steps.tolist()])

    @cached_property
    def _epoch_of_step(self) -> dict[int, float]:
        if "epoch" not in self.steps:
            return {}
        return dict(zip(self.steps["step"].tolist(), self.steps["epoch"].astype(float).tolist(), strict=True))

    @cached_property
    def _readings(self) -> dict[Any, pd.DataFrame]:
        return dict(iter(self.readings.groupby(["quantity", "key", "term"], sort=False))) if len(self.readings) else {}


def _skipped_steps(column: Series) -> np.ndarray:
    """Each row counts the skipped steps up to it: n of them are the last n."""
    counted = zip(column.steps.tolist(), column.values.tolist(), strict=True)
    return np.array([step - back for step, count in counted if count > 0 for back in range(int(count))], dtype=int)


def view_run(path: Path) -> View:
    """A run directory as rules see it. Raises ValueError if it is none, or cannot be read."""
    run = Run(path)
    steps = with_gaps(run.rows("steps"))
    # ``gradscope probe`` reads checkpoints at fixed weights: no rate was logged, and nothing was trained.
    trains = "lr" in steps or "loop" in run.provenance
    trained = run.recipe.get("objective", {}).get("name", "") if trains else ""
    width = run.provenance.get("width")
    notes = [
        f"{table}.jsonl: {count} {unit_of(count, 'rows')} of a superseded attempt left out" for table, count in _counted(run) if count
    ]
    if not run.done:
        notes.append("the run has not reached its end (no DONE): read up to its last whole line")
    return View(
        path=path,
        kind="run",
        trained=trained if trained in TERMS else "",
        width=int(width) if width else None,  # 0: a loop whose first rows are of steps that were skipped before any was measured
        steps=steps,
        readings=run.readings,
        evals=run.evals,
        recipe=run.recipe,
        facts=run.provenance,
        notes=tuple(notes),
    )


def _counted(run: Run) -> list[tuple[str, int]]:
    """Superseded rows by table, of which the steps have been read; reads the others."""
    _ = run.readings, run.evals
    return [(name, run.superseded.get(name, 0)) for name in ("steps", "readings", "evals")]
