"""The figures of evaluations draw what the files say, and refuse what is none."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradscope.cli.figures import figure
from gradscope.evaluate import Details, Embedded, details, score
from gradscope.evaluation_file import Evaluation, evaluation_content, hardness_table, write_json
from gradscope.figures import figures
from gradscope.figures.evaluations import label_of
from gradscope.metrics.hardness_recall import HardnessBin
from gradscope.protocol import Protocol


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    image, noise = (torch.nn.functional.normalize(torch.randn(130, 8), dim=-1) for _ in range(2))
    embedded = Embedded(
        ids=tuple(map(str, range(130))), image=image, text=torch.nn.functional.normalize(image + noise, dim=-1),
        image_of_text=torch.arange(130), truncated=0, digests=("0" * 64,) * 130,
    )  # fmt: skip
    result = score(embedded, resamples=20)
    protocol = Protocol(
        encoder="runs/hn", data="docci", split="test", sha256="", images=130, captions=130, expected=130, missing=0, bad=0, context=77,
        truncated=0, preprocessing="", precision="",
    )  # fmt: skip
    return json.loads(json.dumps(evaluation_content(Evaluation(protocol=protocol, result=result, details=details(embedded, result)))))


@pytest.mark.parametrize(("name", "key", "x"), [("hardness", "hardness", "mean_cosine"), ("gallery", "gallery_curve", "size")])
def test_what_is_drawn_is_what_was_written(content: dict[str, Any], name: str, key: str, x: str) -> None:
    other = copy.deepcopy(content)
    other["protocol"]["encoder"] = "runs/infonce"
    drawing, frame = figures[name]([content, other, other])
    assert frame["evaluation"].unique().tolist() == ["docci test, hn", "docci test, infonce (1)", "docci test, infonce (2)"]
    written = content[key]["bins"] if key == "hardness" else content[key]
    for (_, direction), part in frame[frame["evaluation"] == "docci test, hn"].groupby(["evaluation", "direction"]):
        expected = [p for p in written if p["direction"] == direction]
        assert part["x"].tolist() == [p[x] for p in expected]
        assert part["value"].tolist() == [p["value"] for p in expected]
        axes = drawing.axes[0 if direction == "i2t" else 1]
        line = axes.containers[0].lines[0]
        assert line.get_xdata().tolist() == part["x"].tolist()
        assert line.get_ydata().tolist() == pytest.approx((100 * part["value"]).tolist())
    assert len(drawing.axes[0].containers) == 3


def test_round_sizes_and_the_measured_ones_are_marked(content: dict[str, Any]) -> None:
    drawing, _ = figures["gallery"]([content])
    assert drawing.axes[0].get_xticks().tolist() == [10, 20, 50, 100, 130]
    drawing.draw_without_rendering()
    boxes = [label.get_window_extent() for label in drawing.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    smaller = copy.deepcopy(content)
    smaller["gallery_curve"] = [point for point in smaller["gallery_curve"] if point["size"] <= 20] + [
        {**point, "size": 48} for point in smaller["gallery_curve"] if point["size"] == 20
    ]
    assert figures["gallery"]([content, smaller])[0].axes[0].get_xticks().tolist() == [10, 20, 48, 100, 130]


def test_points_and_intervals_on_the_edge_are_whole(content: dict[str, Any]) -> None:
    for name in ("hardness", "gallery"):
        for bars in figures[name]([content])[0].axes[0].containers:
            parts = [bars.lines[0], *bars.lines[1], *bars.lines[2]]
            assert not any(part.get_clip_on() for part in parts)


def test_hardness_edges_have_the_digits_that_tell_them_apart() -> None:
    def edges(*cosines: float) -> list[str]:
        bins = [
            HardnessBin(direction="i2t", low_cosine=low, high_cosine=high, mean_cosine=low, n_queries=9, value=0.5, low=0.4, high=0.6)
            for low, high in itertools.pairwise(cosines)
        ]
        return [str(cell) for cell in hardness_table(Details(hardness=bins, curve=[])).columns[1].cells]

    assert edges(0.5, 0.7, 0.9) == ["0.500 to 0.700", "0.700 to 0.900"]
    assert edges(0.99912, 0.99934, 0.999941) == ["0.9991 to 0.9993", "0.9993 to 0.9999"]
    assert edges(0.9, 0.9, 1.0) == ["0.900 to 0.900", "0.900 to 1.000"]
    assert edges(0.5, 0.5 + 1e-12) == ["0.500000000 to 0.500000000"]


def test_the_legend_is_below_the_panels_and_one_hundred_percent_is_inside(content: dict[str, Any]) -> None:
    content = copy.deepcopy(content)
    for point in content["gallery_curve"]:
        point["value"] = point["low"] = point["high"] = 1.0
    drawing, _ = figures["gallery"]([content])
    drawing.draw_without_rendering()
    (legend,) = drawing.legends
    assert [text.get_text() for text in legend.get_texts()] == ["docci test, hn"]
    for axes in drawing.axes:
        assert axes.get_legend() is None
        assert legend.get_window_extent().y1 < axes.xaxis.get_tightbbox().y0
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > 100


def test_other_files_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one evaluation"):
        figures["hardness"]([])
    bare = {key: value for key, value in content.items() if key not in ("hardness", "gallery_curve")}
    for name in ("hardness", "gallery"):
        with pytest.raises(ValueError, match=r"has no '(hardness|gallery_curve)'; evaluate again"):
            figures[name]([bare])
    path = write_json(tmp_path / "e.json", content)
    figure("gallery", [path], output=tmp_path / "figures")
    assert {p.suffix for p in (tmp_path / "figures").iterdir()} == {".pdf", ".png", ".csv"}
    for text in ("no json", "[]", '{"schema": "gradscope.comparison"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not the JSON of an evaluation"):
            figure("hardness", [path], output=None)
    with pytest.raises(ValueError, match="not the JSON of an evaluation"):
        figure("hardness", [tmp_path / "none.json"], output=None)


def test_a_line_of_shards_has_a_plain_name() -> None:
    protocol = {"data": "https://host/set-{000..031}.tar", "split": "test", "encoder": "runs/one"}
    assert label_of({"protocol": protocol}) == "set-000-031 test, one"
