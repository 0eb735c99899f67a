"""The commands of the README on public data sets, one each, on miniatures of the official layouts: the same names on disk, the same
flags, a few records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from gradscope.cli import app
from gradscope.data.identity import load_items
from gradscope.data.source import held_out, open_data
from gradscope.runlog import Run


@pytest.fixture(scope="module")
def public(tmp_path_factory, scenes_folder) -> Path:
    """$GRADSCOPE_DATA with docci (64 + 12 + 4), urban1k (10) and GOAL's list of dci (6), made of scenes."""
    root = tmp_path_factory.mktemp("public")
    train = [json.loads(line) for line in (scenes_folder / "train.jsonl").read_text().splitlines()]
    test = [json.loads(line) for line in (scenes_folder / "test.jsonl").read_text().splitlines()]
    (root / "docci" / "images").mkdir(parents=True)
    lines = []
    for split, rows in {"train": train[:64], "test": test[:12], "qual_test": test[12:16]}.items():
        for number, row in enumerate(rows):
            identity = f"{split}_{number:05d}"
            shutil.copy(scenes_folder / row["image"], root / "docci" / "images" / f"{identity}.jpg")
            described = {"example_id": identity, "split": split, "image_file": f"{identity}.jpg", "description": row["captions"][0]}
            lines.append(json.dumps(described))
    (root / "docci" / "docci_descriptions.jsonlines").write_text("\n".join(lines))
    for folder in ("image", "caption"):
        (root / "urban1k" / "Urban1k" / folder).mkdir(parents=True)
    # Seven unseen pictures, then three of the training set under other names: one with its caption, two with another.
    for number, row in enumerate([*test[20:27], *train[:3]], 1):
        shutil.copy(scenes_folder / row["image"], root / "urban1k" / "Urban1k" / "image" / f"{number}.jpg")
        text = row["captions"][0] if number < 9 else f"Another caption, number {number}."
        (root / "urban1k" / "Urban1k" / "caption" / f"{number}.txt").write_text(text)
    (root / "dci").mkdir()
    listed = [{"filename": f"../somewhere/photos/sa_{n}.jpg", "caption": row["captions"][0]} for n, row in enumerate(test[30:36])]
    (root / "dci" / "dci_test_captions.json").write_text(json.dumps(listed))
    return root


@pytest.fixture(scope="module")
def run(public, tmp_path_factory, small_encoder):
    """``run("eval", ...)`` -> what it printed; every command ends with exit code 0."""
    home = tmp_path_factory.mktemp("home")

    def go(*words: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words], env={"GRADSCOPE_DATA": str(public), "COLUMNS": "160"})
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    go(
        *("train", "--data", "docci", "--encoder", small_encoder, "--objective", "hn", "--batch-size", 8, "--accumulate", 2),
        *("--accumulate-mode", "narrow", "--epochs", 2, "--lr", "1e-3", "--log-grads", "--probe-every", 2, "--device", "cpu"),
        *("--output", home / "docci-hn"),
    )
    return home, go


def test_fine_tune_on_docci(run):
    home, _ = run
    done = Run(home / "docci-hn")
    assert done.done
    assert done.provenance["data"]["records"] == 61, "64 without the 5 % held out of train"
    assert "published are 9,647" in done.provenance["data"]["notes"][0]
    assert len(load_items(home / "docci-hn" / "arrays" / "train_items.npz")) == 61
    assert set(done.readings["quantity"]) >= {"loss", "residual", "zeros", "gradient"}


def test_evaluate_on_urban1k_counts_what_training_had_seen(run, public, monkeypatch):
    """Copies under other names are found by content, and the recall without them is given."""
    home, go = run
    said = go("eval", home / "docci-hn", "--data", "urban1k", "--device", "cpu", "--output", home / "urban.json")
    assert "urban1k test (10 images, 10 captions)" in said
    content = json.loads((home / "urban.json").read_text())
    monkeypatch.setenv("GRADSCOPE_DATA", str(public))
    trained = {record.id for record in held_out(open_data("docci").records("train"), 0.05, 42)[0]}
    copies = [f"train_{number:05d}" in trained for number in range(3)]  # pictures 8, 9 and 10
    counts = content["contamination"]["counts"]
    assert counts["content"] == counts["any"] == sum(copies) > 0
    assert counts["caption"] == copies[0]
    assert counts["id"] == counts["file"] == 0
    assert content["contamination"]["removed"][0]["n_queries"] == 10 - sum(copies)


def test_both_protocols_of_docci(run):
    home, go = run
    assert "docci test+qual_test (16 images, 16 captions)" in go("eval", home / "docci-hn", "--data", "docci", "--device", "cpu")
    assert "docci test (12 images" in go("eval", home / "docci-hn", "--data", "docci", "--split", "test", "--device", "cpu")


def test_geometry_of_three_sets_and_figure_1(run, small_encoder):
    home, go = run
    said = go(
        *("caption-geometry", "docci", "dci", "urban1k", "--encoder", small_encoder, "--device", "cpu", "--output", home / "geometry")
    )
    assert all(name in said for name in ("docci", "dci", "urban1k"))
    go("figure", 1, home / "geometry" / "docci", home / "geometry" / "dci", home / "geometry" / "urban1k", "--output", home / "drawn")
    assert (home / "drawn" / "figure1.pdf").stat().st_size > 1000
    assert set(pd.read_csv(home / "drawn" / "figure1.csv")["data"]) >= {"docci", "dci", "urban1k"}


def test_stored_embeddings_give_the_same_numbers_without_the_model(run):
    home, go = run
    kept = home / "kept.safetensors"
    go("eval", home / "docci-hn", "--data", "docci", "--device", "cpu", "--save-embeddings", kept, "--output", home / "first.json")
    go("eval", kept, "--output", home / "again.json")
    first, again = (json.loads((home / name).read_text())["metrics"] for name in ("first.json", "again.json"))
    assert first == again
    assert np.isfinite([row["value"] for row in first]).all()
