"""Memory of this process, from Linux's own account of it."""

from __future__ import annotations

import re
from pathlib import Path


def mebibytes(name: str) -> float:
    """``VmRSS``, held now, or ``VmHWM``, held at most. ``getrusage`` does not do: its peak starts at that of the parent process, which
    in a long run of tests is larger than what a child takes, so that a child would seem to take nothing.
    """
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024
