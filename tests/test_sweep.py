"""Grids of runs: parsing, resuming a half-done sweep, and the frame at the end."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope import train as train_module
from gradscope.runlog import Run
from gradscope.sweep import arms, collect, parse_over, run_arm, sweep


@pytest.fixture
def tables(scenes_folder, small_encoder):
    return {
        "data": {"name": str(scenes_folder)},
        "encoder": {"name": str(small_encoder)},
        "objective": {"name": "hn"},
        "train": {"device": "cpu", "batch_size": 8, "max_steps": 2, "lr": 1e-3, "seed": 7},
    }


def test_parse_over():
    assert parse_over("objective.gamma=0,.25,.5") == [{"objective.gamma": v} for v in (0, 0.25, 0.5)]
    assert parse_over("objective.margin=live,fixed") == [{"objective.margin": "live"}, {"objective.margin": "fixed"}]
    zipped = parse_over("train.batch_size+train.accumulate+train.accumulate_mode=16+8+narrow,128+1+none")
    assert zipped == [
        {"train.batch_size": 16, "train.accumulate": 8, "train.accumulate_mode": "narrow"},
        {"train.batch_size": 128, "train.accumulate": 1, "train.accumulate_mode": "none"},
    ]
    for wrong in ("", "objective.gamma", "objective.gamma=", "gamma=1", "a.b+c=1+2"):
        with pytest.raises(ValueError, match=r"--over takes table.key=value"):
            parse_over(wrong)
    with pytest.raises(ValueError, match=r"sets 2 settings at once, but '16' has 1 values"):
        parse_over("train.batch_size+train.seed=16")


def test_the_grid(tables, tmp_path):
    over = ["objective.gamma=0,.5", "train.batch_size+train.accumulate+train.accumulate_mode=4+2+narrow,8+1+none"]
    grid = arms(tables, over, 3, tmp_path)
    assert len(grid) == 2 * 2 * 3
    assert len({arm.path for arm in grid}) == len(grid)
    assert [arm.seed for arm in grid[:3]] == [7, 8, 9]
    assert grid[0].path == tmp_path / "gamma=0,batch_size=4,accumulate=2,accumulate_mode=narrow,seed=7"
    for arm in grid:
        assert arm.recipe.train.seed == arm.seed
        assert arm.recipe.objective.gamma == arm.settings["objective.gamma"]
        assert arm.recipe.width == arm.settings["train.batch_size"]


def test_wrong_grids_are_refused_before_anything_runs(tables, tmp_path):
    cases = {
        ("objective.gama=0,1",): r"Did you mean 'gamma'",
        ("objective.gamma=0,nan",): r"objective.gamma must be a finite number",
        ("train.seed=1,2",): r"--over train.seed has no effect; use --seeds",
        ("objective.gamma=0", "objective.gamma=1"): r"--over sets objective.gamma twice",
        ("objective.gamma=0,.5,0",): r"holds the same value twice",
        ("train.accumulate=1,8",): r"needs --accumulate-mode",
    }
    for over, message in cases.items():
        with pytest.raises(ValueError, match=message):
            arms(tables, over, 1, tmp_path / "out")
    with pytest.raises(ValueError, match=r"train.seed must be a whole number; got 'one'"):
        arms({**tables, "train": {"seed": "one"}}, ["objective.gamma=0"], 1, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_whole_only_with_the_sweep_is_accepted(tables, tmp_path):
    tables["train"]["accumulate"] = 2
    assert len(arms(tables, ["train.accumulate_mode=narrow,cached"], 1, tmp_path)) == 2


def test_a_half_done_sweep_continues_and_retrains_nothing(tables, tmp_path, monkeypatch):
    trained = []
    original = train_module.train

    def train(recipe, output, **settings):
        trained.append((output.name, settings["resume"]))
        return original(recipe, output, **settings)

    monkeypatch.setattr(train_module, "train", train)
    grid = arms(tables, ["objective.gamma=0,.5"], 2, tmp_path)
    run_arm(grid[0], "test")
    run_arm(grid[1], "test")
    (grid[1].path / "DONE").unlink()  # cut off after its last checkpoint
    (grid[1].path / "eval-test.json").unlink()
    frame = sweep(grid, "test")
    names = [arm.path.name for arm in grid]
    assert trained == [(names[0], False), (names[1], False), (names[1], True), (names[2], False), (names[3], False)]
    again = sweep(grid, "test")
    assert len(trained) == 5
    assert frame.equals(again)
    before = [(arm.path / "steps.jsonl").read_bytes() for arm in grid]
    assert all(Run(arm.path).done for arm in grid)

    assert list(frame.columns) == [
        *("objective.gamma", "width", "seed", "direction", "metric", "value", "low", "high", "n_queries", "n_candidates", "path")
    ]
    assert len(frame) == 4 * 2 * frame["metric"].nunique()
    assert sorted(set(frame["seed"])) == [7, 8]
    assert set(frame["width"]) == {8}
    assert set(frame["n_candidates"]) == {64}
    for arm in grid:
        rows = frame[(frame["path"] == str(arm.path)) & (frame["metric"] == "R@1")].set_index("direction")
        with np.load(arm.path / "eval-test.npz") as hits:
            assert hits["hit1_i2t"].mean() == pytest.approx(rows.loc["i2t", "value"])
    assert collect(grid, "test").equals(frame)

    (grid[2].path / "eval-test.json").unlink()  # evaluated again, not trained again
    assert sweep(grid, "test").equals(frame)
    assert [(arm.path / "steps.jsonl").read_bytes() for arm in grid] == before
    assert len(trained) == 5


def test_a_finished_run_of_another_recipe_is_not_taken_for_this_one(tables, tmp_path):
    grid = arms(tables, ["objective.gamma=.5"], 1, tmp_path)
    run_arm(grid[0], "test")
    tables["train"]["lr"] = 2e-3
    with pytest.raises(ValueError, match=r"train.lr was 0.001 and is now 0.002"):
        sweep(arms(tables, ["objective.gamma=.5"], 1, tmp_path), "test")


def test_a_split_that_is_not_there_is_refused_before_anything_trains(tables, tmp_path):
    grid = arms(tables, ["objective.gamma=0,.5"], 1, tmp_path)
    with pytest.raises(ValueError, match=r"has no split 'tests'; it has .*test"):
        sweep(grid, "tests")
    assert not any(tmp_path.iterdir())


def test_paths_as_values_make_one_folder_an_arm(tables, tmp_path):
    grid = arms(tables, ["encoder.name=runs/a,../b"], 1, tmp_path)
    assert [arm.path for arm in grid] == [tmp_path / "name=runs-a,seed=7", tmp_path / "name=..-b,seed=7"]
    assert [arm.recipe.encoder.name for arm in grid] == ["runs/a", "../b"]
    with pytest.raises(ValueError, match="two arms one folder"):
        arms(tables, ["encoder.name=runs/a,runs-a"], 1, tmp_path)


def test_progress_is_told(tables, tmp_path, monkeypatch):
    from gradscope import sweep as module

    monkeypatch.setattr(module, "run_arm", lambda arm, split: None)
    monkeypatch.setattr(module, "collect", lambda grid, split: None)
    seen = []
    sweep(arms(tables, ["objective.gamma=0,.5"], 1, tmp_path), "test", lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert not any(tmp_path.iterdir())
