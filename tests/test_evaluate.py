"""Evaluation leaves no trace, does not depend on how it is cut, and writes what it found; probing checkpoints without training."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradscope.data.batching import Batches, Pixels
from gradscope.data.pixels import pixel_path
from gradscope.data.source import open_data
from gradscope.encoders.load import load_encoder
from gradscope.evaluate import embed_records, evaluate
from gradscope.evaluation_file import retrieval_table, write_evaluation, write_hits
from gradscope.probe_checkpoints import probe_checkpoints
from gradscope.quantities import quantities
from gradscope.recipe import Data
from gradscope.run_tables import comparable
from gradscope.runlog import Run
from gradscope.start_widths import start_widths
from gradscope.types import Record
from gradscope.verdict import sentences, summarise, summary_table


@pytest.fixture(scope="module")
def records(scenes_folder) -> list[Record]:
    return open_data(str(scenes_folder)).records("test")


@pytest.fixture
def encoder(small_encoder):
    return load_encoder(str(small_encoder))


def several_captions(records: list[Record]) -> list[Record]:
    """One to three captions per picture, so that the numbers of images and captions differ."""
    words = ["a red ball", "a picture of several things"]
    return [dataclasses.replace(r, captions=(*r.captions, *words[: i % 3])) for i, r in enumerate(records)]


def with_dropout(encoder):
    """BatchNorm and dropout where evaluation mode matters."""
    conv = encoder.model.visual.conv1
    encoder.model.visual.conv1 = nn.Sequential(conv, nn.BatchNorm2d(32), nn.Dropout(0.5))
    return encoder


def test_modes_gradients_and_random_state_are_left_alone(encoder, records):
    encoder = with_dropout(encoder)
    encoder.train()
    encoder.model.visual.conv1[2].eval()  # a module of its own mode
    modes = [module.training for module in encoder.modules()]
    buffers = {name: b.clone() for name, b in encoder.named_buffers()}
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    evaluate(encoder, records[:8], resamples=20)
    assert [module.training for module in encoder.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert torch.is_grad_enabled()
    assert all(torch.equal(b, buffers[name]) for name, b in encoder.named_buffers())
    assert all(p.grad is None for p in encoder.parameters())


def test_modes_come_back_after_an_error(encoder, records):
    encoder.train()
    missing = dataclasses.replace(records[0], image="no-such.jpg")
    with pytest.raises(ValueError, match=r"no-such.jpg' does not exist"):
        evaluate(encoder, [missing, *records[:3]])
    assert all(module.training for module in encoder.modules())
    assert torch.is_grad_enabled()


def test_two_evaluations_are_the_same_bytes(encoder, records):
    encoder = with_dropout(encoder).train()
    first, second = (embed_records(encoder, records[:16]) for _ in range(2))
    assert torch.equal(first.image, second.image)
    assert torch.equal(first.text, second.text)


def test_the_batch_size_changes_nothing(encoder, records):
    """Rows agree to rounding and every metric is equal, whatever the batch, with a worker or without."""
    records = several_captions(records)
    whole, rows = evaluate(encoder, records, batch_size=128, resamples=50)
    for size, workers in ((1, 0), (7, 0), (64, 1)):
        result, embedded = evaluate(encoder, records, batch_size=size, workers=workers, resamples=50)
        assert torch.allclose(embedded.image, rows.image, atol=1e-6)
        assert torch.allclose(embedded.text, rows.text, atol=1e-6)
        assert result.dicts() == whole.dicts()


def test_several_captions_per_image_against_a_slow_twin(encoder, records):
    """Image to text: the best own caption among all captions. Text to image: one own image per caption."""
    colours = ("red", "blue", "green", "yellow")
    extra = [f"{a} ball, {b} square, {c} ring" for a in colours for b in colours for c in colours]  # 64 different ones
    records = [dataclasses.replace(r, captions=(*r.captions, extra[i])[: 1 + i % 2]) for i, r in enumerate(records)]
    result, embedded = evaluate(encoder, records, resamples=20)
    owner = embedded.image_of_text.tolist()
    assert owner == [i for i, r in enumerate(records) for _ in r.captions]
    assert len(embedded.text) == 96
    scores = (embedded.image.double() @ embedded.text.double().T).tolist()
    i2t = []
    for i, row in enumerate(scores):
        best = max(score for score, o in zip(row, owner, strict=True) if o == i)
        i2t.append(sum(score > best for score in row))
    t2i = [sum(scores[k][j] > scores[o][j] for k in range(64)) for j, o in enumerate(owner)]
    for direction, ahead in (("i2t", i2t), ("t2i", t2i)):
        for k in (1, 5, 10, 25, 50):
            assert result.value(direction, f"R@{k}") == pytest.approx(sum(a < k for a in ahead) / len(ahead)), (direction, k)


def test_equal_captions_get_the_same_bytes(encoder, records):
    """In whatever batch they fall: a tie between them is a tie."""
    double = [dataclasses.replace(r, captions=(*r.captions, "a red ball", "A red  ball")) for r in records]
    embedded = embed_records(encoder, double, batch_size=7)
    extra = embedded.text.reshape(64, 3, -1)[:, 1:]
    assert (extra == extra[0, 0]).all()
    alone = embed_records(encoder, records, batch_size=7)
    assert torch.allclose(embedded.text.reshape(64, 3, -1)[:, 0], alone.text, atol=1e-6)
    long = [dataclasses.replace(r, captions=("ball " * 400,)) for r in records[:5]]
    assert embed_records(encoder, long).truncated == 5


def test_progress_counts_pictures_and_captions(encoder, records):
    seen: list[tuple[int, int]] = []
    embed_records(encoder, records[:10], batch_size=4, advance=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [4, 8, 10, 14, 18, 20]
    assert {total for _, total in seen} == {20}


def test_the_json_states_its_protocol(encoder, records, scenes_folder, tmp_path):
    source = open_data(str(scenes_folder))
    long = dataclasses.replace(records[0], captions=("ball " * 400,))
    result, embedded = evaluate(encoder, [long, *records[1:]], resamples=30)
    path = write_evaluation(tmp_path / "sub" / "e.json", "small", source, "test", result, embedded)
    content = json.loads(path.read_text())
    assert content["schema"] == "gradscope.evaluation"
    assert content["encoder"] == "small"
    assert content["truncated_captions"] == 1
    assert content["resamples"] == 30
    assert content["provenance"]["data"]["split"] == "test"
    assert content["provenance"]["data"]["sha256"] == source.fingerprint("test")
    assert set(content["tied_share"]) == {"i2t", "t2i"}
    metrics = {(row["direction"], row["metric"]): row for row in content["metrics"]}
    for direction in ("i2t", "t2i"):
        for metric in ("R@1", "R@5", "R@10", "R@25", "R@50", "median_rank", "MRR"):
            row = metrics[direction, metric]
            assert row["value"] == result.value(direction, metric)
            assert row["low"] <= row["value"] <= row["high"] or metric == "median_rank"
            assert (row["n_queries"], row["n_candidates"]) == (64, 64)
            assert row["protocol"]
    assert not list((tmp_path / "sub").glob("*.partial"))
    assert "64 queries, 64 candidates" in str(retrieval_table(result, "t").columns[1].header)
    write_hits(tmp_path / "hits.npz", result)
    with np.load(tmp_path / "hits.npz") as hits:
        for direction in ("i2t", "t2i"):
            assert hits[f"hit1_{direction}"].mean() == pytest.approx(result.value(direction, "R@1"))
            assert hits[f"image_{direction}"].shape == (64,)


def test_the_default_name_is_in_the_encoders_folder(encoder, records, scenes_folder, small_encoder, tmp_path, monkeypatch):
    source = open_data(str(scenes_folder))
    result, embedded = evaluate(encoder, records[:8], resamples=10)
    shutil.copytree(small_encoder, tmp_path / "enc")
    path = write_evaluation(None, str(tmp_path / "enc"), source, "test", result, embedded)
    assert path == tmp_path / "enc" / f"eval-{scenes_folder.name}-test.json"
    monkeypatch.chdir(tmp_path)
    path = write_evaluation(None, "ViT-B-16:openai", source, "test", result, embedded)
    assert path == Path(f"ViT-B-16-openai-eval-{scenes_folder.name}-test.json")
    assert path.is_file()


# ---- the readings of checkpoints


@pytest.fixture(scope="module")
def probed(small_encoder, make_encoder, scenes_folder, tmp_path_factory) -> list[Path]:
    names = [str(small_encoder), str(make_encoder(seed=5)), str(small_encoder)]
    output = tmp_path_factory.mktemp("probe")
    shutil.copytree(small_encoder, output / "same")
    names[2] = str(output / "same")
    settings = {"split": "val", "width": 8, "batches": 3, "gamma": 0.25, "seed": 3, "device": "cpu"}
    return probe_checkpoints(names, data=Data(name=str(scenes_folder)), **settings, output=output / "out")


def test_probing_keeps_and_states_the_settings_of_its_data(small_encoder, scenes_folder, tmp_path):
    """The strict policy on captions holds, and the run says what it read."""
    settings = {"split": "val", "width": 8, "batches": 1, "gamma": 0.25, "seed": 3, "device": "cpu", "output": tmp_path / "out"}
    data = Data(name=str(scenes_folder), decode="exact")
    (path,) = probe_checkpoints([str(small_encoder)], data=data, **settings)
    run = Run(path)
    assert (run.recipe["data"]["decode"], run.recipe["data"]["train_split"]) == ("exact", "val")
    assert run.provenance["truncated_captions"] == 0
    assert run.provenance["data"]["records"] == len(open_data(str(scenes_folder)).records("val"))
    with pytest.raises(ValueError, match="setting of data set"):
        probe_checkpoints([str(small_encoder)], data=Data(name="scenes", caption="long"), **settings)


def test_each_checkpoint_has_the_full_reading_set(probed):
    expected = {name for name, component in quantities if component.phase == "batch"}
    for path in probed:
        run = Run(path)
        assert run.done
        assert run.steps["step"].tolist() == [1, 2, 3]
        assert expected <= set(run.readings["quantity"])
        assert run.readings[run.readings["key"] == "failed"].empty
        assert set(run.reading("gradient", "ratio", "pair")["step"]) == {1, 2, 3}
        assert run.recipe["objective"]["gamma"] == 0.25
        assert all(math.isfinite(v) for v in run.steps["loss"])


def test_checkpoints_read_the_same_batches(probed):
    """Equal weights give equal readings, other weights other ones: the batches are shared, the update is absent."""
    first, other, same = (comparable(Run(path).readings).drop(columns="stamps") for path in probed)
    assert first.equals(same)
    assert not first.equals(other)
    texts = {"captions": ("duplicates", "truncated")}
    for quantity, words in texts.items():
        chosen = [frame[(frame["quantity"] == quantity) & frame["key"].str.contains("|".join(words))] for frame in (first, other)]
        assert not chosen[0].empty
        exact = [f[f["key"].str.contains("exact|truncated")].reset_index(drop=True) for f in chosen]
        assert exact[0].equals(exact[1]), "what depends on the captions alone is the same for all"


def test_the_weights_are_not_touched(probed, small_encoder, scenes_folder):
    encoder = load_encoder(str(small_encoder))
    records = open_data(str(scenes_folder)).records("val")
    stream = Batches(records=records, encoder=encoder, batch_size=8, accumulate=1, seed=3)
    from gradscope.frameworks.clip import Clip, total_loss
    from gradscope.objectives.hn import HN

    expected = [float(total_loss(Clip(objective=HN(gamma=0.25))(encoder.embed(b))).detach()) for (b,) in stream.steps(1, 3)]
    assert Run(probed[0]).steps["loss"].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_probed_checkpoint_has_a_verdict(probed):
    summary = summarise(probed[0])
    assert summary.width == 8
    assert "HN (gamma 0.25) at width 8" in sentences(summary)[0]
    summaries = [summarise(path) for path in probed]
    table = summary_table(summaries)
    assert list(table.columns[0].cells) == [path.name for path in probed], "rows of several checkpoints can be told apart"
    assert "width 8" in str(table.title)


def test_start_widths_against_float64(encoder, records):
    records = several_captions(records)
    frame = start_widths(encoder, records, [4, 16], seed=2)
    assert frame.groupby("width").size().to_dict() == {4: 16, 16: 4}
    from gradscope.data.batching import generator

    order = torch.randperm(64, generator=generator(2, "start widths")).tolist()
    firsts = [dataclasses.replace(r, captions=r.captions[:1]) for r in records]
    rows = embed_records(encoder, firsts)
    scale = float(encoder.scale().detach())
    for width in (4, 16):
        pick = order[width : 2 * width]
        logits = scale * (rows.image[pick].double() @ rows.text[pick].double().T)
        losses = [-torch.log_softmax(m, dim=1).diagonal().mean() for m in (logits, logits.T)]
        found = frame[(frame["width"] == width) & (frame["batch"] == 1)]["log10_true"].item()
        assert found == pytest.approx(math.log10(float(sum(losses)) / 2), abs=1e-5)


# ---- data underneath


def test_batches_are_a_pure_function_of_the_step(encoder, records):
    seed = secrets.randbits(31)
    batches = Batches(records=records, encoder=encoder, batch_size=6, accumulate=2, seed=seed)
    assert (batches.steps_per_epoch, batches.left_out) == (5, 4)
    plan = [batches.indices(step) for step in range(1, 11)]
    for epoch in (plan[:5], plan[5:]):
        used = [i for step in epoch for micro in step for i in micro]
        assert len(set(used)) == len(used) == 60
    assert plan[:5] != plan[5:]
    assert [batches.epoch_of(s) for s in (1, 5, 6, 10, 11)] == [1, 1, 2, 2, 3]
    again = Batches(records=records, encoder=encoder, batch_size=6, accumulate=2, seed=seed)
    assert again.indices(8) == plan[7], "no need to walk there"
    state = torch.get_rng_state()
    ((a, b),) = again.steps(8, 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert [list(a.ids), list(b.ids)] == [[records[i].id for i in micro] for micro in plan[7]]
    pixels = Pixels(records, pixel_path(encoder.config["preprocess_cfg"]))
    assert torch.equal(a.images["full"], torch.stack([pixels[i] for i in plan[7][0]]))
    assert torch.equal(a.texts["full"], encoder.tokenize(list(a.captions)).ids)
    with pytest.raises(ValueError, match=r"40 x 2 = 80 records, and 64 are there to train on, without those held out"):
        Batches(records=records, encoder=encoder, batch_size=40, accumulate=2, seed=0)


def test_workers_do_not_change_the_batches(encoder, records):
    plain, split = (
        list(Batches(records=records, encoder=encoder, batch_size=16, accumulate=1, seed=1, workers=w).steps(1, 4)) for w in (0, 2)
    )
    for (a,), (b,) in zip(plain, split, strict=True):
        assert a.ids == b.ids
        assert torch.equal(a.images["full"], b.images["full"])


def test_lines_end_at_newlines_only(tmp_path):
    """Captions may hold other line separators, and the file may start with a byte-order mark."""
    captions = ["one\u2028two", "three\x85four", "five\x0bsix"]
    rows = [json.dumps({"id": i, "image": f"{i}.jpg", "captions": [c]}, ensure_ascii=False) for i, c in enumerate(captions)]
    (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    found = open_data(str(tmp_path)).records("train")
    assert [r.captions[0] for r in found] == captions


MODES = {"L": 128, "1": 1, "LA": (128, 255), "P": 7, "RGBA": (10, 20, 30, 255), "CMYK": (0, 0, 0, 0), "I;16": 128 * 256, "I": 128 * 256}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(mode, tmp_path):
    from PIL import Image

    from gradscope.data.images import load_rgb

    path = tmp_path / ("a.tiff" if mode in ("CMYK", "I") else "a.png")
    Image.new(mode, (5, 3), MODES[mode]).save(path)
    image = load_rgb(path)
    assert image.mode == "RGB"
    assert image.size == (5, 3)
    expected = {"L": 128, "LA": 128, "I;16": 128, "I": 128, "CMYK": 255, "1": 255}
    if mode in expected:
        assert set(np.asarray(image).ravel().tolist()) == {expected[mode]}


def test_transparent_pixels_are_white_and_orientation_is_applied(tmp_path):
    from PIL import Image

    from gradscope.data.images import load_rgb

    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([255, 0, 0] * 256)
    palette.save(tmp_path / "palette.png", transparency=0)
    for name in ("clear.png", "palette.png"):
        assert set(np.asarray(load_rgb(tmp_path / name)).ravel().tolist()) == {255}
    picture = Image.new("RGB", (40, 20), "blue")
    picture.paste("red", (20, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "turned.png", exif=exif)
    turned = load_rgb(tmp_path / "turned.png")
    assert turned.size == (20, 40)
    assert turned.getpixel((10, 35)) == (255, 0, 0)


@pytest.mark.parametrize("content", [b"", b"<html></html>", None], ids=["empty", "html", "cut"])
def test_damaged_pictures_are_named(tmp_path, content):
    from PIL import Image

    from gradscope.data.images import load_rgb

    path = tmp_path / "bad.jpg"
    if content is None:
        rng = np.random.default_rng(0)
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
        content = path.read_bytes()[:1500]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad.jpg' cannot be decoded"):
        load_rgb(path)
    with pytest.raises(ValueError, match=r"cannot be decoded"):
        load_rgb(tmp_path)


def test_small_sets_hold_out_two(scenes_folder):
    from gradscope.data.source import held_out

    records = open_data(str(scenes_folder)).records("val")[:10]
    kept, held = held_out(records, 0.05, 0)
    assert (len(kept), len(held)) == (8, 2)
