"""gradscope watch"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or still being written.", show_default=False)],
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and stop, as is done where stdout is no terminal.")] = False,
) -> None:
    """Follow a run in the terminal: loss and residual, saturation, zeros, cost, findings. Ends with the run, or with Ctrl-C.

    Example: gradscope watch runs/train
    """
    from gradscope.console import out
    from gradscope.watch import watch as follow

    try:
        follow(run, out, every=every, once=once)
    except KeyboardInterrupt:
        raise typer.Exit from None
