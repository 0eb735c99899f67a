"""Checkpoints: whole or absent, loadable by plain open_clip, exact to resume from.

step-000500/encoder/   open_clip_config.json, open_clip_model.safetensors (fp32), and the
                       tokenizer's own files: bpe.txt.gz if its merges are not CLIP's, or a Hugging Face tokenizer's
step-000500/trainer.pt optimizer, gradient scaler, token scale, random states (opened by the safe loader only)
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim import Optimizer

from gradscope.encoders.dual import DualEncoder


def save(folder: Path, encoder: DualEncoder, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Writes the checkpoint under a temporary name and renames it: a kill leaves no half of one."""
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    save_encoder(partial / "encoder", encoder)
    state = {
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "token_log_scale": None if encoder.token_log_scale is None else encoder.token_log_scale.detach().cpu(),
        "random_state": torch.get_rng_state(),
        "device_random_state": torch.cuda.get_rng_state(encoder.device) if encoder.device.type == "cuda" else None,
    }
    torch.save(state, partial / "trainer.pt")
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            _flush(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def save_encoder(folder: Path, encoder: DualEncoder) -> None:
    """open_clip's local-dir layout: ``open_clip.create_model("local-dir:FOLDER")`` loads it."""
    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text(json.dumps(encoder.config, indent=2) + "\n", encoding="utf-8")
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    encoder.tokenizer.save(folder)


def load(folder: Path, encoder: DualEncoder, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Puts a saved state back, bit for bit. Raises ValueError if the file is damaged or of another model."""
    from safetensors.torch import load_file

    try:
        weights = load_file(folder / "encoder" / "open_clip_model.safetensors")
        state: dict[str, Any] = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        encoder.model.load_state_dict(weights)
        optimizer.load_state_dict(state["optimizer"])
    except Exception as error:
        raise ValueError(f"checkpoint '{folder}' cannot be resumed from: {str(error).splitlines()[0]}") from error
    scaler.load_state_dict(state["scaler"])
    if encoder.token_log_scale is not None:
        with torch.no_grad():
            encoder.token_log_scale.copy_(state["token_log_scale"])
    torch.set_rng_state(state["random_state"])
    if encoder.device.type == "cuda" and state.get("device_random_state") is not None:  # dropout on a GPU draws from this one
        torch.cuda.set_rng_state(state["device_random_state"], encoder.device)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
