"""What a run says of itself before it starts: duplicates, the probe's set and cadence, and what that is expected to cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradscope import console
from gradscope.recipe import resolve
from gradscope.train_display import (
    PlainProgress,
    captions_words,
    duplicates_words,
    loss_words,
    probe_words,
    resumed_words,
    rows_words,
    schedule_words,
)


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
    assert ("each probed step takes a second backward" in words) == (probe_set == "full")
    assert "%" not in words, "no share is foretold"
    assert ("both objectives' gradients" in words) == (probe_set == "full")


def test_a_budget_is_said_and_a_probe_that_is_off_too() -> None:
    assert "--log-grads" in probe_words(recipe())
    tight = probe_words(recipe(probe__log_grads=True, probe__budget="2%"))
    assert "at most 2%" in tight
    alone = probe_words(recipe(probe__log_grads=True, probe__second_backward=False))
    assert "the trained objective's gradients" in alone
    assert "second backward" not in alone
    divided = probe_words(recipe(probe__log_grads=True, train__shard="full"))
    assert "neither objective's gradients" in divided
    assert "second backward" not in divided


def test_the_rows_of_a_step_are_in_words() -> None:
    assert rows_words(recipe(train__batch_size=32)) == "32 records a step, not accumulated"
    narrow = recipe(train__accumulate=8, train__accumulate_mode="narrow")
    assert rows_words(narrow) == "16 records x 8 micro-batches a step (narrow)"


def test_a_line_an_epoch_and_one_a_minute_within(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], []
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    tell = PlainProgress(total=25, per_epoch=10, first=6, say=said.append)
    for step in range(6, 26):
        now[0] += 5.0 if step <= 10 else 20.0
        tell(step, {"loss": 0.5 / step})
    assert said[0] == "step 10 of 25, 0:01:15 left; epoch 1 of 3, loss 5.00e-02"
    assert [int(line.split()[1]) for line in said] == [10, 13, 16, 19, 20, 23, 25]
    assert "epoch 3 of 3" in said[-1]


def test_only_what_departs_from_the_usual_is_said() -> None:
    usual = recipe()
    assert loss_words(usual, "cpu") == ""
    assert loss_words(recipe(objective__loss_form="residual"), "cpu") == "loss in the residual form"
    assert loss_words(recipe(objective__kernel="dense"), "cpu") == "loss dense: as asked"
    kinds = ("truncated_captions", "truncated_validation_captions", "repeated_captions", "repeated_token_ids")
    assert captions_words(dict.fromkeys(kinds, 0), 40, 77, "keep") == ""
    said = captions_words(dict(zip(kinds, (3, 1, 4, 5), strict=True)), 40, 77, "keep")
    assert said.startswith(
        "3 of 40 captions (and 1 of validation) are cut at 77 tokens, 4 captions repeat the words of another, 5 its tokens;"
    )


def test_a_limit_of_steps_without_effect_is_said() -> None:
    batches = SimpleNamespace(steps_per_epoch=6, left_out=0)
    words = {limit: schedule_words(recipe(train__max_steps=limit), batches, min(limit or 18, 18)) for limit in (0, 10, 18, 400)}
    assert words[0] == words[18] == "18 steps, 6 an epoch; peak rate 1e-05, then a cosine"
    assert words[400] == f"{words[0]}\nnote: --max-steps 400 has no effect, 3 epochs end after 18 steps; raise --epochs"
    assert "note" not in words[10]


def test_a_resume_says_where_it_goes_on() -> None:
    assert resumed_words(6, 40, 2) == "continued from step 6 of 40 (written by 2 processes, now 1: equal to rounding)"
    assert resumed_words(6, 40, 1) == "continued from step 6 of 40"
    assert "starts from the beginning" in resumed_words(0, 40, 1)
