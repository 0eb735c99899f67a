"""Long-CLIP checkpoints as released, into an open_clip model of 248 positions.

The release keeps two text position tables: a frozen one that supplies rows 0-19 and a trained one that supplies the rest; only
their merger is ever used, so it becomes the one table here. The towers are OpenAI's: QuickGELU.
Source: Long-CLIP (Zhang et al., 2024), section 3.1.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.encoders.dual import DualEncoder
from gradscope.paths import data_folders, search

KEPT = 20
#: width of the image tower -> open_clip architecture
ARCHITECTURES = {768: "ViT-B-16-quickgelu", 1024: "ViT-L-14-quickgelu"}

#: Numbers that OpenAI's files carry beside the weights.
NOTES = ("input_resolution", "context_length", "vocab_size")


def merge_positions(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One table of positions: rows 0-19 of ``positional_embedding``, the rest of ``positional_embedding_res``."""
    state = dict(state)
    trained = state.pop("positional_embedding_res", None)
    if trained is not None:
        state["positional_embedding"] = torch.cat([state["positional_embedding"][:KEPT], trained[KEPT:]])
    return state


def load_longclip(name: str) -> DualEncoder:
    """``longclip-L``, ``longclip-B`` or a path to a released .pt file. Raises ValueError when absent or of another layout."""
    path = Path(name) if Path(name).is_file() else search(name if name.endswith(".pt") else f"{name}.pt")
    if path is None:
        where = ", ".join(str(folder) for folder in data_folders())
        raise ValueError(
            f"'{name}' is not on disk: looked in {where}. Fetch {Path(name).stem}.pt from the Long-CLIP release "
            "(BeichenZhang/LongCLIP-L or -B on the Hugging Face hub) and put it into one of these folders, or give its path."
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"'{path}' is not a plain file of tensors (it would need to run code to open): not loaded") from error
    return from_state(state, name)


def _unwrapped(state: Any, name: str) -> dict[str, Tensor]:
    """fp32 tensors by bare name: a training checkpoint's ``state_dict``, prefixes of wrappers in any order, shape notes left out."""
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"'{name}' is not a Long-CLIP checkpoint: expected a table of tensors by name")
    bare = {re.sub(r"^((module|_orig_mod)\.)+", "", key): value for key, value in state.items()}
    return {key: value.float() for key, value in bare.items() if key not in NOTES}


def from_state(state: dict[str, Tensor], name: str) -> DualEncoder:
    """A Long-CLIP state dict -> DualEncoder. Every missing or left-over key is an error that names it."""
    import open_clip
    from open_clip.tokenizer import SimpleTokenizer

    state = _unwrapped(state, name)
    if "visual.class_embedding" not in state or "positional_embedding" not in state:
        raise ValueError(f"'{name}' is not a Long-CLIP checkpoint: it holds {', '.join(sorted(state)[:5])}, ...")
    state = merge_positions(state)
    architecture = ARCHITECTURES.get(state["visual.class_embedding"].shape[0])
    if architecture is None:
        raise ValueError(f"'{name}' has an image tower of width {state['visual.class_embedding'].shape[0]}; known: 768, 1024")
    config: Any = copy.deepcopy(open_clip.get_model_config(architecture))
    context = state["positional_embedding"].shape[0]
    config["text_cfg"]["context_length"] = context
    model = open_clip.CLIP(**config)
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ValueError(f"'{name}' does not fit {architecture}: {str(error).strip().splitlines()[-1].strip()}") from error
    if missing or unexpected:
        raise ValueError(f"'{name}' does not fit {architecture}: missing {missing[:5]}, left over {unexpected[:5]}")
    from gradscope.encoders.load import _full_config

    return DualEncoder(model, SimpleTokenizer(context_length=context), _full_config(model, {"model_cfg": config}), name)
