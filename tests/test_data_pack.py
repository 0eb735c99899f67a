"""``gradscope data pack``: what comes out of the tar files is what went in, WebDataset reads it too, and a stopped pack goes on."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from shard_files import pairs, picture, tar_of
from test_distributed_cli import Together
from test_resume import assert_equal_runs, train_until, weights

from gradscope.cli import main
from gradscope.console import out
from gradscope.data.batching import Pixels, decoded
from gradscope.data.images import load_rgb
from gradscope.data.members import content
from gradscope.data.pack import Packer, Sizes, bytes_of
from gradscope.data.pack_members import key_of
from gradscope.data.pixels import PixelPath
from gradscope.data.shard_index import beside
from gradscope.data.shard_names import MANIFEST
from gradscope.data.source import open_data
from gradscope.recipe import resolve
from gradscope.runlog import Run
from gradscope.train import train

ODD = [
    "plain",
    "photo.v2.final",
    ".hidden",
    "a/b.c/d",
    "100% sure?",
    "naïve é",
    "赤い 椅子",
    "__meta__",
    "x" * 180,
    "..",
    "-",
    "A\\B",
    "[x]{1,2}",
]


def quiet(line: str) -> None:
    """Lines for the user."""


def packed(source: Path, output: Path, *splits: str, **sizes: int) -> dict:
    found = open_data(str(source))
    return dict(Packer(sizes=Sizes(**sizes), say=quiet)(found, splits or found.splits(), output))


def same_records(one: Path, two: Path, split: str, pictures: bool = True) -> None:
    ours, theirs = open_data(str(one)).read(split).records, open_data(str(two)).read(split).records
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert (a.id, a.captions, dict(a.aux)) == (b.id, b.captions, dict(b.aux))
        assert [(s.caption, s.box) for s in a.segments] == [(s.caption, s.box) for s in b.segments]
        for x, y in [(a.image, b.image), *((s.image, t.image) for s, t in zip(a.segments, b.segments, strict=True))]:
            assert (x is None) == (y is None)
            if pictures and x is not None:
                assert content(x) == content(y)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A data set with everything a record can hold."""
    folder = tmp_path / "own"
    folder.mkdir()
    kinds = ["jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff"]
    rows = []
    for k, identity in enumerate(ODD):
        ending = kinds[k % len(kinds)]
        name = f"pic.{k}.{ending}" if k else "no_ending"
        kind = {"jpg": "JPEG", "tif": "TIFF"}.get(ending, ending.upper())
        (folder / name).write_bytes(picture(kind, 20))
        (folder / f"crop{k}.png").write_bytes(picture("PNG", 5))
        segments = [
            {"caption": "with box", "box": [1.5, 2.25, 9.1, 10]},
            {"caption": "with crop", "image": f"crop{k}.png"},
            {"caption": "lost", "image": "nowhere.png"},
        ]
        captions = [f"caption {k} of {identity}\nin two lines", "second: café 赤", *(["x"] if k % 2 else [])]
        rows.append(
            {
                "id": identity,
                "image": name,
                "captions": captions,
                "aux": {"k": k, "deep": [1, {"a": None}]},
                "segments": segments[: k % 4],
            }
        )
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_everything_a_record_holds_comes_back(own, tmp_path):
    manifest = packed(own, tmp_path / "out", records=4)
    assert [shard["records"] for shard in manifest["splits"]["test"]["shards"]] == [4, 4, 4, 1]
    ours, theirs = open_data(str(own)).read("test"), open_data(str(tmp_path / "out")).read("test")
    lost = [s for record in ours.records for s in record.segments if s.caption == "lost"]
    assert [note for note in theirs.notes if f"{len(lost)} stored crops" in note]
    rows = [json.loads(line) for line in (own / "test.jsonl").read_text().splitlines()]
    for row in rows:
        row["segments"] = [{k: v for k, v in s.items() if s.get("image") != "nowhere.png" or k != "image"} for s in row["segments"]]
    (own / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    same_records(own, tmp_path / "out", "test")
    for tar in (tmp_path / "out").glob("*.tar"):  # an index made anew says the same
        beside(tar).unlink()
    same_records(own, tmp_path / "out", "test")
    (tmp_path / "out" / MANIFEST).unlink()
    same_records(own, tmp_path / "out", "test")


def test_webdataset_reads_every_pair(own, tmp_path):
    packed(own, tmp_path / "out", records=5)
    records = open_data(str(own)).read("test").records
    samples = list(webdataset.WebDataset(f"{tmp_path}/out/test-{{000000..000002}}.tar", shardshuffle=False))
    assert len(samples) == len(records)
    for sample, record in zip(samples, records, strict=True):
        assert unquote(sample["__key__"]) == record.id
        pictures = [value for ending, value in sample.items() if ending in ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff")]
        assert pictures == [Path(record.image).read_bytes()]
        assert sample["txt"].decode() == record.captions[0]
        assert json.loads(sample["json"])["captions"] == list(record.captions)


def test_keys_have_no_dot_and_give_the_id_back():
    for identity in [*ODD, *(chr(c) for c in range(1, 500))]:
        assert "." not in key_of(identity)
        assert unquote(key_of(identity)) == identity
    assert key_of("plain_7-a") == "plain_7-a"


def test_the_same_data_give_the_same_bytes(own, tmp_path):
    first = packed(own, tmp_path / "one", records=3)
    time.sleep(1.1)
    second = packed(own, tmp_path / "two", records=3)
    assert first == second
    for shard in first["splits"]["test"]["shards"]:
        bytes_ = (tmp_path / "one" / shard["name"]).read_bytes()
        assert bytes_ == (tmp_path / "two" / shard["name"]).read_bytes()
        assert (hashlib.sha256(bytes_).hexdigest(), len(bytes_)) == (shard["sha256"], shard["bytes"])


def test_a_size_bounds_shards(scenes_folder, tmp_path):
    limit = 200_000
    shards = packed(scenes_folder, tmp_path / "out", "test", bytes=limit)["splits"]["test"]["shards"]
    assert len(shards) > 2
    assert all(limit - 30_000 < shard["bytes"] <= limit for shard in shards[:-1])
    assert shards[-1]["bytes"] <= limit
    one = packed(scenes_folder, tmp_path / "each", "test", bytes=1)["splits"]["test"]
    assert [shard["records"] for shard in one["shards"]] == [1] * 64
    assert one["notes"][-1] == "64 of 64 shards are larger than 1 byte, because one record alone needs more (when packed)"
    same_records(scenes_folder, tmp_path / "each", "test")


@pytest.mark.parametrize(("amount", "count"), [("1GB", 10**9), ("500 MB", 5 * 10**8), ("1.5gib", 3 * 2**29), ("77", 77), ("2k", 2000)])
def test_amounts(amount, count):
    assert bytes_of(amount) == count


@pytest.mark.parametrize("amount", ["", "0", "x", "1 PB", "-5MB", "1GB2"])
def test_amounts_that_are_none(amount):
    with pytest.raises(ValueError, match="--shard-size is a number of bytes"):
        bytes_of(amount)


def test_smaller_pictures_and_their_boxes(tmp_path):
    """Boxes keep the share of the picture that they had."""
    own = tmp_path / "own"
    own.mkdir()
    levels = np.zeros((300, 500, 3), np.uint8)
    levels[50:200, 100:350] = 255
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(np.rot90(levels)).save(own / "a.jpg", exif=turned, quality=100)
    (own / "b.png").write_bytes(picture("PNG", 40))
    segments = [{"caption": "white", "box": [100, 50, 350, 200]}]
    rows = [{"id": k, "image": f"{k}.{e}", "captions": [k], "segments": segments} for k, e in (("a", "jpg"), ("b", "png"))]
    (own / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    packed(own, tmp_path / "out", side=64)
    first, second = open_data(str(tmp_path / "out")).read("test").records
    image = load_rgb(first.image)
    assert image.size == (107, 64)
    left, top, right, bottom = (round(n) for n in first.segments[0].box)
    shown = np.asarray(image)
    assert shown[top + 2 : bottom - 2, left + 2 : right - 2].min() > 230
    assert shown[: top - 2].max() < 25
    assert shown[:, right + 2 :].max() < 25
    assert content(second.image) == (own / "b.png").read_bytes()  # small already
    assert second.segments[0].box == (100, 50, 350, 200)


# ---- stopped, taken, wrong

PACK = """
import sys, time
from pathlib import Path
from gradscope.data.pack import Packer, Sizes
from gradscope.data.source import open_data
source = open_data(sys.argv[1])
slowly = lambda done, total: time.sleep(0.1 if done > 14 else 0)  # or a busy machine lets it finish before the kill
Packer(sizes=Sizes(records=2), say=lambda line: None, advance=slowly)(source, source.splits(), Path(sys.argv[2]))
"""


def test_a_killed_pack_goes_on_to_the_same_bytes(scenes_folder, tmp_path):
    whole = packed(scenes_folder, tmp_path / "whole", records=2)
    output = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", PACK, str(scenes_folder), str(output)])
    deadline = time.monotonic() + 120
    while len(list(output.glob("*.index.jsonl"))) < 7 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / MANIFEST).exists()
    kept = {tar.name: tar.stat().st_mtime_ns for tar in output.glob("*.tar") if beside(tar).exists()}
    assert 7 <= len(kept) < 132
    last = sorted(kept)[-1]
    (output / last).write_bytes((output / last).read_bytes()[:-1])  # a shard that is no longer whole is written again
    lines: list[str] = []
    source = open_data(str(scenes_folder))
    assert Packer(sizes=Sizes(records=2), say=lines.append)(source, source.splits(), output) == whole
    assert any(f"{len(kept) - 1} finished shards" in line for line in lines)
    assert all((output / name).stat().st_mtime_ns == changed for name, changed in kept.items() if name != last)
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in output.iterdir()}
    assert all((output / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names if n.endswith(".tar"))


def test_long_names_count_too(own, tmp_path):
    limit = 60_000
    shards = packed(own, tmp_path / "out", bytes=limit)["splits"]["test"]["shards"]
    assert max(shard["bytes"] for shard in shards) <= limit


def test_a_stopped_pack_is_no_data_set_and_says_what_a_whole_one_says(own, tmp_path):
    whole = packed(own, tmp_path / "whole", records=2)
    output = tmp_path / "stopped"

    def stop(done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    source = open_data(str(own))
    with pytest.raises(KeyboardInterrupt):
        Packer(sizes=Sizes(records=2), say=quiet, advance=stop)(source, ["test"], output)
    assert list(output.glob("*.tar"))
    with pytest.raises(ValueError, match="holds an unfinished pack"):
        open_data(str(output))
    lines: list[str] = []
    assert Packer(sizes=Sizes(records=2), say=lines.append)(source, ["test"], output) == whole
    assert "there already" in lines[0]


def test_a_full_disk_is_said_in_words(own, tmp_path):
    output = tmp_path / "out"

    def fill(done: int, total: int) -> None:
        if done == 4:  # the second shard is not open yet
            (output / ".test-000002.tar.partial").symlink_to("/dev/full")

    source = open_data(str(own))
    with pytest.raises(ValueError, match=r"is full.*give the same command again"):
        Packer(sizes=Sizes(records=4), say=quiet, advance=fill)(source, ["test"], output)
    assert len(list(output.glob("*.tar"))) == 2
    assert Packer(sizes=Sizes(records=4), say=quiet)(source, ["test"], output) == packed(own, tmp_path / "whole", records=4)


def test_a_finished_pack_given_again_has_nothing_to_do(own, tmp_path):
    first, said = packed(own, tmp_path / "out"), []
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    source = open_data(str(own))
    again = Packer(sizes=Sizes(), say=said.append)(source, source.splits(), tmp_path / "out")
    assert again == first
    assert "complete, nothing to do" in said[0]
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    next((tmp_path / "out").glob("*.tar")).unlink()
    with pytest.raises(ValueError, match="missing or have another size"):
        packed(own, tmp_path / "out")


def test_an_output_that_is_taken_is_left_alone(own, tmp_path):
    packed(own, tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="holds a finished pack of other data or settings"):
        packed(own, tmp_path / "out", records=3)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty"):
        packed(own, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="is a file"):
        packed(own, tmp_path / "full" / "mine.txt")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / ".pack.json").write_text("{}")
    with pytest.raises(ValueError, match="unfinished pack of other data or settings"):
        packed(own, tmp_path / "half")


def test_splits_that_cannot_be_packed(own, tmp_path):
    with pytest.raises(ValueError, match="has no split 'train'"):
        packed(own, tmp_path / "out", "train")
    with pytest.raises(ValueError, match="joins splits"):
        packed(own, tmp_path / "out", "test+val")
    (own / "no_ending").unlink()
    with pytest.raises(ValueError, match="1 of 13 pictures do not exist"):
        packed(own, tmp_path / "out")
    shutil.copy(own / "test.jsonl", own / "train.jsonl")
    with pytest.raises(ValueError, match="--split packs the others alone"):
        packed(own, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    source = open_data(str(own))
    manifest = Packer(allow_missing=True, say=quiet)(source, ["test"], tmp_path / "out")
    assert manifest["splits"]["test"]["records"] == 12
    assert any("1 of 13 records left out" in note for note in open_data(str(tmp_path / "out")).read("test").notes)


def test_shards_that_were_lost_or_added_after_packing(own, tmp_path):
    output = tmp_path / "out"
    packed(own, output, records=5)
    shutil.copy(output / "test-000000.tar", output / "extra.tar")
    assert any("1 tar files" in note and "extra.tar" in note for note in open_data(str(output)).read("test").notes)
    os.truncate(output / "test-000001.tar", 1000)
    with pytest.raises(ValueError, match=r"1 of 3 shards of .* test-000001\.tar"):
        open_data(str(output))


# ---- the rest of the program on shards


@pytest.fixture(scope="module")
def scene_shards(scenes_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("shards") / "out"
    packed(scenes_folder, output, records=37)
    return output


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_shards_are_batches_of_files(scenes_folder, scene_shards, workers):
    plan = [[5, 3, 40], [0, 63], [12]]
    stacks = []
    for folder in (scenes_folder, scene_shards):
        records = open_data(str(folder)).read("test").records
        stacks.append(list(decoded(Pixels(records, PixelPath(size=(16, 16))), plan, workers=workers)))
    assert all(torch.equal(a, b) for a, b in zip(*stacks, strict=True))


@pytest.fixture
def settings(small_encoder: Path) -> dict[str, object]:
    return {
        "encoder.name": str(small_encoder),
        "objective.name": "hn",
        "train.device": "cpu",
        "train.batch_size": 8,
        "train.accumulate": 2,
        "train.accumulate_mode": "narrow",
        "train.epochs": 1,
        "train.lr": 1e-3,
        "train.checkpoint_every": 2,
        "probe.log_grads": True,
        "probe.set": "loss",
    }


@pytest.mark.usefixtures("one_thread")
def test_training_on_shards_is_training_on_files_and_resumes_in_mid_epoch(settings, scenes_folder, scene_shards, tmp_path):
    for name, folder in (("files", scenes_folder), ("shards", scene_shards)):
        train(resolve({}, {**settings, "data.name": str(folder)}), tmp_path / name, quiet=True)
    a, b = weights(tmp_path / "files"), weights(tmp_path / "shards")
    assert all(torch.equal(a[name], b[name]) for name in a)
    recipe = resolve({}, {**settings, "data.name": str(scene_shards)})
    train_until(recipe, tmp_path / "killed", 6)
    train(recipe, tmp_path / "killed", resume=True, quiet=True)
    assert_equal_runs(tmp_path / "shards", tmp_path / "killed")


def test_fewer_shards_than_processes_and_workers_do_not_hang(small_encoder, tmp_path):
    """D06: one shard of 6 samples, two processes with four workers each; every epoch has all six, and a remainder is no wait."""
    for split in ("train", "val"):
        tar_of(tmp_path / "data" / f"{split}-0.tar", pairs(f"{split}{k}" for k in range(6)))
    words = ["train", "--data", str(tmp_path / "data"), "--encoder", str(small_encoder), "--device", "cpu", "--batch-size", "4"]
    together = Together([*words, "--workers", "4", "--epochs", "2", "--output", str(tmp_path / "run")], tmp_path / "heard")
    assert together.ended() == [0, 0], together.said("err")
    assert "2 records left out per epoch" in together.said("err")[0]
    assert Run(tmp_path / "run").done
    assert Run(tmp_path / "run").steps["step"].tolist() == [1, 2]


@pytest.fixture
def cli(monkeypatch, capfd):
    """``cli("data", "info", ...)`` -> (exit code, stdout)."""
    monkeypatch.setattr(out, "width", 300)

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gradscope", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        text, err = capfd.readouterr()
        assert "Traceback" not in text + err
        return int(stop.value.code or 0), text

    return call


def test_the_commands(cli, scenes_folder, tmp_path, small_encoder):
    output = tmp_path / "out"
    code, text = cli("data", "pack", scenes_folder, "--output", output, "--per-shard", 30, "--split", "test", "--split", "val")
    assert code == 0
    assert "val-000001.tar" in text
    assert f"WebDataset reads {output}/test-{{000000..000002}}.tar" in text
    assert len(list(webdataset.WebDataset(f"{output}/test-{{000000..000002}}.tar", shardshuffle=False))) == 64
    assert f"--data {output}" in text
    assert cli("data", "pack", scenes_folder, "--output", output)[0] == 2
    assert cli("data", "pack", scenes_folder, "--output", tmp_path / "x", "--per-shard", 3, "--shard-size", "1GB")[0] == 2
    code, text = cli("data", "info", output, "--json")
    facts = json.loads(text)
    assert code == 0
    assert {split: (f["records"], f["shards"]) for split, f in facts["splits"].items()} == {"test": (64, 3), "val": (40, 2)}
    code, text = cli("data", "info", f"{output}/test-{{000000..000002}}.tar")
    assert code == 0
    assert "not counted" in text
    code, text = cli("data", "check", output, "--split", "test", "--against", f"{scenes_folder}:test", "--json")
    assert code == 1
    found = json.loads(text)
    assert found["overlaps"][0]["counts"]["content"] == 64
    assert found["splits"][0]["pictures"]["decoded"] == 64
    assert cli("data", "check", output, "--split", "test")[0] == 0
    recalls = []
    for data in (scenes_folder, output):
        file = tmp_path / f"{data.name}.eval.json"
        assert cli("eval", small_encoder, "--data", data, "--split", "test", "--device", "cpu", "--output", file)[0] == 0
        recalls.append(json.loads(file.read_text())["metrics"])
    assert recalls[0] == recalls[1]


def test_a_folder_of_one_split_needs_no_split(own, tmp_path):
    packed(own, tmp_path / "out")
    source = open_data(str(tmp_path / "out"))
    assert (source.default_split, source.split_or_only("train")) == ("test", "test")
    assert Image.open(io.BytesIO(content(source.read("test").records[0].image))).size == (24, 20)
