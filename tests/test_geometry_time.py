"""The figures of geometry over time and of concentration draw what the readings say."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from toy import Toy, toy_batch, toy_reader

from gradscope.cli.figures import figure
from gradscope.figures import figures
from gradscope.figures.geometry_time import GAP_PLACES, PANELS
from gradscope.figures.style import OBJECTIVE_COLOURS
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.runlog import Run, RunLog
from gradscope.step_reader import StepReader

STEPS = 24


def trained(path: Path, objective: str, *, steps: int = STEPS, gamma: float = 0.5, without: tuple[str, ...] = ()) -> Run:
    """A run directory with the batch readings of a few steps of the toy."""
    encoder = Toy(scale=20.0, seed=len(objective))
    reader: StepReader = toy_reader(encoder, objective, gamma, stamps="micro-batch 1/1; width 8; fp32")
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.5)
    with RunLog.create(path, recipe_toml=f'[objective]\nname = "{objective}"\n', provenance={}) as log:
        for step in range(1, steps + 1):
            reader.begin(step, 8 * step)
            batch = toy_batch(8, step)
            embeddings = encoder.embed(batch)
            terms = Clip(objective=reader.heads.objectives[objective])(embeddings)
            optimizer.zero_grad()
            with reader.watching(batch, embeddings, terms):
                total_loss(terms).backward()
            optimizer.step()
            log.write_steps([{"step": step, "samples": 8 * step, "epoch": 1, "loss": 0.0}])
            log.write_readings([row for row in reader.flush() if not row["key"].endswith(without or ("never",))])
        log.finish()
    return Run(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return trained(folder / "a", "hn"), trained(folder / "b", "infonce")


def test_panels_hold_the_readings_and_their_running_medians(runs: tuple[Run, Run]) -> None:
    drawing, frame = figures["geometry-time"](*runs)
    assert frame["run"].unique().tolist() == ["HN", "InfoNCE"]
    for run, name in zip(runs, ("HN", "InfoNCE"), strict=True):
        part = frame[frame["run"] == name]
        for key in (key for _, series in PANELS.values() for key in series):
            values = run.reading("geometry", key, "")["value"].astype(float).tolist()
            drawn = part[part["series"] == key]
            assert drawn["value"].tolist() == values
            middle = [np.median(values[max(0, i - 1) : i + 2]) for i in range(STEPS)]  # 24 readings: a window of three
            assert drawn["running_median"].tolist() == middle
        for direction, panel in (("i2t", "e"), ("t2i", "f")):
            lists = run.reading("geometry", f"gap_quantiles.{direction}", "")["value"].tolist()
            for series, place in GAP_PLACES.items():
                drawn = part[(part["panel"] == panel) & (part["series"] == series)]
                assert drawn["value"].tolist() == [values[place] for values in lists]
    colours = [line.get_color() for line in drawing.axes[0].lines]
    assert colours == [c for name in ("hn", "infonce") for c in [OBJECTIVE_COLOURS[name]] * 2]
    assert [line.get_linestyle() for line in drawing.axes[1].lines] == ["-", "-", "-", "--"] * 2
    assert [text.get_text() for text in drawing.axes[3].texts] == ["at most min(7, $D$)"]


@pytest.mark.parametrize(("count", "window"), [(1, 1), (19, 1), (20, 3), (59, 5), (100, 11), (5000, 51)])
def test_the_running_median_is_centred_and_odd(count: int, window: int) -> None:
    from gradscope.figures.geometry_time import _rows, _window

    assert _window(count) == window
    values = np.random.default_rng().normal(size=count)
    half = window // 2
    rows = _rows(pd.DataFrame({"step": range(count), "value": values}), "a", "alignment")
    slow = [np.median(values[max(0, i - half) : i + half + 1]) for i in range(count)]
    assert rows["running_median"].tolist() == pytest.approx(slow)


def test_a_run_on_top_of_another_leaves_it_seen(runs: tuple[Run, Run]) -> None:
    for count in (2, 3):
        drawing, _ = figures["geometry-time"](*runs[:1] * count)
        for axis in drawing.axes:
            medians = [line for line in axis.lines if line.get_linestyle() == "-" and line.get_linewidth() not in (0.5, 0.6)]
            drawn = {line.get_color(): line.get_linewidth() for line in medians}
            assert len(drawn) == count
            assert all(under >= over + 1 for under, over in itertools.pairwise(drawn.values()))


def test_runs_of_one_objective_are_told_apart(runs: tuple[Run, Run]) -> None:
    drawing, frame = figures["geometry-time"](runs[0], runs[0], runs[1])
    assert frame["run"].unique().tolist() == ["HN, a (1)", "HN, a (2)", "InfoNCE"]
    legend = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert legend == ["HN, a (1)", "HN, a (2)", "InfoNCE", "first tower", "second tower"]
    assert len({line.get_color() for line in drawing.axes[0].lines}) == 3
    with pytest.raises(ValueError, match="one to three runs, 4 were given"):
        figures["geometry-time"](*[runs[0]] * 4)


def test_one_direction_leaves_its_other_panel_out(tmp_path: Path) -> None:
    run = trained(tmp_path / "one", "hn", steps=2, without=(".t2i",))
    drawing, frame = figures["geometry-time"](run)
    assert "f" not in set(frame["panel"])
    assert [axis.get_visible() for axis in drawing.axes] == [True] * 5 + [False]
    drawing, frame = figures["concentration"](run)
    assert frame["direction"].unique().tolist() == ["i2t"]
    assert len(drawing.axes) == 1


def test_concentration_draws_every_bin_of_every_step(runs: tuple[Run, Run]) -> None:
    run = runs[0]
    drawing, frame = figures["concentration"](run)
    assert len(frame) == 2 * 3 * STEPS * 20
    x = run.reading("concentration", "binned_predicted", "")["value"].tolist()
    y = run.reading("concentration", "binned_log_ratio.t2i", "infonce")["value"].tolist()
    part = frame[(frame["direction"] == "t2i") & (frame["series"] == "infonce")].sort_values(["step", "bin"])
    assert part["predicted"].tolist() == [value for values in x for value in values]
    assert part["measured"].tolist() == [value for values in y for value in values]
    equal = frame[frame["series"] == "equal"]
    assert np.allclose(equal["predicted"], equal["measured"], atol=1e-4)
    slopes = {term: run.reading("concentration", "slope.i2t", term)["value"].astype(float).median() for term in ("infonce", "hn")}
    words = [text.get_text() for text in drawing.axes[0].texts]
    assert words == [f"slope {slopes['infonce']:.2f}", f"slope {slopes['hn']:.2f}", "slope 1.0000"]
    drawing.draw_without_rendering()
    for axis in drawing.axes:
        assert all(text.get_window_extent().y0 >= axis.bbox.y1 for text in axis.texts), "above the panel, where no point lies"
    offsets = drawing.axes[0].collections[0].get_offsets()
    drawn = frame[(frame["direction"] == "i2t") & (frame["series"] == "infonce")]
    assert np.allclose(offsets, drawn[["predicted", "measured"]])


def test_what_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    bare = trained(tmp_path / "bare", "hn", steps=1, without=("alignment", "binned_predicted"))
    with pytest.raises(ValueError, match="no reading 'geometry' key 'alignment'"):
        figures["geometry-time"](bare)
    with pytest.raises(ValueError, match="binned_predicted"):
        figures["concentration"](bare)
    with pytest.raises(ValueError, match="takes one run directory; 2 were given"):
        figure("concentration", [tmp_path / "bare", tmp_path / "bare"], tmp_path)


def test_a_margin_that_ranks_nothing_still_draws_and_says_so(tmp_path: Path) -> None:
    drawing, frame = figures["concentration"](trained(tmp_path / "zero", "hn", steps=2, gamma=0.0))
    assert frame["slope"].isna().all()
    assert [text.get_text() for text in drawing.axes[0].texts] == ["slope undefined"] * 3
    assert not frame["predicted"].any()


def test_the_command_writes_both(runs: tuple[Run, Run], tmp_path: Path) -> None:
    figure("geometry-time", [run.path for run in runs], tmp_path)
    figure("concentration", [runs[0].path], tmp_path)
    for stem in ("geometry_time", "concentration"):
        for suffix in (".pdf", ".png", ".csv"):
            assert (tmp_path / f"{stem}{suffix}").stat().st_size > 1000
    drawn = pd.read_csv(tmp_path / "concentration.csv")
    assert math.isclose(drawn.loc[drawn["series"] == "equal", "slope"].median(), 1, abs_tol=1e-4)
