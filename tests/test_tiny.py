"""The shipped encoder: it loads as a plain open_clip model, reads every scenes caption whole, and is small."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import re
import secrets
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from open_clip import CLIP
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file

from gradscope.data.scenes import describe, make_scene, render
from gradscope.data.scenes_grammar import scenes_of_split
from gradscope.encoders.load import load_encoder
from gradscope.encoders.tiny_model import FOLDER, load_config, load_tokenizer


@pytest.fixture(scope="module")
def tiny():
    encoder = load_encoder("tiny")
    return encoder.model, encoder.tokenizer.source, encoder.config["preprocess_cfg"]


def test_weights_are_fp16_on_disk_and_fp32_after_loading(tiny):
    model, _, _ = tiny
    stored = load_file(FOLDER / "open_clip_model.safetensors")
    assert {t.dtype for name, t in stored.items() if name != "logit_scale"} == {torch.float16}
    assert stored["logit_scale"].dtype == torch.float32
    assert isinstance(model, CLIP)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name].float())
    assert math.isclose(float(model.logit_scale.detach().exp()), 100.0, rel_tol=1e-6)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not model.training


def test_folder_is_small_and_has_the_local_dir_layout():
    assert (FOLDER / "open_clip_model.safetensors").stat().st_size <= 6_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 6_000_000
    assert set(load_config()) == {"model_cfg", "preprocess_cfg"}


def test_end_of_text_is_the_largest_id_and_the_vocabulary_fits(tiny):
    model, tokenizer, _ = tiny
    assert tokenizer.eot_token_id == max(tokenizer.encoder.values()) == tokenizer.vocab_size - 1
    assert model.token_embedding.num_embeddings == tokenizer.vocab_size == load_config()["model_cfg"]["text_cfg"]["vocab_size"]
    assert tokenizer.context_length == model.context_length == load_config()["model_cfg"]["text_cfg"]["context_length"]


def test_no_scenes_caption_is_cut():
    tokenizer = load_tokenizer()
    longest = 0
    for split, count in {"train": 4000, "val": 400, "test": 2000}.items():
        for number, (_, scene) in enumerate(scenes_of_split(0, split, count)):
            caption = describe(scene, Random(f"words 0 {split} {number}"))
            longest = max(longest, len(tokenizer.encode(caption)) + 2)
    assert 100 < longest <= tokenizer.context_length


def test_caption_length_is_bounded_whatever_the_draw():
    """At most 110 words of one token each, 16 full stops, start and end: 128."""
    tokenizer = load_tokenizer()
    seed = secrets.randbits(32)
    rng = Random(seed)
    for _ in range(500):
        caption = describe(make_scene(rng), rng)
        assert all(len(tokenizer.encode(word)) == 1 for word in re.findall(r"[a-z]+", caption.lower())), seed
        assert caption.count(".") <= 16


def test_cut_merges_split_scenes_words_as_the_stock_file_does():
    cut, stock = load_tokenizer(), SimpleTokenizer()
    lines = gzip.decompress((FOLDER / "bpe.txt.gz").read_bytes()).decode().split("\n")
    assert "#version" in lines[0]
    ranks = [stock.bpe_ranks[tuple(line.split())] for line in lines[1:]]
    assert ranks == sorted(set(ranks))
    seed = secrets.randbits(32)
    rng = Random(seed)
    for _ in range(100):
        caption = describe(make_scene(rng), rng)
        pieces = [[t.decoder[i] for i in t.encode(caption)] for t in (cut, stock)]
        assert pieces[0] == pieces[1], seed


def test_it_tells_scenes_apart(tiny):
    """A weak floor, so that a broken export cannot pass: 64 fresh scenes, both directions."""
    model, tokenizer, preprocess_cfg = tiny
    transform = image_transform_v2(PreprocessCfg(**preprocess_cfg), is_train=False)
    seed = secrets.randbits(32)
    rng = Random(seed)
    scenes = [make_scene(rng, stream="test") for _ in range(64)]
    with torch.no_grad():
        images = model.encode_image(torch.stack([transform(render(s)) for s in scenes]), normalize=True)
        texts = model.encode_text(tokenizer([describe(s, rng) for s in scenes]), normalize=True)
    cosine = (images @ texts.T).double()
    for matrix in (cosine, cosine.T):
        assert (matrix.argmax(1) == torch.arange(64)).double().mean() > 0.9, seed
    off = ~torch.eye(64, dtype=torch.bool)
    assert (texts @ texts.T)[off].mean() > 0.55, seed


def test_configuration_is_plain_json():
    text = (FOLDER / "open_clip_config.json").read_text(encoding="utf-8")
    assert json.loads(text) == load_config()


@pytest.fixture
def recipe_modules(monkeypatch):
    """The recipe's own modules, with batches of 16 and chunks of 32 pictures drawn in this process."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "analyses" / "tiny_encoder"))
    pool, train, measure = (importlib.import_module(name) for name in ("pool", "train", "measure"))
    monkeypatch.setattr(pool, "CHUNK", 32)
    monkeypatch.setattr(train, "BATCH", 16)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    precision = torch.get_float32_matmul_precision()

    def here(folder, chunks):
        folder.mkdir(parents=True, exist_ok=True)
        for half, count in chunks.items():
            for number in range(count):
                pool.write_chunk((folder, half, number))

    monkeypatch.setattr(train, "make_pool", here)
    yield train, measure
    torch.set_float32_matmul_precision(precision)
    for name in ("pool", "train", "measure", "simple", "vocabulary"):
        sys.modules.pop(name, None)


def test_recipe_shortcuts_equal_the_plain_computations(tiny, recipe_modules):
    model, tokenizer, preprocess_cfg = tiny
    train, measure = recipe_modules
    seed = secrets.randbits(32)
    rng, gen = Random(seed), np.random.default_rng(seed)
    scenes = [make_scene(rng) for _ in range(6)]
    tokens = tokenizer([describe(s, rng) for s in scenes[:5]] + ["a red ball"])
    transform = image_transform_v2(PreprocessCfg(**preprocess_cfg), is_train=False)
    plain = torch.stack([transform(render(s)) for s in scenes])
    small = np.stack([np.asarray(render(s).resize((64, 64), Image.Resampling.BICUBIC)) for s in scenes])
    with torch.no_grad():
        assert torch.allclose(train.encode_text(model, tokens), model.encode_text(tokens), atol=1e-4), seed
    assert torch.allclose(train.to_input(small), plain, atol=1e-6), seed
    rows = gen.normal(size=(7, 5)) + 1
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    slow = [rows[i] @ rows[j] for i in range(7) for j in range(7) if i != j]
    assert math.isclose(float(train.mean_cosine(torch.from_numpy(rows))), sum(slow) / len(slow), rel_tol=1e-9), seed
    cosine = gen.integers(-3, 4, size=(9, 9)) / 3  # many ties
    ranks = [sum(cosine[i, j] >= cosine[i, i] for j in range(9)) for i in range(9)]
    assert measure.recall(cosine, 2) == sum(rank <= 2 for rank in ranks) / 9, seed
    a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in gen.normal(size=(2, 8, 16)))
    mine = measure.batch_losses(a, b, 8, batches=1)[0]
    logits = torch.from_numpy(100 * a @ b.T)
    target = torch.arange(8)
    slow_loss = sum(torch.nn.functional.cross_entropy(z, target) for z in (logits, logits.T)) / 2
    assert math.isclose(mine, float(slow_loss), rel_tol=1e-9), seed


def test_a_stopped_recipe_resumes_to_the_same_weights(tmp_path, recipe_modules):
    train, _ = recipe_modules
    options = {"stage_1": 2, "dense_1": 6, "dense_2": 10, "warmup": 2, "dense_chunks": 1, "simple_chunks": 1}
    options["seed"] = secrets.randbits(16)
    recipe = train.Recipe(steps=4, **options)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    train.train(recipe, tmp_path / "whole", every_seconds=1e9)
    step, calls = train.train_step, []

    def stop_before_the_fourth(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_step", stop_before_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            train.train(recipe, tmp_path / "stopped", every_seconds=0.0)
    train.train(recipe, tmp_path / "stopped", every_seconds=1e9)
    whole, stopped = (load_file(tmp_path / name / "open_clip_model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole), options
    assert load_encoder(str(tmp_path / "stopped")).context == 128
