"""gradscope sweep"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.table import Table


def sweep(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe.")],
    over: Annotated[list[str], typer.Option(help="table.key=v,v,... ; repeat for a grid; a+b=1+x,2+y moves two together.")],
    seeds: Annotated[int, typer.Option(help="Seeds per combination.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/sweep"),
    split: Annotated[str, typer.Option(help="The split the last checkpoints are evaluated on.")] = "test",
) -> None:
    """Train and evaluate every combination of the swept settings; give the same command again to continue.

    Example: gradscope sweep recipe.toml --over objective.gamma=0,.25,.5 --seeds 3
    """
    from gradscope.recipe import read
    from gradscope.sweep import arms
    from gradscope.sweep import sweep as run

    grid = arms(read(recipe), over, seeds, output)

    from gradscope.console import console, out, progress

    console.print(f"{len(grid)} runs into {output}")
    with progress("runs") as advance:
        frame = run(grid, split, advance)
    frame.to_csv(output / "sweep.csv", index=False)
    out.print(_table(frame, list(grid[0].settings), split))
    out.print(f"all metrics: {output / 'sweep.csv'}", soft_wrap=True)


def _table(frame: DataFrame, settings: list[str], split: str) -> Table:
    """R@1 per combination: mean over seeds, smallest and largest seed."""
    from rich.table import Table

    table = Table(title=f"R@1 on {split}, percent", caption="mean over seeds [smallest, largest seed]", title_justify="left")
    for heading in [*settings, "width", "seeds", "image to text", "text to image"]:
        table.add_column(heading, justify="right")
    recall = frame[frame["metric"] == "R@1"]
    for key, group in recall.groupby([*settings, "width"], sort=False):
        values = [group[group["direction"] == d]["value"] * 100 for d in ("i2t", "t2i")]
        cells = [f"{v.mean():.2f} [{v.min():.2f}, {v.max():.2f}]" for v in values]
        names = key if isinstance(key, tuple) else (key,)
        table.add_row(*map(str, names), str(group["seed"].nunique()), *cells)
    return table
