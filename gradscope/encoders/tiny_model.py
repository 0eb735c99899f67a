"""The embedded encoder ``tiny``: an open_clip CLIP of about two million parameters, loaded from the folder ``tiny``.

The folder has open_clip's local-dir layout (``open_clip_config.json``, ``open_clip_model.safetensors``) plus its own cut merges
file ``bpe.txt.gz``. Weights are stored in fp16 and promoted to fp32 here; the logit scale is stored in fp32 (ln 100).
How it was made: analyses/tiny_encoder. It knows ``scenes`` only; on real captions its geometry says nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tiny"


def load_config(folder: Path = FOLDER) -> dict[str, Any]:
    """``{"model_cfg": ..., "preprocess_cfg": ...}`` as open_clip writes it."""
    config: dict[str, Any] = json.loads((folder / "open_clip_config.json").read_text(encoding="utf-8"))
    return config


def load_tokenizer(folder: Path = FOLDER) -> Any:
    """open_clip's ``SimpleTokenizer`` over the cut merges; end-of-text is the largest id, padding is 0."""
    from open_clip.tokenizer import SimpleTokenizer

    context = load_config(folder)["model_cfg"]["text_cfg"]["context_length"]
    return SimpleTokenizer(bpe_path=str(folder / "bpe.txt.gz"), context_length=context)


def build_model(folder: Path = FOLDER) -> Any:
    """A freshly initialised ``open_clip.CLIP`` of tiny's shape, fp32."""
    from open_clip import CLIP

    return CLIP(**load_config(folder)["model_cfg"])


def load_tiny(folder: Path = FOLDER) -> tuple[Any, Any, dict[str, Any]]:
    """(model in fp32 and eval mode, tokenizer, preprocess_cfg for ``open_clip.transform.PreprocessCfg``).

    Raises:
        RuntimeError: if the weights do not belong to the configuration.
    """
    from safetensors.torch import load_file

    model = build_model(folder)
    state = load_file(folder / "open_clip_model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval(), load_tokenizer(folder), load_config(folder)["preprocess_cfg"]
