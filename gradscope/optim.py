"""Parameter groups, and the learning rate as a pure function of the step.

Weight decay is for matrices; biases, norms, scales and other vectors are in the no-decay group (open_clip's policy).
"""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW, Optimizer

from gradscope.recipe import Train


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def make_optimizer(module: nn.Module, train: Train) -> AdamW:
    parameters = trainable(module).values()
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)


def rate(step: int, total: int, warmup: int, peak: float) -> float:
    """Learning rate of step 1 ... total: linear over ``warmup`` steps, then a cosine that would reach 0 after the last step."""
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / max(1, total - warmup)))


def set_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
