"""The one rich console, and a progress bar that appears only once there is something to wait for."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Console(RichConsole):
    """What is printed with ``soft_wrap=True`` is one line for a program that reads it; a person's terminal breaks it between words.

    A word longer than the terminal, such as a path, stays whole, so that it can be copied.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **looks: Any) -> None:
        if not soft_wrap or not self.is_terminal:
            super().print(*objects, soft_wrap=soft_wrap, **looks)
        elif all(isinstance(o, str) for o in objects):
            super().print(_between_words(" ".join(objects), self.width), soft_wrap=True, **looks)
        else:
            super().print(*objects, **looks)


def _between_words(text: str, width: int) -> str:
    """Each line of ``text`` broken between words, at its own indent. rich would break or cut a long path."""
    broken = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        whole: Any = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
        broken.append(textwrap.fill(line, width, subsequent_indent=indent, **whole))
    return "\n".join(broken)


#: Messages and progress go to stderr, so that a table on stdout can be piped. "[...]" and ":key:" in a path or caption are text.
console = Console(stderr=True, highlight=False, markup=False, emoji=False)
out = Console(highlight=False, markup=False, emoji=False)


def bar(*columns: TextColumn) -> Progress:
    """A progress bar with a count, the time gone and the time left; ``columns`` are drawn at its end. Nothing where nobody sees it."""
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
        disable=not console.is_interactive,
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
