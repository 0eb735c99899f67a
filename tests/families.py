"""One tiny model of every family of towers that open_clip builds, with random weights that are far from their plain start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VISION = {"image_size": 32, "layers": 3, "width": 32, "patch_size": 8, "head_width": 16}
TEXT = {"context_length": 12, "vocab_size": 60, "width": 24, "heads": 2, "layers": 3}
#: timm's own miniature vision transformers, by the way they pool.
TIMM = {
    "timm token": {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear"},
    "timm average": {"timm_model_name": "test_vit2", "timm_pool": "avg", "timm_proj": "linear"},
    "timm attention": {"timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "none"},
    "timm attention, projected": {"timm_model_name": "test_vit3", "timm_pool": "map", "timm_proj": "mlp"},
}

IMAGE = {
    "class token": {},
    "class token, norm after": {"final_ln_after_pool": True},
    "average": {"pool_type": "avg"},
    "average, norm after": {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True},
    "attention": {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2},
    "attention, averaged": {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2, "pool_type": "avg"},
    "custom blocks": {"qk_norm": True, "scale_fc": True},
}

TEXTS = {
    "causal, largest id": {},
    "causal, end id": {"pool_type": "eos", "eos_id": 2},
    "causal, last": {"pool_type": "last"},
    "causal, first": {"pool_type": "first"},
    "both ways, last": {"pool_type": "last", "no_causal_mask": True, "proj_bias": True},
    "no projection": {"proj_type": "none", "width": 16},
    "custom blocks": {"scale_attn": True},
    "class token": {"embed_cls": True},
}


def randomised(build: Callable[[], Any], seed: int) -> Any:
    """The same model for the same seed. Norms, biases and tables get values too, so that nothing is hidden by a one or a zero."""
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = build()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "logit" not in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=random) * (0.5 if parameter.ndim > 1 else 1))
    return model.eval()


def image_family(kind: str, seed: int) -> Any:
    """A CLIP whose image tower is of ``kind``: one of IMAGE or TIMM, or "resnet" or "timm convolutional"."""
    from open_clip import CLIP

    vision: dict[str, Any] = {**VISION, **IMAGE.get(kind, {})}
    size = 16
    if kind in TIMM:
        vision, size = {"image_size": 160, **TIMM[kind]}, 96 if kind == "timm attention" else 16
    elif kind == "timm convolutional":
        vision = {"image_size": 160, "timm_model_name": "test_convnext", "timm_pool": "avg", "timm_proj": "linear"}
    elif kind == "resnet":
        vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}
    return randomised(lambda: CLIP(embed_dim=size, vision_cfg=vision, text_cfg=dict(TEXT)), seed)


def text_family(kind: str, seed: int, *, unpacked: bool = False) -> Any:
    """A CustomTextCLIP (or, ``unpacked``, a CLIP) whose text tower is of ``kind``, one of TEXTS."""
    from open_clip import CLIP, CustomTextCLIP

    build = CLIP if unpacked else CustomTextCLIP
    return randomised(lambda: build(embed_dim=16, vision_cfg=dict(VISION), text_cfg={**TEXT, **TEXTS[kind]}), seed)


HF = {
    "bert": {"pooler": "cls_pooler", "proj": "linear"},
    "bert, last state": {"pooler": "cls_last_hidden_state_pooler", "proj": "mlp"},
    "roberta": {"pooler": "mean_pooler", "proj": "mlp"},
    "mt5": {"pooler": "mean_pooler", "proj": "linear"},
}


def hf_family(kind: str, seed: int, folder: Path) -> Any:
    """A CustomTextCLIP with a Hugging Face text tower, built from a configuration on disk (open_clip reads it by path)."""
    from open_clip import CustomTextCLIP
    from transformers import BertConfig, MT5Config, RobertaConfig

    common: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 20,
    }
    config: Any
    if kind == "mt5":
        config = MT5Config(vocab_size=60, d_model=24, d_kv=12, d_ff=32, num_layers=3, num_heads=2, pad_token_id=0)
    elif kind == "roberta":
        config = RobertaConfig(**common, pad_token_id=1)
    else:
        config = BertConfig(**common, pad_token_id=0)
    config.save_pretrained(folder)
    text = {
        "hf_model_name": str(folder),
        "hf_model_pretrained": False,
        "hf_pooler_type": HF[kind]["pooler"],
        "hf_proj_type": HF[kind]["proj"],
    }
    return randomised(lambda: CustomTextCLIP(embed_dim=16, vision_cfg=copy.deepcopy(VISION), text_cfg=text), seed)
