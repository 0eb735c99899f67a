"""Token outputs of every family: shapes, values against the blocks run by hand, and the pooled output recovered from them.

In float64, so that "equal" means equal; the embedding is also recovered in fp32 to 1e-6.
"""

from __future__ import annotations

import secrets
from typing import Any

import open_clip
import pytest
import torch
from families import HF, IMAGE, TEXT, TEXTS, TIMM, VISION, hf_family, image_family, text_family
from hf_tokenizers import FRAMES, model_config, write_tokenizer
from open_clip import CoCa
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from gradscope.checkpoint import save_encoder
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.load import load_encoder
from gradscope.encoders.reach import unreached_rows
from gradscope.encoders.tokenizer import make_tokenizer
from gradscope.encoders.tokens import TowerTokens, check_tokens, image_tokens, text_tokens, text_tower
from gradscope.types import Batch

SEED = secrets.randbits(31)
CLOSE = {"atol": 1e-9, "rtol": 1e-9}
END, LENGTHS = 59, (1, 4, 9, 12)  # one row is full


def pixels(kind: str) -> Tensor:
    size = 160 if kind.startswith("timm") else 32
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))


def some_ids(*, pad: int = 0, end: int = END) -> Tensor:
    """Rows of different lengths: start, words (3 ... 50), an end, padding."""
    random = torch.Generator().manual_seed(SEED + 1)
    ids = torch.randint(3, 50, (len(LENGTHS), TEXT["context_length"]), generator=random)
    for row, length in zip(ids, LENGTHS, strict=True):
        row[0] = 55
        row[length - 1] = end
        row[length:] = pad
    return ids


# ---- images


def states_by_hand(visual: Any, images: Tensor) -> Tensor:
    if hasattr(visual, "trunk"):
        trunk = visual.trunk
        return trunk.blocks(trunk.norm_pre(trunk._pos_embed(trunk.patch_embed(images))))
    states = visual._embeds(images)
    for block in visual.transformer.resblocks:
        states = block(states)
    return states


def pool_by_rule(kind: str, visual: Any, found: TowerTokens) -> Tensor:
    """What the model does with its tokens, written out for each way of pooling."""
    tokens, lead = found.tokens, found.lead
    assert lead is not None
    if kind in ("class token", "class token, norm after", "custom blocks", "timm token"):
        return lead.projected[:, 0]
    if kind == "average":
        return tokens.projected.mean(1)
    if kind == "average, norm after":
        return visual.ln_post(tokens.before.mean(1)) @ visual.proj
    if kind.startswith("attention"):
        queries = visual.ln_post(visual.attn_pool(torch.cat([lead.before, tokens.before], 1)))
        return (queries[:, 1:].mean(1) if "averaged" in kind else queries[:, 0]) @ visual.proj
    trunk = visual.trunk
    if kind == "timm average":
        return visual.head(trunk.fc_norm(tokens.before.mean(1)))
    return visual.head(trunk.attn_pool(torch.cat([lead.after, tokens.after], 1) if trunk.pool_include_prefix else tokens.after))


def head_alone(kind: str, visual: Any, before: Tensor, after: Tensor) -> Tensor:
    """The tower's own head on one token [B, 1, W], as if the picture had no other."""
    if hasattr(visual, "trunk"):
        trunk = visual.trunk
        if trunk.attn_pool is not None:
            return visual.head(trunk.attn_pool(after))
        return visual.head(trunk.fc_norm(trunk.norm(before))[:, 0])
    if visual.attn_pool is not None:
        return visual.ln_post(visual.attn_pool(before))[:, 0] @ visual.proj
    return visual.ln_post(before)[:, 0] @ visual.proj


@pytest.mark.parametrize("kind", [*IMAGE, *TIMM])
def test_patches_by_shape_and_by_value(kind):
    model = image_family(kind, SEED).double()
    visual, images = model.visual, pixels(kind)
    with torch.no_grad():
        found = image_tokens(model, images)
        by_hand = states_by_hand(visual, images)
        pooled = model.encode_image(images)
        patches, width = by_hand.shape[1] - 1, by_hand.shape[2]
        assert found.tokens.before.shape == found.tokens.after.shape == (2, patches, width)
        assert found.tokens.projected.shape == (2, patches, pooled.shape[1])
        assert patches == (100 if kind in TIMM else 16)
        assert torch.equal(found.pooled, pooled)
        torch.testing.assert_close(torch.cat([found.lead.before, found.tokens.before], 1), by_hand, **CLOSE)
        torch.testing.assert_close(pool_by_rule(kind, visual, found), pooled, **CLOSE)
        for j in (0, patches // 2, patches - 1):
            one = slice(j, j + 1)
            alone = head_alone(kind, visual, found.tokens.before[:, one], found.tokens.after[:, one])
            torch.testing.assert_close(found.tokens.projected[:, j], alone, **CLOSE)
        assert (found.tokens.after - found.tokens.before).abs().max() > 0.01, "the norm does something"


@pytest.mark.parametrize("kind", [*IMAGE, *TIMM])
def test_in_single_precision_the_embedding_is_recovered_to_1e_6(kind):
    model = image_family(kind, SEED)
    images = pixels(kind).float()
    with torch.no_grad():
        found = image_tokens(model, images)
        pooled = F.normalize(pool_by_rule(kind, model.visual, found), dim=1)
        assert (pooled - F.normalize(model.encode_image(images), dim=1)).abs().max() < 1e-6


def test_the_patch_order_is_the_pictures():
    """A change in one patch of the picture changes that token's input most: with no blocks, only that token."""
    model = image_family("class token", SEED).double()
    model.visual.transformer.resblocks = nn.ModuleList()
    images = pixels("class token")
    changed = images.clone()
    changed[:, :, 8:16, 16:24] += 1  # second row, third column of a 4 x 4 grid
    moved = (image_tokens(model, images).tokens.before - image_tokens(model, changed).tokens.before).abs().amax((0, 2))
    assert moved.nonzero().flatten().tolist() == [6]


@pytest.mark.parametrize(("kind", "named"), [("resnet", "ModifiedResNet"), ("timm convolutional", "timm ConvNeXt")])
def test_towers_without_tokens_are_named(kind, named):
    model = image_family(kind, SEED)
    for call in (lambda: check_tokens(model), lambda: image_tokens(model, torch.zeros(1, 3, 32, 32))):
        with pytest.raises(ValueError, match=f"image tower {named} has no token outputs"):
            call()
    encoder = DualEncoder(model, SimpleTokenizer(context_length=12), {}, "mine")
    with pytest.raises(ValueError, match=f"encoder 'mine': the image tower {named} .*--token-weight 0"):
        encoder.add_token_scale()
    assert encoder.token_log_scale is None


def test_pooling_of_other_kinds_is_refused():
    model = image_family("class token", SEED)
    model.visual.pool_type = "none"
    with pytest.raises(ValueError, match="VisionTransformer with no pooling has no token outputs"):
        check_tokens(model)
    model.visual.attn_pool, model.visual.attn_pool_type = nn.Identity(), "cascade"
    with pytest.raises(ValueError, match="with 'cascade' attention pooling has no token outputs"):
        check_tokens(model)
    other = text_family("causal, last", SEED)
    other.text = nn.Identity()
    with pytest.raises(ValueError, match="text tower Identity has no token outputs"):
        check_tokens(other)


# ---- texts


def text_states_by_hand(text: Any, ids: Tensor) -> Tensor:
    if hasattr(text, "_embeds"):
        states, mask = text._embeds(ids)
    else:
        states, mask = text.token_embedding(ids) + text.positional_embedding, text.attn_mask
    for block in text.transformer.resblocks:
        states = block(states, attn_mask=mask)
    return states


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("kind", list(TEXTS))
def test_words_by_shape_and_by_value(kind, unpacked):
    unpacked = unpacked and kind != "class token"  # open_clip's CLIP has none
    model = text_family(kind, SEED, unpacked=unpacked).double()
    ids = some_ids(end=2 if "end id" in kind else END)
    text = text_tower(model)
    rows, ends = torch.arange(len(ids)), torch.tensor(LENGTHS) - 1
    with torch.no_grad():
        found = text_tokens(model, ids)
        pooled = model.encode_text(ids)
        by_hand = text_states_by_hand(text, ids)
        normed = text.ln_final(by_hand)
        projection = text.text_projection
        expected = normed if projection is None else projection(normed) if isinstance(projection, nn.Linear) else normed @ projection
    words = ids.shape[1]
    assert found.tokens.before.shape == (4, words, text.ln_final.weight.shape[0])
    assert found.tokens.projected.shape == (4, words, 16)
    assert torch.equal(found.pooled, pooled)
    for name, twin in (("before", by_hand), ("after", normed), ("projected", expected)):
        torch.testing.assert_close(getattr(found.tokens, name), twin[:, :words], **CLOSE)
    at = {"causal, last": -1, "both ways, last": -1, "causal, first": 0}.get(kind)
    tokens = found.tokens.projected
    recovered = found.lead.projected[:, 0] if kind == "class token" else tokens[rows, ends] if at is None else tokens[:, at]
    torch.testing.assert_close(recovered, pooled, **CLOSE)
    assert (found.lead is None) == (kind != "class token")


@pytest.mark.parametrize("kind", list(HF))
def test_words_of_hugging_face_towers(kind, tmp_path):
    model = hf_family(kind, SEED, tmp_path).double()
    text = model.text
    ids = some_ids(pad=text.config.pad_token_id)
    mask = (ids != text.config.pad_token_id).long()
    with torch.no_grad():
        found = text_tokens(model, ids)
        pooled = model.encode_text(ids)
        out = text.transformer(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        torch.testing.assert_close(found.tokens.after, out.last_hidden_state, **CLOSE)
        if kind == "mt5":
            norm = text.transformer.final_layer_norm
            torch.testing.assert_close(norm(found.tokens.before), found.tokens.after, **CLOSE)
            assert (found.tokens.before - found.tokens.after).abs().max() > 0.01
        else:
            torch.testing.assert_close(found.tokens.before, out.hidden_states[-1], **CLOSE)
        mean = (found.tokens.after * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        recovered = text.proj(mean) if "mean" in HF[kind]["pooler"] else found.tokens.projected[:, 0]
    assert found.tokens.projected.shape == (4, 12, 16)
    torch.testing.assert_close(recovered, pooled, **CLOSE)


def test_coca_has_both():
    """The contrastive half of CoCa: attention pooling for pictures, an appended class token for texts; its outputs come as pairs."""
    vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16, "output_tokens": True}
    vision |= {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2}
    text = {**TEXT, "embed_cls": True, "output_tokens": True}
    model = CoCa(16, {"width": 16, "heads": 2, "layers": 1}, text, vision).double().eval()
    with torch.no_grad():
        images, words = image_tokens(model, pixels("")), text_tokens(model, some_ids())
        lead = images.lead.before
        queries = model.visual.ln_post(model.visual.attn_pool(torch.cat([lead, images.tokens.before], 1)))
        torch.testing.assert_close(F.normalize(queries[:, 0] @ model.visual.proj, dim=1), images.pooled, **CLOSE)
        torch.testing.assert_close(F.normalize(words.lead.projected[:, 0], dim=1), words.pooled, **CLOSE)
    assert images.tokens.projected.shape == (2, 16, 16)
    assert words.tokens.projected.shape == (4, 12, 16)


# ---- one pass, no hook left, gradients


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_one_forward_pass_and_no_hook_left_behind():
    model = image_family("class token", SEED).double()
    calls: list[str] = []
    first = {"image": model.visual.transformer.resblocks[0], "text": model.transformer.resblocks[0]}
    for name, block in first.items():
        block.register_forward_hook(lambda *_, name=name: calls.append(name))
    before = hooks(model)
    image_tokens(model, pixels(""))
    text_tokens(model, some_ids())
    assert calls == ["image", "text"]
    assert hooks(model) == before == 2
    with pytest.raises(RuntimeError):
        image_tokens(model, torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    with pytest.raises(IndexError):
        text_tokens(model, torch.full((1, 12), 10_000))
    assert hooks(model) == before


def test_gradients_through_tokens_are_those_of_the_plain_route():
    model = image_family("class token", SEED).double()
    visual, images = model.visual, pixels("")
    direction = torch.randn(2, 16, 16, dtype=torch.float64)
    parameters = [p for p in visual.parameters() if p.requires_grad]
    found = torch.autograd.grad((image_tokens(model, images).tokens.projected * direction).sum(), parameters, allow_unused=True)
    plain = (visual.ln_post(states_by_hand(visual, images)) @ visual.proj)[:, 1:]
    expected = torch.autograd.grad((plain * direction).sum(), parameters, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# ---- rows a batch cannot reach


def gradient_rows(model: nn.Module, table: Tensor) -> Tensor:
    assert table.grad is not None
    return (table.grad == 0).all(1)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("kind", list(TEXTS))
def test_unreached_rows_equal_the_zero_rows_of_autograd(kind, words):
    model = text_family(kind, SEED).double()
    ids = some_ids(end=2 if "end id" in kind else END)
    ends = torch.tensor(LENGTHS) - 1
    valid = (torch.arange(12) >= 1) & (torch.arange(12) <= ends[:, None])
    found = text_tokens(model, ids)
    loss = (found.pooled * torch.randn_like(found.pooled)).sum()
    if words:
        loss = loss + (found.tokens.projected * torch.randn_like(found.tokens.projected))[valid].sum()
    loss.backward()
    rows = unreached_rows(model, ids, valid if words else None)
    tables = {id(p): p for p in (model.text.token_embedding.weight, model.text.positional_embedding)}
    assert rows.keys() == tables.keys()
    for key, table in tables.items():
        assert torch.equal(rows[key], gradient_rows(model, table)), (kind, SEED)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("kind", list(HF))
def test_unreached_rows_of_hugging_face_towers(kind, words, tmp_path):
    model = hf_family(kind, SEED, tmp_path).double()
    pad = model.text.config.pad_token_id
    ids = some_ids(pad=pad)[:3]  # no full row
    found = text_tokens(model, ids)
    loss = (found.pooled * torch.randn_like(found.pooled)).sum()
    valid = (ids != pad) & (torch.arange(12) > 0)
    if words:
        loss = loss + (found.tokens.projected * torch.randn_like(found.tokens.projected))[valid].sum()
    loss.backward()
    rows = unreached_rows(model, ids, valid if words else None)
    tables = {id(p): (name, p) for name, p in model.named_parameters()}
    assert len(rows) == (1 if kind == "mt5" else 3)
    for key, structural in rows.items():
        name, table = tables[key]
        assert torch.equal(structural, gradient_rows(model, table)), (kind, name, SEED)


# ---- behind the encoder's own methods


@pytest.mark.parametrize("family", ["siglip", "clipa", "mt5"])
def test_an_encoder_with_a_hugging_face_tokenizer(family, tmp_path):
    write_tokenizer(tmp_path, FRAMES[family])
    config = model_config(FRAMES[family], 12)
    tokenizer = make_tokenizer(config, tmp_path)
    kind = "causal, last" if family == "mt5" else "both ways, last"
    model = text_family(kind, SEED)
    model.text.token_embedding = nn.Embedding(tokenizer.vocab_size, 24)
    encoder = DualEncoder(model, tokenizer, config, family)
    encoder.add_token_scale()
    tokenized = encoder.tokenize(["red ball", "a large blue ball left of a green one", ""])
    ids = tokenized.ids
    batch = Batch(
        ids=("a", "b", "c"),
        images={"full": torch.randn(3, 3, 32, 32)},
        texts={"full": ids},
        lengths=tokenized.lengths,
        captions=("", "", ""),
    )
    assert encoder.context == 12
    found = encoder.embed(batch, tokens=True)
    assert found.image_tokens.shape == (3, 16, 16)
    assert found.text_tokens.shape == (3, 12, 16)
    assert torch.equal(found.text_valid, tokenizer.valid(ids))
    assert torch.equal(found.text, encoder.embed_text(ids))
    torch.testing.assert_close(found.text_tokens[:, -1], found.text, atol=1e-6, rtol=0)  # both pool the last position
    loss = (found.text * torch.randn_like(found.text)).sum()
    loss = loss + (found.text_tokens * torch.randn_like(found.text_tokens))[found.text_valid].sum()
    loss.backward()
    rows = encoder.structural_rows(batch.texts["full"])
    assert set(rows) == {"model.text.token_embedding.weight", "model.text.positional_embedding"}
    for name, structural in rows.items():
        assert torch.equal(structural, gradient_rows(model, dict(encoder.named_parameters())[name])), name
    assert not rows["model.text.positional_embedding"].any(), "the last position sees its padding"
    assert not rows["model.text.token_embedding.weight"][tokenizer.pad]


@pytest.mark.parametrize(
    ("kind", "expected"), [("class token", 17), ("timm attention", 101), ("resnet", 12), ("timm convolutional", 12)]
)
def test_the_longer_tower_in_tokens(kind, expected):
    encoder = DualEncoder(image_family(kind, SEED), SimpleTokenizer(context_length=12), {}, "mine")
    assert encoder.longest_sequence == expected
    encoder = DualEncoder(image_family(kind, SEED), SimpleTokenizer(context_length=200), {}, "mine")
    assert encoder.longest_sequence == 200


@pytest.mark.parametrize("family", ["siglip", "clipa", "clips"])
def test_an_encoder_with_a_hugging_face_tokenizer_survives_a_checkpoint(family, tmp_path):
    """Our loader and plain open_clip both read it back: same ids, same embeddings."""
    write_tokenizer(tmp_path / "tokenizer", FRAMES[family])
    text = {**TEXT, "vocab_size": 320, "no_causal_mask": True, "pool_type": "last", "proj_bias": True}
    text |= model_config(FRAMES[family], 12)["model_cfg"]["text_cfg"]
    config = {
        "model_cfg": {"embed_dim": 16, "vision_cfg": dict(VISION), "text_cfg": text, "custom_text": True, "init_logit_bias": -10},
        "preprocess_cfg": {"size": [32, 32]},
    }
    model_cfg = {k: v for k, v in config["model_cfg"].items() if k != "custom_text"}
    text_cfg = {k: v for k, v in text.items() if "tokenizer" not in k}
    model = open_clip.CustomTextCLIP(**{**model_cfg, "text_cfg": text_cfg}).eval()
    encoder = DualEncoder(model, make_tokenizer(config, tmp_path / "tokenizer"), config, family)
    save_encoder(tmp_path / "saved", encoder)
    captions = ["red ball", "A large, blue ball! left of a green one " * 4, "", "赤い"]
    ids = encoder.tokenize(captions).ids
    again = load_encoder(str(tmp_path / "saved"))
    assert torch.equal(again.tokenize(captions).ids, ids)
    assert torch.equal(again.embed_texts(ids), encoder.embed_texts(ids))
    plain = open_clip.create_model(f"local-dir:{tmp_path / 'saved'}").eval()
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{tmp_path / 'saved'}")(captions), ids)
    with torch.no_grad():
        torch.testing.assert_close(plain.encode_text(ids, normalize=True), encoder.embed_texts(ids), atol=1e-6, rtol=0)
