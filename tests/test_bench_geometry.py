"""The benchmarks of geometry and ranks at toy sizes: every arm does its work, and those that do the same work agree."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from gradscope.metrics.geometry import caption_geometry
from gradscope.metrics.ranks import ranks

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(file: str, name: str):
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


geometry, ranking = load("geometry", "bench_geometry"), load("ranks", "bench_ranks")


def test_the_arms_of_geometry_agree():
    rows = geometry.rows_in_a_cone(400, 32)
    found = caption_geometry(rows)
    assert found.mean == pytest.approx(0.5, abs=0.15)
    assert found.repeated == 1
    counts, best, mean = geometry.values(rows)
    assert counts.tolist() == found.counts.tolist()
    assert best.numpy() == pytest.approx(found.hardest, abs=1e-6)
    assert mean == found.mean
    twice, hardest, mean = geometry.full_matrix(rows)  # counts each pair twice, and the diagonal in the last bin
    assert hardest == pytest.approx(found.hardest, abs=1e-6)
    assert mean == pytest.approx(found.mean, abs=1e-6)
    assert np.abs(twice[:-1] / 2 - found.counts[:-1]).max() <= 2


def test_geometry_from_end_to_end(tmp_path, capsys):
    geometry.main(["--rows", "500", "--width", "16", "--rounds", "1", "--output", str(tmp_path)])
    frame = pd.read_csv(tmp_path / "geometry.csv")
    assert frame["arm"].tolist() == ["product", "values", "all", "faiss", "full matrix"]
    assert (frame["seconds"] > 0).all()
    assert frame.loc[0, "ratio"] == 1.0
    said = json.loads((tmp_path / "geometry.json").read_text())
    assert float(said["notes"]["ours - faiss, largest difference of a hardest cosine"]) < 1e-5
    assert "fp32 products" in capsys.readouterr().out


def test_large_matrices_are_left_out(tmp_path):
    ranking.main(["--rows", "300", "--width", "16", "--rounds", "1", "--sort-up-to", "299", "--output", str(tmp_path)])
    assert pd.read_csv(tmp_path / "ranks.csv")["arm"].tolist() == ["product", "ours", "untrained"]
    with pytest.raises(SystemExit, match="GB are free"):
        ranking.refuse_too_large(10_000_000)


def test_the_arms_of_ranks_agree():
    images, texts, owner = ranking.gallery(300, 64, noise=1.0)
    found = ranks(images, texts, owner)
    for one, places, near in zip(found, ranking.by_sorting(images, texts), ranking.by_topk(images, texts), strict=True):
        assert torch.equal(one.greater, places)
        assert torch.equal(one.greater < 10, near)
    assert float((found[0].greater == 0).double().mean()) > 0.9


def test_ranks_from_end_to_end(tmp_path):
    ranking.main(["--rows", "300", "--width", "16", "--rounds", "1", "--output", str(tmp_path)])
    frame = pd.read_csv(tmp_path / "ranks.csv")
    assert frame["arm"].tolist() == ["product", "ours", "untrained", "topk", "argsort"]
    assert "places are not ours" in json.loads((tmp_path / "ranks.json").read_text())["notes"]["argsort i2t"]


@pytest.mark.parametrize("module", [geometry, ranking])
def test_nothing_to_do_is_refused(module):
    with pytest.raises(SystemExit, match="--rows must be at least 2"):
        module.main(["--rows", "1"])
