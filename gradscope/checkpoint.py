"""Checkpoints: whole or absent, loadable by plain open_clip, exact to resume from.

step-000500/encoder/   open_clip_config.json, open_clip_model.safetensors (fp32), and the
                       tokenizer's own files: bpe.txt.gz if its merges are not CLIP's, or a Hugging Face tokenizer's
step-000500/trainer.pt optimizer, gradient scaler, token scale, random states (opened by the safe loader only)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from gradscope.data.batching import generator
from gradscope.distributed import everyones, is_sharded, rank, whole, world
from gradscope.encoders.dual import DualEncoder

#: How an optimizer computes its update, of its settings.
KERNELS = ("fused", "foreach")


def save(folder: Path, encoder: DualEncoder, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Writes the checkpoint under a temporary name and renames it: a kill leaves no half of one.

    Of several ranks the first writes, and all must call this: shards are put together and random states collected. The files are those
    of one process, whatever the number of ranks was.
    """
    weights = {name: _for_first(tensor).cpu().contiguous() for name, tensor in encoder.model.state_dict().items()}
    state = {
        "optimizer": _whole_state(optimizer.state_dict()),
        "scaler": scaler.state_dict(),
        "token_log_scale": None if encoder.token_log_scale is None else encoder.token_log_scale.detach().cpu(),
        **_random_states(encoder.device),
    }
    if rank() == 0:
        with _room_for(folder):
            _write(folder, encoder, weights, state)


@contextmanager
def _room_for(folder: Path) -> Iterator[None]:
    """A full disk has other words in each library that writes. Raises ValueError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(_partial(folder), ignore_errors=True)
        free = decimal(shutil.disk_usage(folder.parent).free)
        raise ValueError(
            f"the checkpoint {folder} cannot be written, {free} are free there: {str(error).splitlines()[0]}; earlier ones are kept. "
            "Make room, then give the same command with --resume"
        ) from error


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _write(folder: Path, encoder: DualEncoder, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    partial = _partial(folder)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    _write_encoder(partial / "encoder", encoder, weights)
    torch.save(state, partial / "trainer.pt")
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            _flush(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _whole_state(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with shards put together; on one process the same tensors."""
    moments = {
        index: {name: _for_first(value) if isinstance(value, Tensor) else value for name, value in of_parameter.items()}
        for index, of_parameter in state["state"].items()
    }
    return {**state, "state": moments}


def _for_first(tensor: Tensor) -> Tensor:
    """A whole tensor; of a sharded one the other ranks take part and keep nothing."""
    if not is_sharded(tensor):
        return tensor.detach()
    found = whole(tensor).detach()
    return found.cpu() if rank() == 0 else found[:0]


def _random_states(device: torch.device) -> dict[str, Any]:
    """Of this process, and of every rank where there are several."""
    own = (torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)
    return {"random_state": own[0], "device_random_state": own[1], "random_states_of_ranks": everyones(own) if world() > 1 else None}


def save_encoder(folder: Path, encoder: DualEncoder) -> None:
    """open_clip's local-dir layout: ``open_clip.create_model("local-dir:FOLDER")`` loads it."""
    _write_encoder(folder, encoder, {name: t.detach().cpu().contiguous() for name, t in encoder.model.state_dict().items()})


def _write_encoder(folder: Path, encoder: DualEncoder, weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text(json.dumps(encoder.config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "open_clip_model.safetensors")
    encoder.tokenizer.save(folder)


def load_weights(folder: Path, encoder: DualEncoder) -> None:
    """The saved weights, before anything is wrapped. Raises ValueError if the file is missing, damaged or of another model."""
    from safetensors.torch import load_file

    with _or_refuse(folder):
        encoder.model.load_state_dict(load_file(folder / "encoder" / "open_clip_model.safetensors"))
        state = _trainer_state(folder)
        if encoder.token_log_scale is not None:
            with torch.no_grad():
                encoder.token_log_scale.copy_(state["token_log_scale"])


def load_training(folder: Path, encoder: DualEncoder, optimizer: Optimizer, scaler: torch.amp.GradScaler, seed: int) -> int:
    """Optimizer, gradient scaler and random states, bit for bit; after wrapping. Returns the number of ranks that wrote it.

    Raises ValueError as ``load_weights``.

    With another number of ranks than the run was saved with, ranks above the first draw from ``seed`` and the rank anew (dropout).
    """
    with _or_refuse(folder):
        state = _trainer_state(folder)
        _load_optimizer(optimizer, state["optimizer"])
        scaler.load_state_dict(state["scaler"])
    of_ranks = state.get("random_states_of_ranks") or [(state["random_state"], state.get("device_random_state"))]
    if rank() == 0 or len(of_ranks) == world():
        host, on_device = of_ranks[rank()]
        torch.set_rng_state(host)
        if encoder.device.type == "cuda" and on_device is not None:  # dropout on a GPU draws from this one
            torch.cuda.set_rng_state(on_device, encoder.device)
    else:
        seed_rank(seed)
    return len(of_ranks)


def seed_rank(seed: int) -> None:
    """Ranks above the first draw numbers of their own; the first one those of a single process."""
    if rank():
        torch.manual_seed(generator(seed, "rank", rank()).initial_seed())


def load(folder: Path, encoder: DualEncoder, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Puts a saved state back, bit for bit, on one process. Raises ValueError if the file is damaged or of another model."""
    load_weights(folder, encoder)
    load_training(folder, encoder, optimizer, scaler, seed=0)


def _trainer_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    return state


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Whole moments into an optimizer of whole parameters or of shards."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kernels = [{name: group.get(name) for name in KERNELS} for group in optimizer.param_groups]
    moments = {
        index: {name: _sharded_like(value, parameters[index]) for name, value in of_parameter.items()}
        for index, of_parameter in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": moments})
    if any(map(is_sharded, parameters)):  # the kernel that was saved may not take shards
        for group, own in zip(optimizer.param_groups, kernels, strict=True):
            group.update(own)
    if not any(group.get("fused") for group in optimizer.param_groups):  # as in runs from before the fused update
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # says to GradScaler: fused; set when it was made


def _sharded_like(value: Any, parameter: Tensor) -> Any:
    if not (isinstance(value, Tensor) and is_sharded(parameter) and value.shape == parameter.shape):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


@contextmanager
def _or_refuse(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]  # torch adds three sentences on archives
        raise ValueError(
            f"checkpoint '{folder}' cannot be resumed from: {first.rstrip('.')}; move that folder away to go on from the one before it"
        ) from error


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
