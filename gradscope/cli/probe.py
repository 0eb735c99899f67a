"""gradscope probe"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def probe(
    checkpoints: Annotated[list[str], typer.Argument(help="Runs, checkpoints, tiny, folders or open_clip NAME:TAG.")],
    data: Annotated[str, typer.Option(help="A name of `gradscope data list`, or a folder or file of your own.")] = "scenes",
    split: Annotated[str, typer.Option(help="A split of the data; the only one there is if none has this name.")] = "train",
    width: Annotated[int, typer.Option(help="Candidates per softmax.", min=2)] = 16,
    batches: Annotated[int, typer.Option(help="Measured batches per checkpoint.", min=1)] = 20,
    gamma: Annotated[float, typer.Option(help="At which HN is read.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the choice of batches; the same for every checkpoint.")] = 42,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    output: Annotated[Path, typer.Option(help="One run directory per checkpoint goes here.")] = Path("runs/probe"),
) -> None:
    """Take the full set of readings at given checkpoints, without training: the same batches for each, both objectives.

    Example: gradscope probe tiny runs/demo/hn --data scenes --width 128
    """
    from gradscope.console import out
    from gradscope.probe_checkpoints import probe_checkpoints
    from gradscope.verdict import summarise, summary_table

    paths = probe_checkpoints(
        checkpoints, data=data, split=split, width=width, batches=batches, gamma=gamma, seed=seed, device=device, output=output
    )
    out.print(summary_table([summarise(path) for path in paths]))
    for name, path in zip(checkpoints, paths, strict=True):
        out.print(f"{name}: all readings in {path}", soft_wrap=True)
