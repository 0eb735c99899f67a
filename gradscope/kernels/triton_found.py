"""Whether the Triton kernels can be used: NVIDIA, compute capability 8.0 or above, triton installed, rows that the kernels take.

Triton itself is imported by ``triton_strip``, and only where this says yes: elsewhere the torch blocks of ``strip`` do the same work.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor

CAPABILITY = (8, 0)


def triton_usable(rows: Tensor) -> bool:
    """For rows of this dtype on this device; never waits for the device."""
    return rows.dtype in (torch.float32, torch.bfloat16, torch.float16) and rows.is_cuda and why_not(rows.device) == ""


@lru_cache
def why_not(device: torch.device) -> str:
    """What stands in the way on this device, in words; empty where nothing does."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device.type} is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"
