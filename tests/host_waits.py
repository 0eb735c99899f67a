"""Counts what would make a GPU wait for the host, on a CPU: scalars that are read, shapes that depend on values."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "item",
    "is_nonzero",
    "equal.default",
    "bincount",
    "repeat_interleave.Tensor",
)


class Waits(TorchDispatchMode):
    """``seen``: the operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if any(f"aten.{word}" in name for word in WAITING):
            self.seen.append(name)
        if "aten.index.Tensor" in name and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.seen.append(f"{name} with a mask")
        return func(*args, **(kwargs or {}))
