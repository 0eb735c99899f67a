"""The embedded encoder ``tiny``: an open_clip CLIP of about two million parameters; ``load_encoder("tiny")`` loads it.

The folder has open_clip's local-dir layout (``open_clip_config.json``, ``open_clip_model.safetensors``) plus its own cut merges
file ``bpe.txt.gz``. Weights are stored in fp16 and promoted to fp32 at load; the logit scale is stored in fp32 (ln 100).
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
