"""Tiles on several threads: the results in order, torch's number of threads as it was, errors where they belong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from gradscope.metrics.geometry import caption_geometry
from gradscope.metrics.ranks import ranks
from gradscope.tile_threads import MOST, in_order, workers

CPU = torch.device("cpu")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def slow_start(k: int) -> tuple[int, int, str]:
    time.sleep(0.02 if k == 0 else 0.0)  # the first is done last
    return k * k, torch.get_num_threads(), threading.current_thread().name


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 40])
def test_results_come_in_order_from_threads_of_one(threads: int, n: int) -> None:
    with torch_threads(threads):
        with in_order(slow_start, range(n), CPU) as found:
            results = list(found)
        assert torch.get_num_threads() == threads
    assert [square for square, *_ in results] == [k * k for k in range(n)]
    assert {inner for _, inner, _ in results} <= {1}
    assert all(name.startswith("tiles") == (threads > 1) for *_, name in results)


def test_items_are_read_as_they_are_needed() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for k in range(1000):
            read.append(k)
            yield k

    with torch_threads(2), in_order(abs, items(), CPU) as found:
        assert next(found) == 0
        assert len(read) < 20


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_is_raised_where_the_result_is_taken(threads: int) -> None:
    with torch_threads(threads):
        with in_order(lambda k: 1 / k, [2, 1, 0, 4], CPU) as found:
            assert [next(found), next(found)] == [0.5, 1.0]
            with pytest.raises(ZeroDivisionError):
                next(found)
        assert torch.get_num_threads() == threads


def test_leaving_early_drops_the_rest() -> None:
    done: list[int] = []

    def stop() -> None:
        with in_order(done.append, range(10_000), CPU) as found:
            next(found)
            raise KeyboardInterrupt

    with torch_threads(2):
        with pytest.raises(KeyboardInterrupt):
            stop()
        assert torch.get_num_threads() == 2
    assert len(done) < 20
    assert not any(thread.name.startswith("tiles") for thread in threading.enumerate())


def test_a_second_interrupt_while_threads_end_leaves_the_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pool: ThreadPoolExecutor, cancel_futures: bool) -> None:
        shutdown(pool, cancel_futures=cancel_futures)
        raise KeyboardInterrupt

    shutdown = ThreadPoolExecutor.shutdown

    def squares() -> None:
        with monkeypatch.context() as patched, in_order(slow_start, range(9), CPU) as found:
            patched.setattr(ThreadPoolExecutor, "shutdown", interrupted)
            list(found)

    with torch_threads(2):
        with pytest.raises(KeyboardInterrupt):
            squares()
        with ThreadPoolExecutor(1) as new_thread:  # each thread has a number of its own, from torch's when it begins
            assert new_thread.submit(torch.get_num_threads).result() == 2


def test_how_many() -> None:
    with torch_threads(1):
        assert workers(CPU) == 1
    with torch_threads(3):
        assert workers(CPU) == 3
        assert workers(torch.device("cuda")) == 1
    with torch_threads(2 * MOST):
        assert workers(CPU) == MOST
        with in_order(slow_start, range(3), CPU) as found:
            assert {inner for _, inner, _ in found} == {2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torch_may_make_numbers_of_another_type_by_default(dtype: torch.dtype) -> None:
    rows, owner = torch.nn.functional.normalize(torch.randn(150, 24), dim=1), torch.arange(150)
    expected = caption_geometry(rows, block=64), ranks(rows, rows.flip(0), owner, block=64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = caption_geometry(rows, block=64), ranks(rows, rows.flip(0), owner, block=64)
    finally:
        torch.set_default_dtype(before)
    assert found[0].counts.tolist() == expected[0].counts.tolist()
    assert found[0].hardest_index.tolist() == expected[0].hardest_index.tolist()
    assert [each.greater.tolist() for each in found[1]] == [each.greater.tolist() for each in expected[1]]


def test_geometry_does_not_depend_on_the_threads() -> None:
    rows = torch.nn.functional.normalize(torch.randn(700, 24) + 0.6, dim=1)
    rows[300:320] = rows[:20]  # ties: the earliest wins
    found = []
    for threads in (1, 2, 4):
        with torch_threads(threads):
            found.append(caption_geometry(rows, block=64))
    for other in found[1:]:
        assert other.counts.tolist() == found[0].counts.tolist()
        assert other.hardest_index.tolist() == found[0].hardest_index.tolist()
        assert other.near_counts.tolist() == found[0].near_counts.tolist()
        assert other.top_pairs == found[0].top_pairs


def test_training_has_the_same_bits_beside_tiles() -> None:
    """What a loop computes before and after an evaluation in it."""
    x, w = torch.randn(37, 129), torch.randn(129, 515, requires_grad=True)

    def step() -> list[torch.Tensor]:
        loss = torch.log_softmax(x @ w, dim=1).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, w)]

    for threads in (2, 3):
        with torch_threads(threads):
            before = step()
            with in_order(slow_start, range(20), CPU) as found:
                list(found)
            assert all(map(torch.equal, before, step()))
