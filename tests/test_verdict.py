"""The sentences of the verdict say what the numbers say."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from gradscope.demo import Arms, verdict_lines
from gradscope.metrics.crossing import crossing
from gradscope.verdict import TERMS, Summary, sentences, summary_table

ZEROS = {"positive_zero.i2t": 0.25, "positive_zero.t2i": 0.75, "loss_zero_gradient_not": 0.5}


def summary(trained: str, below: float, undefined: int = 0) -> Summary:
    return Summary(
        path=Path(trained),
        trained=trained,
        gamma=0.5,
        width=16,
        every=5,
        measured=(20,),
        below=dict.fromkeys(TERMS, (below,)),
        crossings={(term, t): crossing([1, 6], [-2.0, -6.0], float(t)) for term in TERMS for t in ("1e-3", "1e-5")},
        zeros=dict.fromkeys(TERMS, ZEROS),
        residual=dict.fromkeys(TERMS, (1e-4,)),
        effective_rows=dict.fromkeys(TERMS, (2.0,)),
        margin=(42.0, 0.5),
        ratio=(1e3,),
        cosine=(0.5, 0.25),
        cosine_undefined=undefined,
        judged=(below, below, 20),
    )


@pytest.mark.parametrize("divided", [True, False])
def test_a_gradient_that_was_not_read_has_its_reason(divided: bool) -> None:
    text = "\n".join(sentences(dataclasses.replace(summary("infonce", 0.0), divided=divided)))
    assert ("not read, since the parameters were divided (--shard full)" in text) == divided
    assert ("not counted: --probe-set full does" in text) != divided


def lines(narrow: float, wide: float, gain: tuple[float, float, float] = (0.0, -0.1, 0.1), undefined: int = 0) -> str:
    """The verdict where shares ``narrow`` and ``wide`` of 100 batches start under 1e-3 at widths 16 and 128."""
    rows = [(width, -4.0 if k < 100 * share else -1.0) for width, share in ((16, narrow), (128, wide)) for k in range(100)]
    arms = Arms(
        recall={name: dict.fromkeys(("i2t", "t2i"), (0.5, 0.4, 0.6)) for name in ("tiny", "infonce", "hn")},
        gain=dict.fromkeys(("i2t", "t2i"), gain),
    )
    start = pd.DataFrame(rows, columns=["width", "log10_true"])
    return "\n".join(verdict_lines(start, summary("infonce", narrow), summary("hn", 0.1, undefined), arms))


@pytest.mark.parametrize(
    ("narrow", "wide", "cause"),
    [
        (0.8, 0.0, "most of the saturation is the narrow softmax"),
        (0.8, 0.7, "a wider softmax alone does not undo it"),
        (0.0, 0.0, "the start is not saturated even at the narrowest width"),
        (0.4, 0.1, "the start is not saturated even at the narrowest width"),
    ],
)
def test_the_cause_follows_the_start_widths(narrow: float, wide: float, cause: str) -> None:
    text = lines(narrow, wide)
    assert f"16: {narrow:.0%}, 128: {wide:.0%}; so {cause}" in text
    assert ("InfoNCE at width 16: SATURATED" in text) == (narrow >= 0.5)


@pytest.mark.parametrize(
    ("gain", "state"),
    [
        ((0.1, 0.05, 0.2), "HN wins"),
        ((-0.1, -0.2, -0.05), "HN loses"),
        ((0.1, -0.05, 0.2), "HN does not win clearly"),
        ((math.nan, math.nan, math.nan), "HN does not win clearly"),
    ],
)
def test_a_win_needs_the_whole_interval(gain: tuple[float, float, float], state: str) -> None:
    assert f"{state}" in lines(0.8, 0.1, gain)


@pytest.mark.parametrize(
    ("judged", "state"),
    [
        ((1.0, 1.0, 1), "too few measured batches to judge (1); at least 6 are needed: more steps, or --probe-every 1"),
        ((0.44, 0.85, 20), "partly saturated. 44% of the last 20 measured batches and 85% of their anchors are under 1e-3"),
        ((0.0, 0.2, 20), "not saturated. 0% of the last 20"),
        ((0.5, 0.2, 6), "SATURATED. 50% of the last 6"),
    ],
)
def test_the_state_needs_enough_batches(judged: tuple[float, float, int], state: str) -> None:
    said = sentences(dataclasses.replace(summary("infonce", 0.0), judged=judged))[0]
    assert said.startswith(f"InfoNCE at width 16: {state}")


def test_one_candidate_is_no_state() -> None:
    assert "one candidate per softmax: the loss is 0" in sentences(dataclasses.replace(summary("infonce", 1.0), width=1))[0]


def test_zeros_crossings_and_undefined_cosines_are_told() -> None:
    text = lines(0.8, 0.1, undefined=3)
    assert "First measured under 1e-3: step 6; under 1e-5: step 6 (read every 5 steps)" in text
    assert "Of their anchors, both directions: pull on the positive rounded to 0 in 50%." in text
    assert (
        "Zeros. Of the measured batches: whole gradient exactly 0 not measured; norm 0 by underflow alone not measured; loss printed 0"
        in text
    )
    assert "(sd 0.25; undefined in 3 batches)" in text
    assert "undefined" not in lines(0.8, 0.1)


@pytest.mark.parametrize(
    ("encoder", "steps", "guessing"), [("small_encoder", 6, True), ("small_encoder", 5, False), ("tiny", 6, False)]
)
def test_a_run_that_only_guesses_is_told(
    encoder: str, steps: int, guessing: bool, request: pytest.FixtureRequest, scenes_folder: Path, tmp_path: Path
) -> None:
    """Random weights at rate 0 sit at ln(width); pretrained ones do not, whatever else is said of them. Five batches judge nothing."""
    from gradscope.recipe import resolve
    from gradscope.train import train
    from gradscope.verdict import summarise

    name = str(request.getfixturevalue(encoder)) if encoder != "tiny" else encoder
    tables = {
        "data": {"name": str(scenes_folder)},
        "encoder": {"name": name},
        "train": {"batch_size": 8, "max_steps": steps, "lr": 0.0},
        "probe": {"log_grads": True, "every": 1},
    }
    train(resolve(tables, {}), tmp_path / "run", quiet=True)
    text = "\n".join(sentences(summarise(tmp_path / "run")))
    assert ("at chance, ln 8 = 2.08" in text) == guessing
    assert ("too few measured batches to judge" in text) == (steps < 6)


def test_a_run_of_one_epoch_that_starts_by_guessing_is_judged_by_its_end(tmp_path: Path) -> None:
    from gradscope.runlog import Run, RunLog
    from gradscope.verdict import _at_chance

    names = {"quantity": "loss", "term": "infonce", "key": "log10_true", "unit": "nat", "stamps": ""}
    for name, end in (("learns", 0.1), ("guesses", math.log(8))):
        losses = {step: math.log(8) if step <= 30 else end for step in range(1, 41)}
        with RunLog.create(tmp_path / name, recipe_toml="", provenance={"width": 8}) as log:
            log.write_steps({"step": step, "samples": 8 * step, "epoch": 1, "loss": loss} for step, loss in losses.items())
            log.write_readings({**names, "step": step, "value": math.log10(loss)} for step, loss in losses.items())
        assert _at_chance(Run(tmp_path / name)) == (name == "guesses")


@pytest.mark.parametrize("names", [("a",), ("a-run-of-a-sweep-gamma=0.5-lr=1e-5-seed=42",), ("hn-gamma-0.5", "infonce-seed-42")])
@pytest.mark.parametrize("second", [16, 128])
def test_the_table_fits_a_terminal_and_breaks_no_name(names: tuple[str, ...], second: int) -> None:
    """Two-line headings; both objectives' shares are of batches BELOW 1e-3, so that one column reads like the other."""
    runs = [dataclasses.replace(summary("hn", 0.25), path=Path(name)) for name in names]
    runs[-1] = dataclasses.replace(runs[-1], width=second)
    file = io.StringIO()
    Console(file=file, width=80).print(summary_table(runs))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for name in names:
        assert name in text
    assert text.count("< 1e-3") == 3, "a heading of each objective, and the words under the table"
    assert ">= 1e-3" not in text
    assert text.count("25%") == 2 * len(names)
    assert ("width 16" in text) == ({run.width for run in runs} == {16})


def test_the_table_says_what_was_not_read() -> None:
    file = io.StringIO()
    Console(file=file, width=80).print(summary_table([dataclasses.replace(summary("hn", 0.25), ratio=())]))
    assert "not read" in file.getvalue()
