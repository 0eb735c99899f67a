"""The shipped encoder: it loads as a plain open_clip model, reads every scenes caption whole, and is small."""

from __future__ import annotations

import gzip
import json
import math
import re
import secrets
from random import Random

import pytest
import torch
from open_clip import CLIP
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from safetensors.torch import load_file

from gradscope.data.scenes import describe, make_scene, render
from gradscope.data.scenes_grammar import scenes_of_split
from gradscope.encoders.tiny_model import FOLDER, load_config, load_tiny, load_tokenizer


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


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
        assert (matrix.argmax(1) == torch.arange(64)).double().mean() > 0.8, seed
    off = ~torch.eye(64, dtype=torch.bool)
    assert (texts @ texts.T)[off].mean() > 0.4, seed


def test_configuration_is_plain_json():
    text = (FOLDER / "open_clip_config.json").read_text(encoding="utf-8")
    assert json.loads(text) == load_config()
