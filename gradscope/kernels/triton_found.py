"""Whether the Triton kernels can be used: NVIDIA, compute capability 8.0 or above, triton installed, rows that the kernels take.

Triton itself is imported by ``triton_strip``, and only where this says yes: elsewhere the torch blocks of ``strip`` do the same work.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

CAPABILITY = (8, 0)
#: What ``stream`` calls a choice of Triton -> how it multiplies fp32 rows.
TRITON = {"triton": "ieee", "triton-tiles": "ieee-tiles", "triton-tf32x3": "tf32x3", "triton-tf32": "tf32"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_usable(rows: Tensor) -> bool:
    """For rows of this dtype on this device; never waits for the device."""
    return rows.dtype in DTYPES and why_not(rows.device) == ""


def require_triton(rows: Tensor) -> None:
    """Raises ValueError where the kernels were asked for and cannot be used."""
    reason = why_not(rows.device) if rows.dtype in DTYPES else f"rows of {rows.dtype} were given, it takes float32, bfloat16 or float16"
    if reason and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"the Triton kernels cannot be used: {reason}; give backend 'auto'")


@lru_cache
def why_not(device: torch.device) -> str:
    """What stands in the way on this device, in words; empty where nothing does."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device.type} is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"
