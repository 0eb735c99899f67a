"""Which kernel forms the loss of one softmax: all cells at once, or blocks that are never stored.

    dense       the [N, N] logits, their gradient and autograd's copies exist; every reading may look at them
    streaming   ``stream``: no [N, N] store; readings that need cells are left out

How it can mislead: a limit is about time, memory and what can be read, never about the loss. On the CPU streaming is the faster one
from some 700 rows on (2026-11-30, d = 512, both passes with a margin, one thread of a busy machine: 1.13 times the dense form's seconds
at 512 rows, .77 at 1024, .68 at 2048, .38 at 4096); up to the limit the dense form is kept for its readings.
"""

from __future__ import annotations

import torch

KERNELS = ("auto", "dense", "streaming")
#: The widest softmax that is formed dense unless asked otherwise, by kind of device; that of CUDA is by memory, it was not measured.
DENSE_UP_TO = {"cpu": 2048, "cuda": 4096}


def kernel_for(width: int, setting: str = "auto", device: torch.device | str = "cpu") -> str:
    """ "dense" or "streaming" for a softmax over ``width`` candidates."""
    if setting not in KERNELS:
        raise ValueError(f"kernel {setting!r} is unknown; give one of {', '.join(KERNELS)}")
    if setting != "auto":
        return setting
    return "streaming" if width > dense_limit(device) else "dense"


def dense_limit(device: torch.device | str = "cpu") -> int:
    """The widest softmax that "auto" forms dense."""
    return DENSE_UP_TO.get(torch.device(device).type, DENSE_UP_TO["cpu"])


def kernel_words(width: int, setting: str = "auto", device: torch.device | str = "cpu") -> str:
    """The choice and its reason, for a header: "streaming: width 8192 is over 2048"."""
    kernel = kernel_for(width, setting, device)
    if setting != "auto":
        return f"{kernel}: as asked"
    return f"{kernel}: width {width} is {'over' if kernel == 'streaming' else 'at most'} {dense_limit(device)}"
