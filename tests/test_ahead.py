"""Items made ahead: the same items, in order, errors where they belong, and no thread left behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gradscope.data.ahead import ahead
from gradscope.data.batching import decoded


def threads() -> int:
    return sum(thread.name == "ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_the_same_items_in_order(count):
    assert list(ahead(range(count))) == list(range(count))
    assert threads() == 0


def test_no_more_than_that_many_are_made_ahead():
    made = []
    stream = ahead((made.append(i) or i for i in range(20)), most=3)
    assert next(stream) == 0
    time.sleep(0.3)
    assert len(made) <= 1 + 3 + 1, "taken, waiting, and the one in hand"
    stream.close()
    assert threads() == 0


def test_they_are_made_while_the_consumer_works():
    made = [threading.Event() for _ in range(3)]
    stream = ahead(made[i].set() or i for i in range(3))
    assert next(stream) == 0
    assert all(item.wait(60) for item in made), "the second and the third are not asked for yet"
    assert list(stream) == [1, 2]


def test_an_error_comes_in_its_place():
    def items():
        yield 1
        raise ValueError("picture 'x' is broken")

    stream = ahead(items())
    assert next(stream) == 1
    with pytest.raises(ValueError, match="picture 'x' is broken"):
        next(stream)
    assert threads() == 0


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_pictures_for_a_gpu_are_those_of_the_loader():
    class Numbers:
        def __getitem__(self, index):
            if index == 9:
                raise ValueError("image 'nine' cannot be decoded")
            return torch.full((3, 2, 2), float(index))

    plan = [[0, 1], [2, 3], [4, 5], [6, 9]]
    both = [decoded(Numbers(), plan, pin=pin) for pin in (False, True)]
    for _ in range(3):
        assert torch.equal(*(next(stream) for stream in both))
    for stream in both:
        with pytest.raises(ValueError, match="image 'nine'"):
            next(stream)
    assert threads() == 0
