"""The run log of a rank that writes nothing: one run has one writer, the first rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradscope.runlog import Listener, Run, is_run


class SilentLog:
    """What ``RunLog`` can be told, and nothing comes of it. ``path`` is the run that the first rank writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def listen(self, listener: Listener) -> None:
        """The dashboards are the first rank's."""

    def write_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Written by the first rank."""

    def write_readings(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Written by the first rank."""

    def write_evals(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Written by the first rank."""

    def console(self, text: str) -> None:
        """Written by the first rank."""

    def save_array(self, name: str, array: np.ndarray) -> str:
        """Written by the first rank; the reference is the same."""
        return f"arrays/{name}.npz"

    def checkpoint_dir(self, step: int) -> Path:
        """Where the first rank puts the checkpoint."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def checkpoints(self) -> list[Path]:
        """Those of the first rank, as far as this one sees its disk."""
        return Run(self.path).checkpoints() if is_run(self.path) else []

    def mark_best(self, step: int, recall: float) -> None:
        """Marked by the first rank."""

    def finish(self) -> None:
        """Finished by the first rank."""

    def close(self) -> None:
        """Nothing is open."""
