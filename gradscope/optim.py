"""Parameter groups, and the learning rate as a pure function of the step.

Weight decay is for matrices; biases, norms, scales and other vectors are in the no-decay group (open_clip's policy).
The update is torch's fused kernel where there is one: the same numbers to rounding, whatever the number of threads, in one pass over
the memory (2026-11-30, torch 2.14.1, two cores, the 148 M parameters of ViT-B-32: 0.21 -> 0.06 s). A run that was begun without it
goes on without it: an optimizer's state brings its settings along.
"""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW, Optimizer

from gradscope.distributed import is_sharded
from gradscope.recipe import Train


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


#: Devices whose fused kernel was looked at.
FUSED = ("cpu", "cuda")


def make_optimizer(module: nn.Module, train: Train) -> AdamW:
    """AdamW over what trains in ``module``, fused where its parameters' device has it; one by one where some are sharded, since the
    kernels for many at once take no mixture of shards and whole parameters."""
    parameters = list(trainable(module).values())
    sharded = any(map(is_sharded, parameters))
    fused = all(p.device.type in FUSED for p in parameters) and not sharded
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = train.beta1, train.beta2
    foreach = False if sharded else None
    return AdamW([g for g in groups if g["params"]], lr=train.lr, betas=betas, eps=train.eps, fused=fused, foreach=foreach)


def rate(step: int, total: int, warmup: int, peak: float) -> float:
    """Learning rate of step 1 ... total: linear over ``warmup`` steps, then a cosine that would reach 0 after the last step."""
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / max(1, total - warmup)))


def set_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
