"""What a result depends on besides its recipe: versions, machine, command, data, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradscope.paths import shown_name


def provenance(**facts: Any) -> dict[str, Any]:
    """Facts of this process, with ``facts`` added. Imports torch."""
    import torch

    from gradscope import __version__

    return {
        "gradscope": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "open_clip": version("open_clip_torch"),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "flush_denormal": not bool(torch.tensor([1e-40]).mul(1.0).count_nonzero()),
        "argv": [shown_name(word) for word in sys.argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }


def _commit() -> str:
    """The commit of a source checkout; "released" where the package is installed without one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return "released"
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
