"""What a run says of itself before it starts: duplicates, the probe's set and cadence, and what that is expected to cost."""

from __future__ import annotations

from typing import Any

import pytest

from gradscope.probe_cost import expected_cost
from gradscope.recipe import resolve
from gradscope.train_display import duplicates_words, probe_words


def recipe(**settings: Any) -> Any:
    return resolve({}, {name.replace("__", "."): value for name, value in settings.items()})


def test_excluded_duplicates_are_always_said() -> None:
    for captions in (0, 7):
        assert "duplicates excluded" in duplicates_words(captions, "exclude")
    assert "each other's negatives" in duplicates_words(7, "keep")
    assert duplicates_words(0, "keep") == ""


@pytest.mark.parametrize("probe_set", ["loss", "default", "full"])
@pytest.mark.parametrize("every", [1, 5])
def test_the_probe_says_set_cadence_and_cost(probe_set: str, every: int) -> None:
    words = probe_words(recipe(probe__log_grads=True, probe__set=probe_set, probe__every=every))
    assert f"probe set {probe_set}" in words
    assert ("at every step" if every == 1 else "every 5 steps") in words
    assert "expected to add about" in words
    assert ("both objectives' gradients" in words) == (probe_set == "full")


def test_a_budget_is_said_and_a_probe_that_is_off_too() -> None:
    assert "--log-grads" in probe_words(recipe())
    tight = probe_words(recipe(probe__log_grads=True, probe__budget="2%"))
    assert "more than its budget allows" in tight
    assert "at most 2%" in tight
    assert "within its budget" in probe_words(recipe(probe__log_grads=True, probe__set="loss", probe__every=50, probe__budget="2%"))
    alone = probe_words(recipe(probe__log_grads=True, probe__second_backward=False))
    assert "the trained objective's gradients" in alone


def test_the_expected_cost_falls_with_what_is_not_read() -> None:
    on = {"probe__log_grads": True}
    wide = {"train__accumulate": 8, "train__accumulate_mode": "narrow"}
    full = expected_cost(recipe(**on))
    assert expected_cost(recipe(**on, **wide)) == pytest.approx(full / 8), "one micro-batch of eight is read"
    assert expected_cost(recipe(**on, train__accumulate=8, train__accumulate_mode="cached")) == pytest.approx(full)
    assert expected_cost(recipe(**on, probe__every=50)) == pytest.approx(full / 10)
    sets = [expected_cost(recipe(**on, probe__set=name)) for name in ("loss", "default")]
    assert sets[0] < sets[1] < expected_cost(recipe(**on, probe__second_backward=False)) < full
    assert expected_cost(recipe(**on, **wide)) == pytest.approx(0.031, rel=0.05), "16 x 8 narrow, every 5: benchmarks/README.md"
