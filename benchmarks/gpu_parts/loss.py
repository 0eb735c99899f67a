"""Time and memory of the loss, forward and backward, against what others use: fp32 rows, scale 50, captions near their images.

    open_clip ClipLoss     the full matrix, both directions, no margin; the reference. Also under bf16 autocast, as it trains
    ours                   ``stream``, both directions, with the live margin or without; torch blocks, Triton, and dense where narrow
    Inf-CL                 tiles, ONE direction per call: it is called twice. Triton's default products (TF32). No margin
    memeff                 tiles, both directions, shift fixed at the largest possible logit, scale a plain number. TF32. No margin

How it can mislead: the peers' products are TF32 where ours are fp32, so read them beside "three-fold TF32" and "TF32" of ours.
Memory is what a call takes beside the rows, its gradients included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from gradscope.kernels.stream import stream
from gradscope.objectives.hn import HN
from gradscope.objectives.scores import symmetric_loss

from .correctness import pairs
from .setting import Arm, Row, Setting, compare

REFERENCE = "open_clip ClipLoss"
SCALE, GAMMA = 50.0, 0.3
#: (B, D); the peers keep a matrix or tiles of it, and from 32k on only ours and they without a matrix are run.
SIZES = ((128, 512), (1024, 512), (4096, 512), (16384, 512), (16384, 768), (32768, 512), (65536, 512), (128, 768), (4096, 768))
LARGEST_MATRIX, LARGEST_DENSE = 16384, 4096

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def loss(setting: Setting) -> Iterator[Row]:
    """Rows of ``compare``, one case per size."""
    for count, width in ((64, 256),) if setting.tiny else SIZES:
        case = f"B {count}, d {width}"
        if not setting.clock.allows(f"loss: {case}"):
            continue
        image, text = (row.requires_grad_() for row in pairs(setting, count, width, 1.5))
        scale = torch.tensor(SCALE, device=setting.device, requires_grad=True)
        own = {**ours(setting), **(dense() if count <= LARGEST_DENSE else {})}
        losses = {**(theirs(setting) if count <= LARGEST_MATRIX else {}), **own}
        arms = {name: _arm(one, image, text, scale) for name, one in losses.items()}
        yield from compare(setting, case, arms, next(iter(losses)), ours=list(own))


def _arm(one: Loss, image: Tensor, text: Tensor, scale: Tensor) -> Arm:
    def arm() -> None:
        one(image, text, scale).backward()
        image.grad = text.grad = scale.grad = None  # so that the next arm's memory holds gradients of its own

    return arm


def ours(setting: Setting) -> dict[str, Loss]:
    def streamed(backend: str, gamma: float = GAMMA, top: int = 0) -> Loss:
        return lambda image, text, scale: stream(image, text, scale, gamma=gamma, backend=backend, top=top).loss.mean()

    losses = {"ours, torch": streamed("safe")}
    if not setting.cuda:
        return losses
    return losses | {
        "ours, Triton": streamed("triton"),
        "ours, Triton, no margin": streamed("triton", 0.0),
        "ours, Triton, fp32 in tiles": streamed("triton-tiles"),
        "ours, Triton, top 10": streamed("triton", GAMMA, 10),
        "ours, Triton, three-fold TF32": streamed("triton-tf32x3"),
        "ours, Triton, TF32": streamed("triton-tf32"),
    }


def dense() -> dict[str, Loss]:
    """What ``auto`` takes for narrow softmaxes."""
    hn = HN(gamma=GAMMA)
    return {"ours, dense": lambda image, text, scale: symmetric_loss(hn.scores(image, text, scale)).mean()}


def theirs(setting: Setting) -> dict[str, Loss]:
    """What is installed; the tile kernels need CUDA."""
    from open_clip.loss import ClipLoss

    clip = ClipLoss()

    def autocast(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(setting.device.type, torch.bfloat16):
            return torch.as_tensor(clip(image, text, scale))

    found: dict[str, Loss] = {REFERENCE: clip, "open_clip ClipLoss, bf16 autocast": autocast}
    if setting.cuda and find_spec("inf_cl"):
        found["Inf-CL, called twice"] = inf_cl
    if setting.cuda and find_spec("memeff"):
        found["memeff"] = memeff
    return found


def inf_cl(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    from inf_cl import cal_flash_loss

    return torch.as_tensor((cal_flash_loss(image, text, scale=scale).mean() + cal_flash_loss(text, image, scale=scale).mean()) / 2)


def memeff(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    from memeff import MemoryEfficientCLIPLoss

    one = MemoryEfficientCLIPLoss(temperature=1 / SCALE, normalized_inputs=True, stable=False)
    return torch.as_tensor(one(image, text))
