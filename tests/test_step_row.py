"""What a step's row says of memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
from memory import mebibytes

from gradscope.step_row import _resident_peak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_the_process_s_own():
    """And not that of the process which started it, as ``ru_maxrss`` may be."""
    before, found, after = mebibytes("VmHWM"), _resident_peak(), mebibytes("VmHWM")
    assert before <= found <= after


def test_without_a_line_of_linux_the_system_is_asked(tmp_path: Path):
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  5 kB\n")
    asked = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    for file in ("status", "not there"):
        assert _resident_peak(tmp_path / file) >= asked
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  5120 kB\n")
    assert _resident_peak(tmp_path / "status") == 5.0
