"""The job end to end with an encoder made of numbers, its files, Figure 1 and the width curve."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

from gradscope.caption_geometry import load_geometry, measure_captions
from gradscope.data.captions import read_captions
from gradscope.data.content_words import content_words
from gradscope.figures import figures
from gradscope.figures.style import data_colours, new_figure, paper_style, save
from gradscope.geometry_file import CaptionGeometry


@dataclass(frozen=True)
class HashEncoder:
    """A caption -> unit row drawn from its hash: equal captions get equal rows."""

    name: str = "hash"
    context: int = 6

    def embed(self, captions: Sequence[str], progress: object = None) -> tuple[torch.Tensor, int]:
        seeds = [int.from_bytes(hashlib.sha256(c.encode()).digest()[:4], "big") for c in captions]
        rows = torch.stack([torch.randn(16, generator=torch.Generator().manual_seed(s)) + 1.0 for s in seeds])
        rows = torch.nn.functional.normalize(rows, dim=1)
        rows[[c == "broken" for c in captions]] = float("nan")
        return rows, sum(len(c.split()) > self.context for c in captions)


def caption_file(folder: Path, name: str, n: int, *further: str) -> Path:
    path = folder / f"{name}.json"
    rows = [{"filename": f"{i}, a.jpg", "caption": f"A red chair number {i}"} for i in range(n)]
    path.write_text(json.dumps([*rows, *({"filename": f"x{i}", "caption": c} for i, c in enumerate(further))]))
    return path


def measure(folder: Path, name: str, n: int, *further: str, encoder: HashEncoder | None = None) -> CaptionGeometry:
    source = read_captions(str(caption_file(folder, name, n, *further)))
    return measure_captions(source, encoder or HashEncoder(), output=folder / "out")


def test_files_hold_what_was_measured(tmp_path: Path) -> None:
    further = ("A blue table", "A blue table", "", "broken", "one two three four five six seven")
    found = measure(tmp_path, "toy", 40, *further)
    assert (found.n_rows, found.n_empty, found.n_excluded, found.n) == (45, 1, 1, 43)
    assert (found.n_duplicates, found.n_distinct, found.n_truncated) == (2, 43, 1)
    assert len(found.warnings) == 5
    assert found.top_pairs[0].identical
    assert found.top_pairs[0].shared_words == ("blue", "table")
    assert found.hardest_counts.sum() == 43
    again = load_geometry(tmp_path / "out" / "toy")
    for field in fields(CaptionGeometry):
        mine, read = getattr(found, field.name), getattr(again, field.name)
        if isinstance(mine, np.ndarray):
            np.testing.assert_array_equal(mine, read, err_msg=field.name)
        else:
            assert mine == read, field.name
    frame = pd.read_csv(tmp_path / "out" / "toy" / "hardest.csv")
    assert list(frame.columns) == ["index", "id", "neighbour_index", "neighbour_id", "cosine"]
    rows = HashEncoder().embed([c for c in [f"A red chair number {i}" for i in range(40)] + list(further) if c])[0].double()
    cosine = (rows @ rows.T).numpy()
    np.fill_diagonal(cosine, -2)
    assert frame.cosine.to_numpy() == pytest.approx(np.where(np.isnan(rows[:, 0]), np.nan, np.nanmax(cosine, axis=1)), nan_ok=True)
    assert found.provenance["sha256"] == hashlib.sha256((tmp_path / "toy.json").read_bytes()).hexdigest()


def test_tiny_on_foreign_captions_says_that_it_is_no_result(tmp_path: Path) -> None:
    found = measure(tmp_path, "toy", 20, encoder=HashEncoder(name="tiny"))
    assert found.out_of_domain
    assert "not a result" in found.warnings[0]
    figure, _ = figures["1"]([found])
    assert "not a result" in figure.get_suptitle()
    assert not measure(tmp_path, "scenes", 20, encoder=HashEncoder(name="tiny")).out_of_domain


def test_figure_1_draws_densities_of_area_one_and_the_means(tmp_path: Path) -> None:
    both = [measure(tmp_path, "docci_test_captions", 60), measure(tmp_path, "other", 30)]
    figure, frame = figures["1"](both)
    assert set(frame.data) == {"docci test captions", "other"}
    area = ((frame.high - frame.low) * frame.density).groupby([frame.panel, frame.data]).sum()
    assert area.to_numpy() == pytest.approx(np.ones(4))
    assert frame[(frame.panel == "a") & (frame.data == "other")]["count"].sum() == 30 * 29 // 2
    means = {line.get_xdata()[0] for axis in figure.axes for line in axis.lines}
    assert means == {g.mean for g in both} | {g.hardest_mean for g in both}


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["a name of more than twenty-four letters"]])
def test_figure_1_has_no_curve_under_its_legends(names: list[str], tmp_path: Path) -> None:
    edges, found = np.linspace(-1, 1, 201), measure(tmp_path, "a", 60)
    hump = np.rint(1e6 * np.exp(-(((edges[:-1] - 0.5) / 0.2) ** 2) / 2)).astype(np.int64)  # wide, in the middle
    figure, frame = figures["1"]([replace(found, name=name, counts=hump, mean=0.5) for name in names])
    figure.canvas.draw()
    for axis, panel in zip(figure.axes, "ab", strict=True):
        box = axis.get_legend().get_window_extent().transformed(axis.transData.inverted())
        curves = frame[(frame.panel == panel) & (frame.high > box.x0) & (frame.low < box.x1)]
        assert curves.density.max() < box.y0
        means = [line.get_ydata()[1] for line in axis.lines if box.x0 < line.get_xdata()[0] < box.x1]
        assert all(top < box.y0 for top in means)


def test_width_curve_of_equal_captions_ends_at_a_cosine_of_one(tmp_path: Path) -> None:
    figure, frame = figures["width"]([measure(tmp_path, "toy", 0, *["A red chair"] * 20)])
    assert frame.expected_hardest.max() == pytest.approx(1)
    assert all(axis.get_ylim()[1] == 1 for axis in figure.axes)
    assert not any(line.get_clip_on() for axis in figure.axes for line in axis.lines)


def test_width_curve_stops_at_n(tmp_path: Path) -> None:
    _, frame = figures["width"]([measure(tmp_path, "toy", 70)])
    assert frame.set_index("width").expected_hardest.notna().to_dict() == {w: w <= 70 for w in frame.width}


def test_equal_names_and_other_encoders_stay_apart(tmp_path: Path) -> None:
    one = measure(tmp_path, "toy", 20)
    _, frame = figures["1"]([one, one, replace(one, encoder="other")])
    assert list(dict.fromkeys(frame.data)) == ["toy (hash)", "toy (hash) #2", "toy (other)"]


def test_save_writes_three_files_and_leaves_the_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    with paper_style():
        figure = new_figure()
        figure.subplots().plot([0, 1])
    frame = pd.DataFrame({"x": [1]})
    paths = save(figure, frame, tmp_path / "deep" / "v1.2")
    assert [p.name for p in paths] == ["v1.2.pdf", "v1.2.png", "v1.2.csv"]
    assert b"/FontType 42" in paths[0].read_bytes() or b"/Type0" in paths[0].read_bytes()
    first = [p.read_bytes() for p in paths]
    assert [p.read_bytes() for p in save(figure, frame, tmp_path / "deep" / "v1.2")] == first
    assert dict(matplotlib.rcParams) == before


def test_colours_are_distinct() -> None:
    names = ["docci_test", "docci_train", "dci", "long-dci", "mine", "yours"]
    assert len(set(data_colours(names).values())) == len(names)


def test_geometries_that_are_not_there_or_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no geometry"):
        load_geometry(tmp_path)
    with pytest.raises(ValueError, match="at least one geometry"):
        figures["1"]([])
    measure(tmp_path, "toy", 20)
    folder = tmp_path / "out" / "toy"
    lines = (folder / "histogram.csv").read_text().splitlines()
    (folder / "histogram.csv").write_text("\n".join(lines[:-30]) + "\n")
    with pytest.raises(ValueError, match="do not belong"):
        load_geometry(folder)
    with pytest.raises(ValueError, match="a pair needs two"):
        measure(tmp_path, "one", 1)


def test_figures_and_geometry_files_reach_no_torch() -> None:
    imports = "import sys, gradscope.caption_geometry; from gradscope.figures import figures; figures.names()"
    code = f"{imports}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_content_words() -> None:
    assert content_words("The red chair's leg, and a RED café-table (42).") == ["red", "chair's", "leg", "café-table", "42"]
