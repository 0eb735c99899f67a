"""What the benchmarks say while they run: that they are alive, and nothing that would mislead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import ConsoleRenderable, RenderHook

from gradscope.console import console, progress

#: Seconds between two lines where no bar can be drawn, in a log file for instance.
APART = 10.0


@contextmanager
def told(title: str) -> Iterator[Callable[[int, int], None]]:
    """``gradscope.console.progress``, with a line now and then where nobody would see its bar."""
    last = time.monotonic()
    with progress(title) as draw:

        def advance(done: int, total: int) -> None:
            nonlocal last
            draw(done, total)
            if not console.is_interactive and time.monotonic() - last >= APART:
                console.print(f"{title}: {done} of {total}")
                last = time.monotonic()

        yield advance


class _NoPaths(RenderHook):
    """A hook and no capture, since a bar may be on the screen."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [shown for shown in renderables if "gradscope diagnose" not in " ".join(str(shown).split())]


@contextmanager
def without_paths() -> Iterator[None]:
    """Each probe says how to look at its log, which a benchmark has deleted by then; all else it says is shown."""
    console.push_render_hook(_NoPaths())
    try:
        yield
    finally:
        console.pop_render_hook()


def random_weights_are_meant() -> None:
    """open_clip warns of a model without pretrained weights; the benchmarks want just that, and other warnings stay."""
    logging.getLogger().addFilter(_other_than_random_weights)


def _other_than_random_weights(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("No pretrained weights loaded")
