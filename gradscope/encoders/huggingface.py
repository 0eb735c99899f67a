"""Hugging Face ``CLIPModel``: its names, shapes and settings in open_clip's terms.

Per block, the query, key and value projections become one (in that order, rows on rows); the two output projections are stored
[out, in] there and [in, out] here, so they are transposed. Everything else is renamed.
Source: the parameter names of transformers' CLIPModel; its ``hidden_act`` says which GELU the weights belong to.

How it can mislead: transformers pads with end-of-text and open_clip with 0. Pooling reads the first end-of-text and attention is
causal, so the pooled embeddings are equal; states beyond the end are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "logit_scale": "logit_scale",
}
_TRANSPOSED = {"visual_projection.weight": "visual.proj", "text_projection.weight": "text_projection"}
_NORMS = {
    "vision_model.pre_layrnorm": "visual.ln_pre",  # spelled so
    "vision_model.post_layernorm": "visual.ln_post",
    "text_model.final_layer_norm": "ln_final",
}
_TOWERS = {"vision_model": "visual.transformer", "text_model": "transformer"}
_BLOCK = {
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_LAYER = re.compile(r"(vision_model|text_model)\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ACTIVATIONS = {"quick_gelu": True, "gelu": False}
_INTERPOLATION = {0: "nearest", 2: "bilinear", 3: "bicubic"}
_DEFAULT_EPS = 1e-5
#: Settings of a tower that count something.
_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "image_size", "patch_size")


def from_huggingface(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """CLIPModel's names -> open_clip's. A name that CLIPModel does not have is passed on unchanged, so that it counts as left over.

    Raises:
        ValueError: a block with only some of its query, key and value projections.
    """
    renamed: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        layer = _LAYER.fullmatch(key)
        norm, _, kind = key.rpartition(".")
        if layer and (part := layer[3].removeprefix("self_attn.")) in ("q_proj", "k_proj", "v_proj"):
            parts.setdefault(f"{_TOWERS[layer[1]]}.resblocks.{layer[2]}.attn.in_proj_{layer[4]}", {})[part] = tensor
        elif layer and layer[3] in _BLOCK:
            renamed[f"{_TOWERS[layer[1]]}.resblocks.{layer[2]}.{_BLOCK[layer[3]]}.{layer[4]}"] = tensor
        elif key in _TRANSPOSED:
            renamed[_TRANSPOSED[key]] = tensor.T.contiguous()
        elif norm in _NORMS:
            renamed[f"{_NORMS[norm]}.{kind}"] = tensor
        else:
            renamed[_NAMES.get(key, key)] = tensor
    for name, found in parts.items():
        if len(found) != 3:
            raise ValueError(f"'{source}' holds only {', '.join(sorted(found))} of the three projections that make '{name}'")
        renamed[name] = torch.cat([found["q_proj"], found["k_proj"], found["v_proj"]])
    return renamed


def is_clip_folder(folder: Path) -> bool:
    """A config.json of a CLIPModel lies in the folder."""
    return _read(folder / "config.json").get("model_type") == "clip"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json and preprocessor_config.json -> ``{"model_cfg": ..., "preprocess_cfg": ...}`` of open_clip.

    The activation is ``hidden_act``. The text context is read from here; the weights have the last word on it.

    Raises:
        ValueError: an activation or an end-of-text token that open_clip's CLIP does not have, or a preprocessing it cannot express.
    """
    config = _read(folder / "config.json")
    vision, text = (
        {**_table(config, f"{tower}_config", folder), **_table(config, f"{tower}_config_dict", folder)} for tower in ("vision", "text")
    )
    acts = {tower.get("hidden_act", "quick_gelu") for tower in (vision, text)}
    if len(acts) != 1 or not acts <= _ACTIVATIONS.keys():
        raise ValueError(
            f"'{folder}' uses the activation {', '.join(sorted(acts))}; known: {', '.join(_ACTIVATIONS)}, one for both towers"
        )
    for tower in (vision, text):
        sizes = [tower.get(key, 1) for key in _SIZES]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            wrong = next(key for key, size in zip(_SIZES, sizes, strict=True) if not (isinstance(size, int) and size > 0))
            raise ValueError(f"'{folder / 'config.json'}': {wrong} is {tower[wrong]!r}, where a whole number above 0 belongs")
    model = {
        "embed_dim": config.get("projection_dim", 512),
        "quick_gelu": _ACTIVATIONS[acts.pop()],
        "vision_cfg": _vision(vision),
        "text_cfg": _text(text, folder),
    }
    return {"model_cfg": model, "preprocess_cfg": _preprocess(folder, model["vision_cfg"]["image_size"])}


def _table(config: Mapping[str, Any], key: str, folder: Path) -> Mapping[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"'{folder / 'config.json'}': {key} is not an object; restore it from where the weights came")
    return found


def _vision(config: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = config.get("hidden_size", 768), config.get("num_attention_heads", 12)
    found = {
        "image_size": config.get("image_size", 224),
        "layers": config.get("num_hidden_layers", 12),
        "width": width,
        "head_width": width // heads,
        "patch_size": config.get("patch_size", 32),
        "mlp_ratio": config.get("intermediate_size", 3072) / width,
    }
    return found | _norm(config)


def _text(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    width, vocabulary = config.get("hidden_size", 512), config.get("vocab_size", 49408)
    end = config.get("eos_token_id", 49407)
    if end not in (2, 49407):  # 2: what older files say; transformers then pools at the largest id, as open_clip does
        raise ValueError(f"'{folder}' ends captions with token {end}; gradscope reads CLIP's own tokenizer, which ends them with 49407")
    found = {
        "context_length": config.get("max_position_embeddings", 77),
        "vocab_size": vocabulary,
        "width": width,
        "heads": config.get("num_attention_heads", 8),
        "layers": config.get("num_hidden_layers", 12),
        "mlp_ratio": config.get("intermediate_size", 2048) / width,
    }
    return found | _norm(config)


def _norm(config: Mapping[str, Any]) -> dict[str, Any]:
    eps = config.get("layer_norm_eps", _DEFAULT_EPS)
    return {} if eps == _DEFAULT_EPS else {"norm_kwargs": {"eps": eps}}


def _preprocess(folder: Path, image_size: int) -> dict[str, Any]:
    """Without a preprocessor_config.json: CLIP's own, at the size of the tower."""
    config = _read(folder / "preprocessor_config.json")
    size, crop = _sides(config.get("size", image_size)), _sides(config.get("crop_size", image_size))
    cropped = config.get("do_center_crop", True)
    if cropped and max(size) != max(crop):
        raise ValueError(
            f"'{folder}' resizes pictures to {max(size)} and crops {max(crop)}; open_clip's preprocessing has one size for both"
        )
    found: dict[str, Any] = {
        "size": list(crop if cropped else size),
        "resize_mode": "shortest" if cropped else "squash",
        "interpolation": _INTERPOLATION.get(config.get("resample", 3), "bicubic"),
    }
    if "image_mean" in config:
        found |= {"mean": config["image_mean"], "std": config["image_std"]}
    return found


def _sides(size: int | Mapping[str, int]) -> tuple[int, int]:
    """A number, ``{"shortest_edge": n}`` or ``{"height": h, "width": w}``."""
    if isinstance(size, int):
        return size, size
    if "shortest_edge" in size:
        return size["shortest_edge"], size["shortest_edge"]
    return size["height"], size["width"]


def _read(path: Path) -> dict[str, Any]:
    """Raises ValueError for a file that is no JSON object; an absent one is empty."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{path}' is not JSON ({error}); restore it from where the weights came") from error
    if not isinstance(found, dict):
        raise ValueError(f"'{path}' is not a JSON object; restore it from where the weights came")
    return found
