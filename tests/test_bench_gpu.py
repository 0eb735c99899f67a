"""The benchmark for GPUs, at toy sizes on a CPU: every section runs, and what has no GPU says so."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    """The benchmark as a module: it is a script beside the package, with its parts and the harness next to it."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu = load("gpu")
from gpu_parts import models, training, watching  # noqa: E402
from gpu_parts.setting import Clock, Setting, compare  # noqa: E402

from gradscope.console import console  # noqa: E402


def given(folder, **changes):
    settings = {"device": "cpu", "tiny": True, "only": ",".join(gpu.SHARES), "budget": 400.0, "rounds": 1, "seed": 0}
    return argparse.Namespace(output=folder, **{**settings, **changes})


def setting(**changes):
    clock = Clock(seconds=100.0, shares={"a": 1.0, "b": 3.0})
    return Setting(device=torch.device("cpu"), clock=clock, **{"tiny": True, "rounds": 2, **changes})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    code = gpu.run(given(folder))
    return code, folder, json.loads((folder / "gpu.json").read_text())


def test_every_section_runs_on_a_cpu(ran):
    code, folder, said = ran
    assert code == 0, said["failures"]
    assert set(said["sections"]) == set(gpu.SHARES)
    assert said["left_out"] == said["failures"] == []
    for name, rows in said["sections"].items():
        assert len(rows) == len(pd.read_csv(folder / f"{name}.csv")) > 0
        assert not [row["note"] for row in rows if row.get("note")], name


def test_losses_span_the_regimes(ran):
    rows = pd.DataFrame(ran[2]["sections"]["correctness"])
    assert rows["true_loss"].min() < 1e-20
    assert rows["true_loss"].max() > 30
    strict = rows[rows["arm"].str.startswith("torch")]
    assert (strict[["loss", "image", "text", "scale"]] < 2e-5).all(axis=None)
    assert (strict["residual"] < 1e-4).all()
    plain = rows[(rows["arm"] == "dense, cross-entropy") & (rows["case"] == "loss below 1e-20")]
    assert (plain["image"] > 0.5).all()  # the form that everybody uses has no pull left there


def test_rates_and_shares_of_the_peak(ran):
    rows = pd.DataFrame(ran[2]["sections"]["training"])
    assert rows["arm"].tolist() == ["open_clip train_one_epoch", "ours, InfoNCE", "ours, HN", "ours, InfoNCE, no wait"]
    assert (rows["images_per_s"] * rows["seconds"]).round(6).eq(4).all()
    peak = next(row["tflops"] for row in ran[2]["sections"]["peaks"] if row["arm"] == "bf16")
    flops = rows["mfu"] * rows["seconds"] * peak
    assert flops.max() == pytest.approx(flops.min())  # the same work in all arms


def test_flops_of_a_step_by_hand():
    """torch counts a CPU's attention as nothing, so products of layers are left: forward, by their inputs and by their weights."""
    one = setting()
    width = models.TINY["vision_cfg"]["width"]
    assert width == models.TINY["text_cfg"]["width"]
    layer = 2 * width * 12 * width  # of a token: queries, keys, values, output, and a feed-forward of four times the width
    patches = 2 * 4 * (3 * 8 * 8) * width
    forward = patches + 5 * layer + 24 * layer + 2 * (2 * width * models.TINY["embed_dim"])
    assert training.count_flops(one, models.make_model(one, "tiny", 24)) == 3 * forward - patches  # pixels have no gradient


def test_arms_take_turns_and_what_fails_is_a_row():
    one, calls = setting(), []

    def broken():
        raise RuntimeError("no such kernel\nand much more")

    def too_large():
        raise torch.cuda.OutOfMemoryError("of 100 GB")

    arms = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b"), "broken": broken, "large": too_large}
    rows = {row["arm"]: row for row in compare(one, "case", arms, "a", ours=("broken",))}
    assert calls.count("a") == calls.count("b") > 2
    assert rows["a"]["ratio"] == rows["a"]["low"] == rows["a"]["high"] == 1.0
    assert rows["b"]["low"] <= rows["b"]["ratio"] <= rows["b"]["high"]
    assert rows["broken"]["note"] == "RuntimeError: no such kernel"
    assert rows["large"] == {"case": "case", "arm": "large", "note": "out of memory"}
    assert one.failures == ["case, broken: RuntimeError: no such kernel"]


def test_a_section_that_breaks_keeps_its_rows_and_fails_the_run(tmp_path, monkeypatch):
    def half(_):
        yield {"case": "one", "arm": "a", "seconds": 1.0}
        raise RuntimeError("the second")

    monkeypatch.setattr(gpu, "pairs", half)
    assert gpu.run(given(tmp_path, only="pairs")) == 1
    said = json.loads((tmp_path / "gpu.json").read_text())
    assert said["failures"] == ["pairs: RuntimeError: the second"]
    assert [row["case"] for row in said["sections"]["pairs"]] == ["one"]


def test_what_there_is_no_time_for_is_listed(tmp_path):
    assert gpu.run(given(tmp_path, only="correctness,pairs", budget=1e-9)) == 0
    said = json.loads((tmp_path / "gpu.json").read_text())
    assert said["sections"] == {"correctness": [], "pairs": []}
    assert "correctness: saturated" in said["left_out"]
    assert "ranks: N 300" in said["left_out"]


def test_time_left_over_goes_to_the_next_section():
    clock = Clock(seconds=100.0, shares={"a": 1.0, "b": 3.0}, start=0.0)
    clock.open("a")
    assert clock.end == 25.0
    clock.open("b")
    assert clock.end == 100.0


def test_host_waits_are_not_made_up():
    assert math.isnan(watching.host_syncs(setting(), lambda: None))


def test_a_table_fits_and_marks_noise():
    row = {
        "case": "tiny, 24 tokens, batch 4",
        "arm": "probe default",
        "every": 5,
        "share": -0.007,
        "share_low": -0.01,
        "syncs": math.nan,
    }
    shown = gpu.table("watching", [row, {**row, "arm": "probe full", "share": 0.02, "share_low": 0.01}])
    assert [column.header for column in shown.columns] == ["arm", "every", "share"]
    assert list(shown.columns[2].cells) == ["", "-0.70% (noise)", "2.00%"]


def test_probes_do_not_point_to_logs_that_are_gone(capsys):
    with watching.without_paths():
        console.print("the probe read 2 steps; look with: gradscope diagnose gone")
        console.print("a reading failed")
    assert capsys.readouterr().err == "a reading failed\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"only": "peaks,speed"}, "--only names speed; the sections are peaks"),
        ({"rounds": 0}, "at least 1 round"),
        ({"tiny": False}, "on a CPU add --tiny"),
        ({"device": "cuda"}, "no CUDA device here"),
        ({"device": "tpu"}, "--device tpu is unknown"),
        ({"device": "mps"}, "--device mps is no NVIDIA GPU"),
    ],
)
def test_impossible_runs_are_refused(changes, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=words):
        gpu.run(given(tmp_path, **changes))
