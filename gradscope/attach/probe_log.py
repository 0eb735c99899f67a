"""What the probe writes in a loop that is not ours: a run directory, made at the first reading, when the width is known.

It has the tables of every run of gradscope, so figures, ``diagnose``, ``check`` and ``watch`` read it. A step row is written for probed
and for skipped steps only: reading the loss of every step would make a device wait each time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from gradscope import distributed
from gradscope.provenance import provenance
from gradscope.runlog import RunLog, is_run
from gradscope.sinks import require
from gradscope.sinks.feed import open_feeds


class ProbeLog:
    """Rows to a run directory, by rank 0; without ``output`` nothing is written.

    ``width`` and ``precision`` (of the towers: fp32, bf16 or fp16) are set before the first row.
    """

    def __init__(
        self,
        output: str | Path | None,
        probe_set: str,
        trained: str,
        gamma: float,
        margin: str,
        every: int,
        first_step: int,
        sinks: str,
    ) -> None:
        self.output = None if output is None or distributed.rank() else Path(output)
        self.width = 0
        self.precision = ""
        self.sinks = sinks
        require(sinks)
        if sinks and output is None:
            raise ValueError(f"sinks '{sinks}' show what a run directory holds; give output= too")
        self.first_step = first_step
        self._written = first_step - 1
        self.rows = 0  # steps whose readings were written
        self.trained = trained
        self._tables: dict[str, dict[str, Any]] = {
            "data": {"name": "the loop's own"},
            "objective": {"name": trained or "other", "gamma": gamma, "margin": margin},
            "probe": {"log_grads": True, "every": every, "set": probe_set},
        }
        self._log: RunLog | None = None
        self._said: list[str] = []
        if self.output is not None:
            _check_folder(self.output, first_step)

    def _opened(self) -> RunLog | None:
        if self._log is None and self.output is not None:
            facts = provenance(width=self.width, loop="not gradscope's")
            self._tables["train"] = {"precision": self.precision, "batch_size": self.width}
            if self.first_step > 1:
                self._log = RunLog.reopen(self.output, step=self._written, provenance=facts)
            else:
                self._log = RunLog.create(self.output, recipe_toml=tomli_w.dumps(self._tables), provenance=facts)
            self.first_step = 2  # attached again, the run is continued
            for line in self._said:
                self._log.console(line)
            self._said = []
            for feed in open_feeds(self.sinks, self._log.path, self._tables, everything=False, say=self.say):
                self._log.listen(feed)
        return self._log

    def write(
        self,
        step: int,
        samples: int,
        epoch: int,
        readings: Sequence[Mapping[str, Any]],
        *,
        skipped: int,
        loss_scale: float | None,
        lr: float | None,
        facts: Mapping[str, float],
    ) -> None:
        """The readings of one step and its step row; nothing for a step that was neither probed nor skipped.

        ``skipped`` counts the steps that mixed precision left out: this one, or with a fused optimizer all since the last row."""
        log = self._opened() if readings or skipped else None
        if log is None:
            return
        self._written = step
        self.rows += bool(readings)
        log.write_readings(readings)
        values = {(row["quantity"], row["term"], row["key"]): row["value"] for row in readings}
        row = {"step": step, "samples": samples, "epoch": epoch, "loss": values.get(("loss", self.trained or "infonce", "trained"))}
        row |= {"scale": values.get(("scale", "", "value")), "grad_norm": values.get(("accumulation", "total", "norm"))}
        log.write_steps([{**row, "lr": lr, "loss_scale": loss_scale, "skipped": skipped, **facts}])

    def write_costs(self, readings: Sequence[Mapping[str, Any]]) -> None:
        """Readings on what a step cost, known only when all else has been written."""
        if self._log is not None:
            self._log.write_readings(readings)

    def write_evals(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """What the loop itself measured. Nothing before the first reading, when there is no run yet."""
        if self._log is not None:
            self._log.write_evals(rows)

    def say(self, line: str) -> None:
        """A line for the run's console log; kept until there is one."""
        if self._log is not None:
            self._log.console(line)
        elif self.output is not None:
            self._said.append(line)

    def close(self, complete: bool) -> None:
        """``complete`` marks the run as one that reached its end."""
        if self._log is not None:
            (self._log.finish if complete else self._log.close)()
            self._log = None


def _check_folder(output: Path, first_step: int) -> None:
    """What would fail at the first reading, in the middle of somebody's training, fails before it."""
    if first_step > 1:
        if not is_run(output):
            raise ValueError(f"'{output}' is no run to continue; give the folder of one, or leave first_step at 1")
        return
    standing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not standing.is_dir() or not os.access(standing, os.W_OK | os.X_OK):
        raise ValueError(f"'{output}' cannot be written: '{standing}' is no folder that may be written to; choose another output")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"'{output}' is not empty; choose another output, or continue that run with first_step above 1")
