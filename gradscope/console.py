"""The one rich console, and a progress bar that appears only once there is something to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Messages and progress go to stderr, so that a table on stdout can be piped. Without markup: "[...]" in a path or caption is text.
console = Console(stderr=True, highlight=False, markup=False)
out = Console(highlight=False, markup=False)


def bar(*columns: TextColumn) -> Progress:
    """A progress bar with a count, the time gone and the time left; ``columns`` are drawn at its end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        *columns,
        console=console,
        transient=True,
    )


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields ``advance(done, total)``; the bar is drawn from the first call on, and not at all without one."""
    display: Progress | None = None
    task: TaskID | None = None

    def advance(done: int, total: int) -> None:
        nonlocal display, task
        if display is None or task is None:
            display = bar()
            display.start()
            task = display.add_task(title, total=total)
        display.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if display is not None:
            display.stop()
