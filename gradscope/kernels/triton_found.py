"""Whether the Triton kernels can be used: NVIDIA, compute capability 8.0 or above, triton installed and able to build and launch a
kernel, rows that the kernels take.

Triton is imported only where a GPU could have it: elsewhere the torch blocks of ``strip`` do the same work.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from gradscope.console import console

CAPABILITY = (8, 0)
#: What ``stream`` calls a choice of Triton -> how it multiplies fp32 rows.
TRITON = {"triton": "ieee", "triton-tiles": "ieee-tiles", "triton-tf32x3": "tf32x3", "triton-tf32": "tf32"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(rows: Tensor) -> str:
    """What stands in the way for rows of this dtype on this device, in words; empty where nothing does. Never waits for the device."""
    if rows.dtype not in DTYPES:
        return f"rows of {rows.dtype} were given, it takes float32, bfloat16 or float16"
    return _not_on(rows.device)


def require_triton(rows: Tensor) -> None:
    """Raises ValueError where the kernels were asked for and cannot be used."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and rows.dtype in DTYPES
    if not interpreted and (reason := why_not(rows)):
        raise ValueError(f"the Triton kernels cannot be used: {reason}; give backend 'auto'")


@lru_cache
def _not_on(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device.type} is no NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return launch_fails(device) if importlib.util.find_spec("triton") else "triton is not installed"


@lru_cache
def say_once(reason: str) -> None:
    """That a GPU goes without Triton, once for each reason."""
    console.print(f"the streaming loss takes torch's blocks and not Triton's kernels: {reason}", soft_wrap=True)


def launch_fails(device: torch.device) -> str:
    """Why a kernel cannot be built and launched here, in words; empty where it can. Once built it is kept in Triton's cache.

    Only trying tells: Triton builds its launcher by a C compiler with Python's headers, when it is first used.
    """
    from gradscope.kernels.triton_tiles import try_kernel

    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try_kernel[(1,)](torch.empty(1, dtype=torch.int32, device=device))
    except Exception as error:  # of the compiler, its subprocess, the driver, the assembler: all mean the same
        lines = str(error).strip().splitlines()
        return f"a kernel cannot be built or launched ({type(error).__name__}: {lines[0] if lines else 'no words'})"
    return ""
