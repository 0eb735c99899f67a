"""The benchmark of training: the whole path once, small; its arithmetic; and that its arms train on the same thing."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


def _load(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"bench_{name}"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


bench = _load("training")
PLAN = bench.Plan(batch=2, steps=2, warm=1, rounds=1, side=80)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return bench.prepare(PLAN, tmp_path_factory.mktemp("work"))


def test_the_whole_path(monkeypatch, tmp_path, capsys):
    """Every arm has its turn, and both tables are written."""
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "own"))
    sizes = ["--batch", "2", "--steps", "1", "--warm", "1", "--rounds", "1", "--side", "80"]
    monkeypatch.setattr(sys, "argv", ["training.py", "--output", str(tmp_path / "out"), *sizes])
    bench.main()
    turns = pd.read_csv(tmp_path / "out" / "turns.csv")
    assert sorted(turns["arm"]) == sorted(bench.ARMS)
    assert (turns["seconds"] > 0).all()
    for name, arms in (("training", bench.BESIDE_OPEN_CLIP), ("objectives", bench.OBJECTIVES)):
        assert pd.read_csv(tmp_path / "out" / f"{name}.csv")["arm"].tolist() == list(arms)
    assert "open_clip, our kernels" in capsys.readouterr().out


def test_ratios_are_of_the_same_round():
    seconds = {"a": [1.0, 4.0, 2.0], "b": [3.0, 2.0, 2.5]}
    rows = [{"round": n, "arm": arm, "seconds": value} for arm, values in seconds.items() for n, value in enumerate(values)]
    found = bench.ratios(pd.DataFrame(rows), ["b", "a"], "a").set_index("arm")
    each = [b / a for a, b in zip(seconds["a"], seconds["b"], strict=True)]
    assert found.loc["b", ["ratio", "low", "high"]].tolist() == pytest.approx([statistics.median(each), min(each), max(each)])
    assert found.loc["a", ["ratio", "low", "high"]].tolist() == [1, 1, 1]


def test_both_trainers_see_the_same_pixels_and_tokens(work):
    """With --decode exact to the bit: the ratio at identical settings is of identical work."""
    from gradscope.data.batching import Batches
    from gradscope.data.source import open_data

    encoder = work.encoder()
    theirs = bench.Pictures(work, encoder)
    records = open_data(str(work.folder)).records("train")
    assert len(theirs) == len(records) == PLAN.pictures
    batches = Batches(records=records, encoder=encoder, batch_size=2, accumulate=1, seed=0, decode="exact")
    (batch,) = next(batches.steps(1, 1))
    for row, index in enumerate(batches.indices(1)[0]):
        pixels, ids = theirs[index]
        assert torch.equal(batch.images["full"][row], pixels)
        assert torch.equal(batch.texts["full"][row], ids)


@pytest.mark.parametrize("arm", ["open_clip", "ours"])
def test_a_turn_leaves_the_weights_and_the_trainer_as_they_were(work, arm):
    before = {name: tensor.clone() for name, tensor in work.weights.state_dict().items()}
    load, save = bench.trainer.load_encoder, bench.checkpoint.save
    bench.ARMS[arm](work.short())
    assert all(torch.equal(tensor, before[name]) for name, tensor in work.weights.state_dict().items())
    assert (bench.trainer.load_encoder, bench.checkpoint.save) == (load, save)


def test_torchs_kernels_are_put_back():
    before = bench.trainer.cpu_speed
    with bench.torch_kernels():
        assert bench.trainer.cpu_speed is not before
        with bench.trainer.cpu_speed(torch.device("cpu"), 8) as words:
            assert words == "torch"
    assert bench.trainer.cpu_speed is before


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"steps": 0}, {"warm": 0}, {"batch": 1}])
def test_impossible_plans_are_refused(settings):
    with pytest.raises(ValueError, match="at least 1 round"):
        bench.Plan(**settings)


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="--model 'nothing' is neither tiny nor a model"):
        bench._encoder("nothing")
