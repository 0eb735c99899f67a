"""Encoders: tokens, loading and saving, token outputs, rows a batch cannot reach, Long-CLIP's two position tables."""

from __future__ import annotations

import copy
import json
import secrets
import shutil
from pathlib import Path
from random import Random

import open_clip
import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from gradscope import checkpoint
from gradscope.data.batching import Batches
from gradscope.data.source import open_data
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.load import load_encoder, resolve_device, trained_with_quick_gelu
from gradscope.optim import make_optimizer
from gradscope.recipe import Train
from gradscope.types import Batch

WORDS = ["red", "blue", "green", "small", "large", "ball", "left", "right", "above", "below"]


@pytest.fixture
def encoder(small_encoder) -> DualEncoder:
    return load_encoder(str(small_encoder))


@pytest.fixture(scope="module")
def batch(small_encoder, scenes_folder) -> Batch:
    records = open_data(str(scenes_folder)).records("train")
    seed = secrets.randbits(32)
    ((found,),) = Batches(records=records, encoder=load_encoder(str(small_encoder)), batch_size=6, accumulate=1, seed=seed).steps(1, 1)
    return found


# ---- tokens


def caption_of(tokens: int, encoder: DualEncoder, random: Random) -> str:
    """A caption of exactly ``tokens`` content tokens."""
    caption = " ".join(random.choice(WORDS) for _ in range(tokens))
    assert len(encoder.tokenizer.contents([caption])[0]) == tokens
    return caption


def test_end_of_text_is_kept_at_every_length(encoder):
    seed = secrets.randbits(32)
    random = Random(seed)
    context, end = encoder.context, encoder.tokenizer.suffix[0]
    contents = [0, 1, context - 3, context - 2, context - 1, context, context + 1, 3 * context]
    tokenized = encoder.tokenize([caption_of(n, encoder, random) for n in contents])
    assert tokenized.ids.shape == (len(contents), context)
    assert tokenized.ids.dtype == torch.int64
    assert tokenized.lengths.tolist() == [n + 2 for n in contents]
    assert tokenized.truncated() == sum(n + 2 > context for n in contents) == 4
    for row, content in zip(tokenized.ids, contents, strict=True):
        last = min(content + 2, context) - 1
        assert row[0] == encoder.tokenizer.prefix[0]
        assert (row == end).nonzero().flatten().tolist() == [last], (content, seed)
        assert row.argmax() == last
        assert not row[last + 1 :].any()


def test_tokens_equal_open_clips_own(encoder):
    """Where nothing is cut, and where open_clip itself cuts."""
    seed = secrets.randbits(32)
    random = Random(seed)
    captions = [" ".join(random.choice(WORDS) for _ in range(random.randint(0, 300))) for _ in range(20)]
    assert torch.equal(encoder.tokenize(captions).ids, encoder.tokenizer.source(captions)), seed


def test_long_captions_that_differ_early_embed_differently(encoder):
    random = Random(secrets.randbits(32))
    rows = encoder.embed_texts(encoder.tokenize([caption_of(300, encoder, random) for _ in range(3)]).ids)
    assert ((rows @ rows.T)[~torch.eye(3, dtype=torch.bool)] < 1 - 1e-4).all()


def test_odd_captions(encoder):
    tokenized = encoder.tokenize(["", "   ", "\u2028", "<end_of_text>", "\U0001f600" * 200, "赤い椅子"])
    assert (tokenized.ids == encoder.tokenizer.suffix[0]).any(1).all()
    assert torch.isfinite(encoder.embed_texts(tokenized.ids)).all()


# ---- embeddings


def test_rows_are_unit_fp32_even_from_half_precision_towers(encoder, batch):
    for dtype in (None, torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            found = encoder.embed(batch)
        for rows in (found.image, found.text):
            assert rows.dtype == torch.float32
            assert (rows.double().norm(dim=1) - 1).abs().max() < 1e-6


def test_embeddings_equal_plain_open_clip(encoder, batch):
    with torch.no_grad():
        found = encoder.embed(batch)
        image = encoder.model.encode_image(batch.images["full"], normalize=True)
        text = encoder.model.encode_text(batch.texts["full"], normalize=True)
    assert torch.allclose(found.image, image, atol=1e-6)
    assert torch.allclose(found.text, text, atol=1e-6)
    assert float(found.scale) == pytest.approx(float(encoder.model.logit_scale.detach().exp()))


def test_token_outputs_hold_the_pooled_output(encoder, batch):
    """The word output at end-of-text IS the text embedding; the patch outputs are those behind the class token."""
    encoder.add_token_scale()
    with torch.no_grad():
        plain, found = encoder.embed(batch), encoder.embed(batch, tokens=True)
    assert torch.equal(plain.image, found.image)
    assert torch.equal(plain.text, found.text)
    ids = batch.texts["full"]
    assert found.image_tokens.shape == (6, 4, 16)
    assert found.text_tokens.shape == (6, encoder.context, 16)
    at_end = found.text_tokens[torch.arange(6), ids.argmax(1)]
    assert torch.allclose(at_end, found.text, atol=1e-6)
    for rows in (found.image_tokens, found.text_tokens):
        assert (rows.double().norm(dim=-1) - 1).abs().max() < 1e-6
    visual = encoder.model.visual
    with torch.no_grad():
        states = visual.transformer(visual._embeds(batch.images["full"]))
        everything = F.normalize(visual.ln_post(states) @ visual.proj, dim=-1)
    assert torch.allclose(everything[:, 0], found.image, atol=1e-5), "the class token comes first"
    assert torch.allclose(everything[:, 1:], found.image_tokens, atol=1e-5)


def test_the_valid_mask_is_words_and_end_of_text(encoder):
    random = Random(secrets.randbits(32))
    lengths = [0, 1, 5, encoder.context - 2, encoder.context + 9]
    ids = encoder.tokenize([caption_of(n, encoder, random) for n in lengths]).ids
    valid = encoder.text_valid(ids)
    for row, mask, n in zip(ids, valid, lengths, strict=True):
        expected = [j for j in range(1, encoder.context) if row[j] != 0 or j <= n]
        last = min(n + 2, encoder.context) - 1
        assert mask.nonzero().flatten().tolist() == list(range(1, last + 1)) == [j for j in expected if j <= last]


def test_the_token_term_is_refused_where_there_are_no_patches(encoder):
    encoder.model.visual = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"image tower Identity has no token outputs.*--token-weight 0"):
        encoder.add_token_scale()


# ---- rows a batch cannot reach


@pytest.mark.parametrize("tokens", [False, True])
def test_structural_rows_equal_the_zero_rows_of_autograd(encoder, batch, tokens):
    """With a random direction at every output, exactly the structural rows of the text tables get a zero gradient."""
    if tokens:
        encoder.add_token_scale()
    found = encoder.embed(batch, tokens=tokens)
    loss = sum((rows * torch.randn_like(rows)).sum() for rows in (found.image, found.text))
    if tokens:
        loss = loss + (found.text_tokens * torch.randn_like(found.text_tokens))[found.text_valid].sum()
    loss.backward()
    rows = encoder.structural_rows(batch.texts["full"])
    assert {name.split(".", 1)[1] for name in rows} == {"token_embedding.weight", "positional_embedding"}
    for name, structural in rows.items():
        gradient = dict(encoder.named_parameters())[name].grad
        assert torch.equal((gradient == 0).all(dim=1), structural), name
        assert 0 < int(structural.sum()) < len(structural)


def test_no_row_is_structural_in_a_full_context(encoder, batch):
    long = encoder.tokenize([" ".join(WORDS * 30)] * 6).ids
    rows = encoder.structural_rows(long)
    assert not rows["model.positional_embedding"].any()


# ---- loading and saving


def test_half_precision_weights_are_promoted(make_encoder):
    folder = make_encoder(seed=3, half=True)
    encoder = load_encoder(str(folder))
    stored = load_file(folder / "open_clip_model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float16}
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    for name, tensor in encoder.model.state_dict().items():
        assert torch.equal(tensor, stored[name].float()), name
    assert not encoder.training


@pytest.mark.parametrize("change", [{}, {"quick_gelu": True}])
def test_a_checkpoint_is_a_plain_open_clip_folder(make_encoder, batch, tmp_path, change):
    """Activation, preprocessing, merges and weights survive; open_clip alone gives the same embeddings."""
    config = copy.deepcopy(SMALL)
    config["model_cfg"].update(change)
    config["preprocess_cfg"].update({"mean": [0.1, 0.2, 0.3], "interpolation": "bilinear"})
    encoder = load_encoder(str(make_encoder(seed=4, config=config)))
    checkpoint.save(tmp_path / "step-000001", encoder, make_optimizer(encoder, Train()), torch.amp.GradScaler("cpu", enabled=False))
    folder = tmp_path / "step-000001" / "encoder"
    again = load_encoder(str(tmp_path / "step-000001"))
    plain = open_clip.create_model(f"local-dir:{folder}").eval()
    with torch.no_grad():
        expected = encoder.embed(batch)
        found = again.embed(batch)
        image = plain.encode_image(batch.images["full"], normalize=True)
        text = plain.encode_text(batch.texts["full"], normalize=True)
        other = load_encoder(str(make_encoder(seed=4))).embed(batch)
    assert torch.equal(found.image, expected.image)
    assert torch.equal(found.text, expected.text)
    assert torch.allclose(image, expected.image, atol=1e-6)
    assert torch.allclose(text, expected.text, atol=1e-6)
    if change:
        assert not torch.allclose(other.text, expected.text, atol=1e-4), "the activation matters here"
    captions = ["a small red ball", "赤い " * 90]
    assert torch.equal(again.tokenize(captions).ids, encoder.tokenize(captions).ids)
    assert again.config["preprocess_cfg"] == encoder.config["preprocess_cfg"]
    assert again.config["preprocess_cfg"]["mean"] == [0.1, 0.2, 0.3]
    assert repr(again.preprocess()) == repr(encoder.preprocess())


def test_the_shipped_encoder_survives_a_checkpoint(tmp_path):
    tiny = load_encoder("tiny")
    checkpoint.save_encoder(tmp_path / "tiny", tiny)
    again = load_encoder(str(tmp_path / "tiny"))
    ids = tiny.tokenize(["a photo of a small red ball on a table"]).ids
    assert torch.equal(tiny.embed_texts(ids), again.embed_texts(again.tokenize(["a photo of a small red ball on a table"]).ids))


def test_unreadable_folders_say_so(small_encoder, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(small_encoder, folder)
    state = load_file(folder / "open_clip_model.safetensors")
    save_file({k: v for k, v in state.items() if "ln_final" not in k}, folder / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match=r"do not fit the model .*2 missing: ln_final.bias, ln_final.weight"):
        load_encoder(str(folder))
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weights file"):
        load_encoder(str(folder))
    (folder / "open_clip_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"open_clip_config.json"):
        load_encoder(str(folder))
    (folder / "open_clip_config.json").write_text('{"other": 1}')
    with pytest.raises(ValueError, match=r"open_clip_config.json"):
        load_encoder(str(folder))


def test_merges_of_another_model_are_refused(make_encoder):
    config = copy.deepcopy(SMALL)
    config["model_cfg"]["text_cfg"]["vocab_size"] = 500
    with pytest.raises(ValueError, match=r"embeds 500 tokens, its tokenizer makes 2014"):
        load_encoder(str(make_encoder(config=config)))


def test_devices():
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="--device cpu"):
            resolve_device("cuda:0")


# ---- names


def test_a_run_loads_its_last_checkpoint_that_counts(small_encoder, make_encoder, tmp_path):
    """A checkpoint that a resume set aside is never picked, even where its step is the largest."""
    run = tmp_path / "run"
    for name, source in {"step-000004": small_encoder, "step-000008.superseded-by-attempt-2": make_encoder(seed=9)}.items():
        (run / "checkpoints" / name).mkdir(parents=True)
        shutil.copytree(source, run / "checkpoints" / name / "encoder")
    (run / "recipe.toml").write_text("")
    (run / "provenance.json").write_text(json.dumps({"attempts": [{"attempt": 1, "from_step": 0}]}))
    expected = load_file(Path(small_encoder) / "open_clip_model.safetensors")
    assert torch.equal(load_encoder(str(run)).model.text_projection.detach(), expected["text_projection"])


def test_the_activation_follows_the_weights_not_the_name_of_the_architecture():
    assert trained_with_quick_gelu("ViT-B-16", "openai")
    assert not trained_with_quick_gelu("ViT-B-16", "laion2b_s34b_b88k")
    assert not trained_with_quick_gelu("ViT-B-16", "a/file.pt")
    assert not trained_with_quick_gelu("ViT-B-16", "")
