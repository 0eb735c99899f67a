"""Tiles of a large matrix, each by one thread of its own, the results in the order of the tiles.

Why: a product shared by all threads is followed by many short steps, and every one of these waits for the slowest thread, at its best
for a few microseconds, beside other programs for a whole time slice; steps that torch does in one thread (counting) leave the others
idle. A thread that keeps its tile from the product to the counts waits for nobody.

    workers    threads that work on tiles, at most ``MOST``: each needs room for a tile
    inner      threads of torch inside each of them: what is left of torch's own number

On a GPU, or where torch may use one thread only, the tiles are worked on in the calling thread. How it can mislead: the bits of a
product may depend on the number of threads inside it, within fp32 rounding; with at most ``MOST`` threads that number is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 8
_AHEAD = 3  # tiles per worker that are under way or wait to be taken


def workers(device: torch.device) -> int:
    """How many tiles are worked on at a time; one means: in the calling thread."""
    settable = "backend: OpenMP" in torch.__config__.parallel_info()  # others take no number of threads once they have begun
    return min(torch.get_num_threads(), MOST) if device.type == "cpu" and settable else 1


@contextmanager
def in_order(work: Callable[[Item], Result], items: Iterable[Item], device: torch.device) -> Iterator[Iterator[Result]]:
    """``work`` of every item, in the order of ``items``, several under way at a time; what ``work`` raises is raised here.

    ``items`` is read as it is needed. ``work`` must change nothing that another call reads. Leaving the block waits for what is under
    way and gives torch its number of threads back; within it, threads that others start use the inner number.
    """
    count, threads = workers(device), torch.get_num_threads()
    if count == 1:
        yield map(work, items)
        return
    pool = ThreadPoolExecutor(count, "tiles", initializer=torch.set_num_threads, initargs=(threads // count,))
    try:
        yield _results(pool, work, iter(items), count * _AHEAD)
    finally:
        try:
            pool.shutdown(cancel_futures=True)
        finally:  # a second Ctrl-C ends the waiting
            torch.set_num_threads(threads)


def _results(pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterator[Item], ahead: int) -> Iterator[Result]:
    waiting: deque[Future[Result]] = deque(pool.submit(work, item) for item in islice(items, ahead))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(pool.submit(work, item) for item in islice(items, 1))
