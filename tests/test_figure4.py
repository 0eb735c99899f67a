"""Figure 4, the start-widths figure and ``gradscope figure``, on small runs written through RunLog."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from gradscope.cli.figures import figure
from gradscope.figures import figures
from gradscope.figures.figure4 import TERMS, _plain, _power, figure4
from gradscope.figures.style import paper_style, save
from gradscope.figures.width_start import start_widths
from gradscope.runlog import Run, RunLog

PER_EPOCH = 12


def reading(step: int, quantity: str, term: str, key: str, value: float) -> dict:
    return {"step": step, "quantity": quantity, "term": term, "key": key, "value": value, "unit": "", "stamps": "width 16"}


def measured(step: int, loss: dict[str, float], norm: dict[str, float], cosine: float) -> list[dict]:
    rows = [reading(step, "gradient", "pair", "cosine", cosine)]
    for term in TERMS:
        rows += [
            reading(step, "loss", term, "log10_true", loss[term]),
            reading(step, "saturation", term, "below_1e-3", float(loss[term] < -3)),
            reading(step, "gradient", term, "log10_norm", norm[term]),
            reading(step, "zeros", term, "all_zero.parameters", float(norm[term] == -math.inf)),
        ]
    return rows


def evaluated(step: int, epoch: int, recall: float, split: str = "val") -> list[dict]:
    names = {"step": step, "epoch": epoch, "dataset": "scenes", "split": split, "metric": "R@1", "protocol": ""}
    numbers = {"value": recall, "low": recall - 0.02, "high": recall + 0.01, "n_queries": 50, "n_candidates": 50}
    return [{**names, **numbers, "direction": direction} for direction in ("i2t", "t2i")]


def make_run(
    path: Path, trained: str, *, epochs: int = 3, validate: bool = True, probe: bool = True, broken: bool = True, constant: float = 0.0
) -> Run:
    """Both objectives' losses and norms are 10 to the ``constant`` if it is not 0, random otherwise."""
    generator = np.random.default_rng()
    with RunLog.create(path, recipe_toml=f'[objective]\nname = "{trained}"\n', provenance={}) as log:
        log.write_evals(evaluated(0, 0, 0.5, "val" if validate else "test"))
        for step in range(1, epochs * PER_EPOCH + 1):
            epoch = (step - 1) // PER_EPOCH + 1
            log.write_steps([{"step": step, "samples": step, "epoch": epoch, "loss": 0.1}])
            loss = {"infonce": generator.normal(-4, 1), "hn": generator.normal(-1, 1)}
            norm = {term: value + generator.normal() for term, value in loss.items()}
            if constant:
                loss = norm = dict.fromkeys(TERMS, constant)
            cosine = float(generator.uniform(-1, 1))
            if broken and step % 5 == 0:
                norm["infonce"], cosine = -math.inf, math.nan
            if broken and step == 7:
                loss["hn"] = norm["hn"] = math.nan
            if probe:
                log.write_readings(measured(step, loss, norm, cosine))
            if step % PER_EPOCH == 0:
                log.write_evals(evaluated(step, epoch, 0.5 + 0.1 * epoch, "val" if validate else "test"))
        log.finish()
    return Run(path)


def series(frame: pd.DataFrame, name: str, term: str, trajectory: str = "hn") -> pd.DataFrame:
    return frame[(frame["series"] == name) & (frame["term"] == term) & (frame["trajectory"] == trajectory)]


def raw(run: Run, quantity: str, key: str, term: str) -> dict[int, dict[int, float]]:
    """{epoch: {step: value}}, straight from the readings."""
    found: dict[int, dict[int, float]] = {}
    for row in run.readings.to_dict("records"):
        if (row["quantity"], row["key"], row["term"]) == (quantity, key, term):
            found.setdefault((row["step"] - 1) // PER_EPOCH + 1, {})[row["step"]] = row["value"]
    return found


def middle(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    kept = sorted(value for value in values if not math.isnan(value))
    return next(value for value in kept if sum(other <= value for other in kept) >= share * len(kept))


def test_the_frame_equals_plain_loops_over_the_readings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "hn", "hn")
    _, frame = figure4(run)
    for term in TERMS:
        losses, norms = raw(run, "loss", "log10_true", term), raw(run, "gradient", "log10_norm", term)
        for epoch in (1, 2, 3):
            share = series(frame, "share_below_1e-3", term).set_index("epoch").loc[epoch]
            assert share["value"] == pytest.approx(np.mean([value < -3 for value in losses[epoch].values()]))
            quartiles = series(frame, "log10_norm_quartiles", term).set_index("epoch").loc[epoch]
            values = list(norms[epoch].values())
            assert [quartiles["low"], quartiles["high"]] == [middle(values, q) for q in (0.25, 0.75)]
            assert quartiles["value"] == pytest.approx(statistics.median(v for v in values if not math.isnan(v)))
        zeros = series(frame, "all_zero", term)["value"].sum()
        assert zeros == sum(value == -math.inf for epoch in norms.values() for value in epoch.values())
    ratio = series(frame, "log10_norm_ratio_quartiles", "pair").set_index("epoch")
    hn, infonce = (raw(run, "gradient", "log10_norm", term) for term in ("hn", "infonce"))
    for epoch in (1, 2, 3):
        gaps = [hn[epoch][step] - infonce[epoch][step] for step in hn[epoch]]
        expected = statistics.median(gap for gap in gaps if not math.isnan(gap))
        assert ratio.loc[epoch, "value"] == pytest.approx(expected)


def test_the_error_is_one_minus_recall_with_its_limits_swapped(tmp_path: Path) -> None:
    _, frame = figure4(make_run(tmp_path / "hn", "hn"))
    error = frame[(frame["series"] == "error_percent") & (frame["direction"] == "t2i")].set_index("epoch")
    assert error["value"].tolist() == pytest.approx([50, 40, 30, 20])
    assert error["low"].tolist() == pytest.approx([49, 39, 29, 19])
    assert error["high"].tolist() == pytest.approx([52, 42, 32, 22])


def words(drawing: Figure) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in drawing.findobj(Text))  # type: ignore[attr-defined]


def test_whose_trajectory_is_said_and_the_order_of_two_runs_does_not_matter(tmp_path: Path) -> None:
    hn, infonce = make_run(tmp_path / "hn", "hn"), make_run(tmp_path / "infonce", "infonce", epochs=2)
    drawing, frame = figure4(hn, infonce)
    pd.testing.assert_frame_equal(frame, figure4(infonce, hn)[1])
    assert set(frame["trajectory"]) == {"hn", "infonce"}
    for label in ("InfoNCE along the HN run", "HN along the HN run", "InfoNCE on its own run"):
        assert label in words(drawing)
    own = raw(infonce, "loss", "log10_true", "infonce")[1]
    drawn = series(frame, "log10_loss", "infonce", "infonce")
    assert drawn[drawn["epoch"] == 1]["value"].tolist() == list(own.values())
    assert "InfoNCE along the InfoNCE run" in words(figure4(infonce)[0])


def test_zeros_and_undefined_cosines_are_counted_in_words(tmp_path: Path) -> None:
    drawing, _ = figure4(make_run(tmp_path / "hn", "hn"))
    assert "InfoNCE 7/36, HN 0/36" in words(drawing)
    assert "undefined in 7" in words(drawing)


def test_an_axis_holds_the_data_and_the_threshold_and_its_ticks_are_numbers(tmp_path: Path) -> None:
    drawing, _ = figure4(make_run(tmp_path / "healthy", "hn", constant=0.3, broken=False))
    losses, norms = drawing.axes[:2]
    assert losses.get_ylim() == pytest.approx((-3.5, 0.7))
    assert "floor of" not in words(drawing)
    assert losses.get_title(loc="left").startswith("(a) loss")
    assert norms.get_yticks().tolist() == pytest.approx([0, math.log10(2), math.log10(5)])
    drawing.draw_without_rendering()
    assert [tick.get_text() for tick in norms.get_yticklabels()] == ["1", "2", "5"]
    assert "median: 1.0 (epoch 1), 1.0 (epoch 3)" in words(drawing)
    saturated, _ = figure4(make_run(tmp_path / "saturated", "hn", constant=-11.5, broken=False))
    name = next(text for text in saturated.axes[0].texts if "floor of" in text.get_text())
    assert name.get_position()[0] > 1, "beside the panel, where no curve runs"
    assert saturated.axes[0].get_ylim() == pytest.approx((-11.9, -2.5))


@pytest.mark.parametrize(
    ("exponent", "number", "ratio"),
    [(-0.0, "1", "1.0"), (0.001, "1.00231", "1.0"), (math.log10(25), "25", "25"), (math.log10(5e-3), "0.005", "$10^{-2.3}$"),
     (math.log10(2e-7), r"$2\times10^{-7}$", "$10^{-6.7}$"), (6, r"$1\times10^{6}$", "$10^{6.0}$"),
     (-math.inf, None, "0"), (math.inf, None, "∞")],
)  # fmt: skip
def test_powers_of_ten_in_words(exponent: float, number: str | None, ratio: str) -> None:
    assert _power(exponent) == ratio
    assert number is None or _plain(exponent) == number


def test_the_legend_looks_as_the_curves_of_the_errors(tmp_path: Path) -> None:
    drawing, _ = figure4(make_run(tmp_path / "hn", "hn"), make_run(tmp_path / "infonce", "infonce"))
    labels = {line.get_label(): line for line in drawing.legends[0].get_lines()}
    for container in drawing.axes[2].containers:
        curve, shown = container.lines[0], labels[container.get_label()]
        assert (curve.get_color(), curve.get_marker(), curve.get_linestyle()) == (
            shown.get_color(),
            shown.get_marker(),
            shown.get_linestyle(),
        )
        assert curve.get_markerfacecolor() == shown.get_markerfacecolor()
    names = [container.get_label() for container in drawing.axes[2].containers]
    assert names == [f"(c) {name}, {way}" for name in ("HN", "InfoNCE") for way in ("image→text", "text→image")]
    box = drawing.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= drawing.bbox.x1


@pytest.mark.parametrize("epochs", [1, 3, 30])
@pytest.mark.parametrize("broken", [True, False])
def test_three_files_are_written_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder, epochs: int, broken: bool) -> None:
    run = make_run(tmp_path / "hn", "hn", epochs=epochs, broken=broken)
    drawing, frame = figure4(run)
    paths = save(drawing, frame, tmp_path / "figure4")
    assert all(path.stat().st_size > 1000 for path in paths)
    assert len(pd.read_csv(paths[2])) == len(frame)
    assert drawing.get_figwidth() == 3.25
    assert not [str(warning.message) for warning in recwarn]


def test_the_layout_is_that_of_the_png_alone_and_comes_back(tmp_path: Path) -> None:
    """Twin: the same figure written by matplotlib, which places it for each file."""
    run = make_run(tmp_path / "hn", "hn")
    (drawing, frame), (twin, _) = figure4(run), figure4(run)
    engine, dpi = drawing.get_layout_engine(), drawing.dpi
    save(drawing, frame, tmp_path / "figure4")
    assert (drawing.get_layout_engine(), drawing.dpi) == (engine, dpi)
    with paper_style():
        twin.savefig(tmp_path / "twin.png", dpi=300, metadata={"Software": None})
    assert (tmp_path / "figure4.png").read_bytes() == (tmp_path / "twin.png").read_bytes()


def test_a_run_in_which_nothing_is_finite_is_still_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunLog.create(path, recipe_toml='[objective]\nname = "hn"\n', provenance={}) as log:
        log.write_steps([{"step": step, "samples": step, "epoch": 1, "loss": math.nan} for step in (1, 2)])
        for step in (1, 2):
            log.write_readings(measured(step, dict.fromkeys(TERMS, math.nan), dict.fromkeys(TERMS, math.nan), math.nan))
        log.write_evals(evaluated(2, 1, 0.5))
    drawing, frame = figure4(Run(path))
    save(drawing, frame, tmp_path / "figure4")
    assert "undefined" in words(drawing)


def test_missing_data_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--log-grads"):
        figure4(make_run(tmp_path / "plain", "hn", probe=False))
    with pytest.raises(ValueError, match=r"evaluated: test.*data\.val_share"):
        figure4(make_run(tmp_path / "unvalidated", "hn", validate=False))


def test_runs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    hn, other = make_run(tmp_path / "hn", "hn"), make_run(tmp_path / "other", "hn")
    with pytest.raises(ValueError, match="trained with infonce"):
        figure4(hn, other)
    with pytest.raises(ValueError, match=r"both .* were trained with infonce"):
        figure4(make_run(tmp_path / "one", "infonce"), make_run(tmp_path / "two", "infonce"))
    with pytest.raises(ValueError, match="first is longer"):
        figure4(hn, make_run(tmp_path / "longer", "infonce", epochs=4))
    with pytest.raises(ValueError, match=r"objective\.name 'siglip'"):
        figure4(make_run(tmp_path / "siglip", "siglip"))


def test_start_widths_counts_shares_and_lost_batches() -> None:
    frame = pd.DataFrame({"width": [16, 16, 16, 16, 32], "batch": range(5), "log10_true": [-4, -5, -2, math.nan, -1]})
    drawing, drawn = start_widths(frame)
    assert drawn.groupby("width")["share_below_1e-3"].first().to_dict() == {16: 0.5, 32: 0.0}
    assert drawn.groupby("width")["batches"].first().to_dict() == {16: 4, 32: 1}
    assert "50 %, 1 lost" in words(drawing)
    with pytest.raises(ValueError, match="log10_true"):
        start_widths(frame.drop(columns="log10_true"))
    with pytest.raises(ValueError, match="rows"):
        start_widths(frame.iloc[:0])


def test_the_command_writes_beside_the_run_or_where_told(tmp_path: Path) -> None:
    make_run(tmp_path / "hn", "hn")
    figure("4", [tmp_path / "hn"])
    assert {path.name for path in (tmp_path / "hn" / "figures").iterdir()} == {"figure4.pdf", "figure4.png", "figure4.csv"}
    table = tmp_path / "starts.csv"
    pd.DataFrame({"width": [16], "batch": [0], "log10_true": [-4.0]}).to_csv(table, index=False)
    figure("start-widths", [table], output=tmp_path / "out")
    assert (tmp_path / "out" / "start_widths.png").exists()


@pytest.mark.parametrize(
    ("name", "sources", "message"),
    [
        ("44", ["x"], "unknown figure '44'"),
        ("4", ["x"], "not a run directory"),
        ("4", ["x", "y", "z"], "3 were given"),
        ("1", ["x"], "caption-geometry"),
        ("start-widths", ["x"], "CSV"),
    ],
)
def test_the_command_answers_bad_input_in_one_line(name: str, sources: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        figure(name, [Path(source) for source in sources])
    assert "\n" not in str(caught.value)


def test_figures_are_registered_and_need_neither_torch_nor_a_display(tmp_path: Path) -> None:
    assert {"4", "start-widths"} <= set(figures.names())
    make_run(tmp_path / "hn", "hn")
    code = (
        "import sys\nfrom pathlib import Path\nfrom gradscope.cli.figures import figure\n"
        f"figure('4', [Path({str(tmp_path / 'hn')!r})])\nsys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    )
    environment = {"DISPLAY": "localhost:64.0", "MPLBACKEND": "TkAgg", "HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
