"""The examples run as written, and leave a complete run that the other commands read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.diagnose import look
from gradscope.run_state import run_state
from gradscope.runlog import Run

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), str(output)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "of the probe failed" not in done.stderr
    assert "no embeddings were seen" not in done.stderr
    run = Run(output)
    assert run.done
    assert len(run.steps) >= 5
    agreement = run.reading("hooks", "agreement", "infonce")["value"].astype(float)
    assert agreement.median() > 0.999
    assert run_state(look(output)).word == "not saturated"
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text()
