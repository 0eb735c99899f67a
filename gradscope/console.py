"""The one rich console, and progress: a bar on a terminal once there is something to wait for, elsewhere a plain line a minute."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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


#: Seconds between two plain lines of progress.
PAUSE = 60.0

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


class Course:
    """How long what remains will take, from the mean pace since the first thing was seen done, and whether a line is due.

    How it can mislead: work that grows dearer as it goes takes longer.
    """

    def __init__(self, done: int = 0) -> None:
        self._first, self._start = done, time.monotonic()
        self._said = self._start

    def due(self) -> bool:
        """Whether ``PAUSE`` has gone since the last line, or the start."""
        return time.monotonic() - self._said >= PAUSE

    def line(self, done: int, total: int | None) -> str:
        """ "120 of 500, 0:03:20 left"; from here the next pause counts."""
        self._said = time.monotonic()
        if total is None:
            return f"{done:,} so far"
        passed = max(done - self._first, 1)
        left = timedelta(seconds=round((self._said - self._start) / passed * (total - done)))
        return f"{done:,} of {total:,}, {left} left"


def lines(title: str) -> Callable[[int, int | None], None]:
    """``advance(done, total)`` that prints a line when one is due; ``total`` is None where it is not known."""
    course = Course()

    def advance(done: int, total: int | None) -> None:
        if course.due():
            console.print(f"{title}: {course.line(done, total)}", soft_wrap=True)

    return advance


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields ``advance(done, total)``; the bar is drawn from the first call on, and not at all without one.

    Where there is no terminal, a line "title: 120 of 500, 0:03:20 left" instead, none in the first minute and then one a minute.
    """
    if not console.is_interactive:
        yield lines(title)
        return
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
