"""Two ways to a faster step that are off by default: compiled blocks, and the channels-last layout of convolutions.

compile         each block of a tower becomes one kernel chain by ``torch.compile``; blocks of one shape share what is compiled, so the
                wait at the first step does not grow with the depth. A tower without blocks is compiled as a whole; one that is frozen
                and rests is not. Names of parameters stay as they are, and so do checkpoints. Evaluation runs uncompiled: the same
                weights give the same bytes everywhere. Shapes are fixed (training drops the last, narrower batch), so that nothing is
                compiled after the first step; a step in which something was says so.
channels last   weights of convolutions are stored with their channels side by side, which convolutions on a GPU prefer in half
                precision. A ViT has one such layer and gains next to nothing; a ResNet is made of them.
Both give the same numbers to rounding only, so they are settings of the run, and a run is resumed with the same ones.

Measured on a CPU (2026-11-30, torch 2.14.1, one thread, processor time of forward and backward against the plain form): compiled tiny
0.9 to 1.0; channels last RN50 0.84 to 1.02, ViT-B-32 1.00 to 1.04. On a CPU there is little to gain; a GPU was not measured.
The first step of tiny, two block shapes: 28 s of processor time, 22 of them the C++ compiler's; 2 s where torch's cache on disk
(TORCHINDUCTOR_CACHE_DIR) has them from an earlier run.

How it can mislead: the first step of a compiled run takes as long as compiling does, and counts in its rates; a forward hook of
yours inside a compiled block may not fire. The probe's hooks are on embeddings and logits, outside. A process that is killed while it
compiles can leave half a file in torch's cache, on which later runs fail ("file too short"): delete that cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.freeze import image_tower, text_tower_parts

#: Kinds of blocks that one class may be compiled for: by width, mask, dropout rate, gradient.
KINDS = 64


def speed_up(encoder: DualEncoder, *, compiled: bool, channels: bool) -> list[str]:
    """What a recipe asks for, before activations are checkpointed and before the encoder is wrapped; in words, nothing without any."""
    words = [f"convolutions with channels last: {channels_last(encoder)}"] if channels else []
    return [*words, compile_towers(encoder)] if compiled else words


def compile_towers(encoder: DualEncoder, backend: str = "inductor") -> str:
    """Compiles both towers' blocks in place; returns in words what was. ``backend``: of ``torch.compile``.

    Raises:
        ValueError: no compiler on this machine.
    """
    if backend == "inductor":
        _check_compiler(encoder.device)
    import torch._dynamo.config
    import torch._functorch.config

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
    torch._functorch.config.donated_buffer = False  # the probe goes through the graph a second time
    counts = []
    resting = {id(inner) for module in encoder.resting for inner in module.modules()}
    for tower in (image_tower(encoder.model), text_tower_parts(encoder.model)):
        parts = [part for part in tower.blocks or tower.modules if id(part) not in resting]
        for part in parts:
            part.forward = _Compiled(
                module=part, eager=part.forward, compiled=torch.compile(part.forward, backend=backend, dynamic=False)
            )
        if parts:
            counts.append(f"{len(parts)} of the {tower.name} tower" if tower.blocks else f"the {tower.name} tower as a whole")
    return f"blocks that are compiled at the first step, which can take minutes: {', '.join(counts) or 'none, all are frozen'}"


@dataclass(kw_only=True)
class Compilations:
    """Notices the steps in which torch compiled something."""

    known: int = field(default_factory=lambda: _graphs())

    def words(self, step: int, seconds: float, *, first: bool) -> str:
        """After a step: how much it compiled, and in how long a step; nothing if nothing was."""
        more, self.known = _graphs() - self.known, _graphs()
        if not more:
            return ""
        what = f"step {step} compiled {more} graph{'s' * (more > 1)} and took {seconds:.1f} s"
        if first:
            return f"{what}; a later run of the same shapes finds them in torch's cache"
        return f"note: {what}: a shape or a mode changed since the first step; where this goes on, drop train.compile"


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    module: nn.Module
    eager: Callable[..., Any]
    compiled: Callable[..., Any]

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return (self.compiled if self.module.training else self.eager)(*args, **settings)


def _graphs() -> int:
    """That this process has compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _check_compiler(device: torch.device) -> None:
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ValueError(
                f"train.compile needs Triton on {device.type} and found none that works here; install it, or drop the setting"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ValueError("train.compile needs a C++ compiler on the CPU and found none; install g++ or clang, or drop it") from error


def channels_last(encoder: DualEncoder) -> int:
    """Stores the weights of the image tower's convolutions with their channels last; pictures follow them. Returns how many."""
    layers = [module for module in encoder.model.visual.modules() if isinstance(module, nn.Conv2d)]
    for layer in layers:
        layer.to(memory_format=torch.channels_last)
    return len(layers)
