"""A run as it grows: the few series that a live view shows, kept up to date from the lines that were added. Never imports torch.

Rows of an attempt that a newer one has replaced are dropped as soon as the newer one writes, by the rule of ``gradscope.run_tables``.
How it can mislead: a run in another process is seen up to its last whole line; its age says how long ago that was.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from gradscope.judgement import turned, window
from gradscope.run_tables import IDENTITY, Tail
from gradscope.runlog import Run

#: The readings a live view needs, by quantity; all their terms.
WANTED: dict[str, tuple[str, ...]] = {
    "loss": ("log10_true",),
    "saturation": ("below_1e-3", "rows_below_1e-3.i2t", "rows_below_1e-3.t2i", "effective_rows.i2t", "effective_rows.t2i"),
    "residual": ("log10_mean.i2t", "log10_mean.t2i"),
    "zeros": (
        *("all_zero.parameters", "entries.parameters", "structural.parameters", "entries_reached.parameters", "entries.logits"),
        *("positive_zero.i2t", "positive_zero.t2i", "loss_zero_gradient_not"),
    ),
    "gradient": ("log10_norm", "log10_ratio"),
    "accumulation": ("log10_norm", "entries_zero"),
    "scale": ("value", "at_limit"),
    "hooks": ("agreement",),
}

Row = dict[str, Any]


class Following:
    """What is known of a run so far. ``poll`` reads what is new; it raises ValueError where a line is broken."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if ``path`` is not a run."""
        self.path = path
        self.run = Run(path)
        self.attempts = self.run.attempts
        wanted = [f'"quantity": "{quantity}"' for quantity in WANTED]
        self._tails = {"steps": Tail(path, "steps"), "readings": Tail(path, "readings", wanted), "evals": Tail(path, "evals")}
        self._steps: dict[int, Row] = {}
        self._readings: dict[tuple[str, str, str], dict[int, Row]] = {}  # by quantity, term and key
        self._evals: dict[tuple[Any, ...], Row] = {}

    def poll(self) -> bool:
        """Takes in the lines added since the last call; whether there were any."""
        new = {table: tail.rows() for table, tail in self._tails.items()}
        newest = max((row["attempt"] for rows in new.values() for row in rows), default=0)
        if newest > self.attempts[-1]["attempt"]:
            self.attempts = Run(self.path).attempts
        self._steps.update((row["step"], row) for row in new["steps"])
        self._evals.update((tuple(row[name] for name in IDENTITY["evals"]), row) for row in new["evals"])
        for row in new["readings"]:
            if row["key"] in WANTED[row["quantity"]]:
                self._readings.setdefault((row["quantity"], row["term"], row["key"]), {})[row["step"]] = row
        if newest > 1:
            self._steps, self._evals = self._counting(self._steps), self._counting(self._evals)
            self._readings = {name: self._counting(rows) for name, rows in self._readings.items()}
        return newest > 0

    def _counting(self, rows: dict[Any, Row]) -> dict[Any, Row]:
        """Without the rows of older attempts beyond the step at which a newer one started."""
        return {
            key: row
            for key, row in rows.items()
            if not any(row["attempt"] < entry["attempt"] and row["step"] > entry["from_step"] for entry in self.attempts)
        }

    @property
    def done(self) -> bool:
        return self.run.done

    @property
    def age(self) -> float:
        """Seconds since a row was written."""
        return max(0.0, time.time() - max(tail.written for tail in self._tails.values()))

    def steps(self) -> list[Row]:
        """Step rows that count, by rising step."""
        return [self._steps[step] for step in sorted(self._steps)]

    def column(self, name: str) -> list[float]:
        """One column over the steps that have it."""
        return [float(row[name]) for row in self.steps() if row.get(name) is not None]

    def reading(self, quantity: str, key: str, term: str = "") -> list[float]:
        """One reading over the steps that have it."""
        rows = self._readings.get((quantity, term, key), {})
        return [float(rows[step]["value"]) for step in sorted(rows)]

    def judged(self, quantity: str, key: str, term: str = "") -> list[float]:
        """The finite values of one reading in the window of ``gradscope.judgement``."""
        rows = self._readings.get((quantity, term, key), {})
        steps = sorted(rows)
        values = np.array([float(rows[step]["value"]) for step in steps])
        epochs = np.array([float(self._steps.get(step, {}).get("epoch", math.nan)) for step in steps])
        chosen, _ = window(epochs, values)
        return values[chosen & np.isfinite(values)].tolist()

    def turned(self, term: str, batches: float) -> bool:
        """Whether the gradients at the embeddings say that something else is trained; ``batches``: share under 1e-3."""
        objective = self.run.recipe.get("objective", {})
        if objective.get("name") != term or objective.get("token_weight", 0.0) > 0:
            return False
        return turned(np.array(self.judged("hooks", "agreement", term)), batches)

    def terms(self) -> list[str]:
        """The objectives that are read, the trained one first. In a loop that is not ours HN is read beside InfoNCE in any case: it is
        left out there, unless it is trained or its gradient was asked for."""
        there = [term for quantity, term, _ in self._readings if quantity == "loss"]
        trained = self.run.recipe.get("objective", {}).get("name", "")
        if "loop" in self.attempts[-1] and trained == "infonce" and ("gradient", "pair", "log10_ratio") not in self._readings:
            there = [term for term in there if term == trained]
        return sorted(there, key=lambda term: term != trained)

    def evals(self, metric: str) -> dict[str, list[float]]:
        """direction -> one metric of validation, by rising step."""
        found: dict[str, list[float]] = {}
        for row in sorted(self._evals.values(), key=lambda row: row["step"]):
            if row["metric"] == metric and row["split"] == "val":
                found.setdefault(row["direction"], []).append(float(row["value"]))
        return found

    def total_steps(self) -> int | None:
        """Steps of the whole run, where its provenance tells."""
        total = self.attempts[-1].get("total_steps")
        return None if total is None else int(total)

    def width(self) -> int | None:
        width = self.attempts[-1].get("width")
        return int(width) if width else None

    def has_epochs(self) -> bool:
        """Whether epochs mean something: in a loop that is not ours they are 1 until somebody tells."""
        return "loop" not in self.attempts[-1] or any(row.get("epoch") != 1 for row in self._steps.values())
