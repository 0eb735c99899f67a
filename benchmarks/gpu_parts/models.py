"""Models of random weights with a long text context, and batches of noise in pinned memory: nothing is read or decoded."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from talk import random_weights_are_meant
from torch import Tensor

from .setting import Setting

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 500, "width": 32, "heads": 2, "layers": 1},
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """An open_clip model and the configuration that rebuilds it."""

    name: str
    module: Any
    config: dict[str, Any]

    @property
    def context(self) -> int:
        return int(self.config["model_cfg"]["text_cfg"]["context_length"])

    def copied(self) -> Any:
        return copy.deepcopy(self.module)


def make_model(setting: Setting, name: str, context: int) -> Model:
    """Random weights; ``context`` text tokens."""
    import open_clip

    torch.manual_seed(setting.seed)
    if setting.tiny:
        module = open_clip.CLIP(**TINY, output_dict=True).to(setting.device)
        return Model(name="tiny", module=module, config={"model_cfg": TINY, "preprocess_cfg": {"size": [16, 16]}})
    config = open_clip.get_model_config(name)
    config["text_cfg"]["context_length"] = context
    random_weights_are_meant()
    module = open_clip.create_model(name, pretrained=None, device=setting.device, force_context_length=context, output_dict=True)
    return Model(name=name, module=module, config={"model_cfg": config, "preprocess_cfg": open_clip.get_model_preprocess_cfg(module)})


def make_batch(setting: Setting, model: Model, count: int) -> tuple[Tensor, Tensor]:
    """Pictures [count, 3, H, W] and ids [count, L] of captions that fill the context, pinned where there is a GPU."""
    size = model.module.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(setting.seed)
    images = torch.randn(count, 3, height, width, generator=generator)
    vocabulary = model.module.vocab_size
    ids = torch.randint(1, vocabulary - 1, (count, model.context), generator=generator)
    ids[:, -1] = vocabulary - 1  # end-of-text
    return (images.pin_memory(), ids.pin_memory()) if setting.cuda else (images, ids)
