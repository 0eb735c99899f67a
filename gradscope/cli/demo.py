"""gradscope demo"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    output: Annotated[Path, typer.Option(help="Folder of the runs, figures and verdict.")] = Path("runs/demo"),
    epochs: Annotated[int, typer.Option(help="Epochs of each arm.", min=1)] = 3,
    lr: Annotated[float, typer.Option(help="Peak learning rate of both arms.")] = 3e-5,
    seed: Annotated[int, typer.Option(help="Order of the data, both arms.")] = 42,
) -> None:
    """The whole story on the embedded data: train InfoNCE and HN with the probe on, evaluate, draw Figures 1 and 4, and conclude.

    Example: gradscope demo --output runs/demo
    """
    from gradscope.demo import run

    run(output, epochs=epochs, lr=lr, seed=seed)
