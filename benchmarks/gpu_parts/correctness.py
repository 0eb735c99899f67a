"""Is it right on this device? Loss, residual and gradients of every kernel against float64 autograd, at losses from 1e-20 to 40.

Errors are relative: of gradients and of the loss by norm, of residuals the largest over all anchors, of the scale's gradient against
the sum of the cells' magnitudes, since it cancels between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.kernels.stream import stream
from gradscope.metrics.softmax import residual
from gradscope.objectives.margin import margin_matrix
from gradscope.objectives.scores import dense_scores, symmetric_loss
from gradscope.types import Scores

from .setting import Row, Setting

#: What the issue asks of fp32 rows.
LARGEST = {"loss": 2e-5, "residual": 1e-4, "image": 2e-5, "text": 2e-5, "scale": 2e-5}
#: Arms that must keep to it; the others are there to be seen.
STRICT = ("Triton", "Triton, fp32 in tiles", "torch, safe", "torch, shared exp")


@dataclass(frozen=True, kw_only=True)
class Regime:
    """``noise``: how far captions lie from their images; ``shift`` pairs each with a wrong one."""

    name: str
    scale: float
    noise: float
    gamma: float = 0.0
    shift: int = 0


REGIMES = (
    Regime(name="loss near 1", scale=30.0, noise=4.0, gamma=0.3),
    Regime(name="converged", scale=50.0, noise=1.5, gamma=0.3),
    Regime(name="saturated", scale=100.0, noise=0.3, gamma=0.3),
    Regime(name="loss below 1e-20", scale=100.0, noise=0.0),
    Regime(name="all wrong", scale=40.0, noise=0.1, shift=1),
    Regime(name="scale 200", scale=200.0, noise=1.0, gamma=0.3),
)


def pairs(setting: Setting, count: int, width: int, noise: float, shift: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Unit rows of images and of noisy captions, drawn on the device."""
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    image, other = (torch.randn(count, width, device=setting.device, generator=generator) for _ in range(2))
    image = F.normalize(image, dim=1)
    text = F.normalize(image + noise * other / width**0.5, dim=1).roll(shift, 0)
    return [image.to(dtype), text.to(dtype)]


def arms(setting: Setting) -> dict[str, str | None]:
    """Name -> backend of ``stream``; None is plain autograd through fp32 logits."""
    triton = {
        "Triton": "triton",
        "Triton, fp32 in tiles": "triton-tiles",
        "Triton, three-fold TF32": "triton-tf32x3",
        "Triton, TF32": "triton-tf32",
    }
    return {**(triton if setting.cuda else {}), "torch, safe": "safe", "torch, shared exp": "shared", "dense, cross-entropy": None}


def correctness(setting: Setting) -> Iterator[Row]:
    """Rows (case, arm, loss, residual, image, text, scale, true_loss)."""
    count, width = (96, 32) if setting.tiny else (4096, 512)
    for regime in REGIMES:
        if not setting.clock.allows(f"correctness: {regime.name}"):
            continue
        image, text = pairs(setting, count, width, regime.noise, regime.shift)
        wanted, along = _wanted(image.double(), text.double(), regime)
        for name, backend in arms(setting).items():
            yield {"case": regime.name, "arm": name, **_row(setting, image, text, regime, backend, wanted, along, name)}


def _row(
    setting: Setting,
    image: Tensor,
    text: Tensor,
    regime: Regime,
    backend: str | None,
    wanted: dict[str, Tensor],
    along: Tensor,
    name: str,
) -> Row:
    try:
        found = _found(image, text, regime, backend)
    except Exception as error:
        setting.failures.append(f"correctness, {regime.name}, {name}: {type(error).__name__}: {error}")
        return {"note": str(error)[:160]}
    errors = {key: _error(key, found[key], wanted[key], along) for key in LARGEST if key in found}
    if name in STRICT and not all(errors[key] <= LARGEST[key] for key in errors):  # nan too
        setting.failures.append(f"correctness, {regime.name}, {name}: {errors}")
    return {**errors, "true_loss": float(wanted["loss"])}


def _error(key: str, found: Tensor, wanted: Tensor, along: Tensor) -> float:
    difference = (found.double() - wanted).abs()
    if key == "residual":
        return float((difference / wanted).max())
    return float(difference / along if key == "scale" else difference.norm() / wanted.norm())


def _wanted(image: Tensor, text: Tensor, regime: Regime) -> tuple[dict[str, Tensor], Tensor]:
    """Of float64 rows; and the sum of |cell of the logit gradient * (cosine + margin)|."""
    leaves = _leaves(image, text, regime)
    scores = _scores(leaves, regime)
    scores.logits.retain_grad()
    loss = symmetric_loss(scores, "residual").mean()
    loss.backward()
    logits = scores.logits.detach()
    assert scores.logits.grad is not None
    along = (scores.logits.grad * logits).abs().sum() / regime.scale
    return {"loss": loss.detach(), "residual": torch.cat([residual(logits), residual(logits.T)]), **_gradients(leaves)}, along


def _found(image: Tensor, text: Tensor, regime: Regime, backend: str | None) -> dict[str, Tensor]:
    leaves = _leaves(image, text, regime)
    if backend is None:
        loss = symmetric_loss(_scores(leaves, regime)).mean()
        loss.backward()
        return {"loss": loss.detach(), **_gradients(leaves)}
    streamed = stream(*leaves, gamma=regime.gamma, backend=backend)
    loss = streamed.loss.double().mean()
    loss.backward()
    odds = torch.cat([streamed.anchors.log_odds[direction] for direction in ("i2t", "t2i")])
    return {"loss": loss.detach(), "residual": torch.sigmoid(odds), **_gradients(leaves)}


def _scores(leaves: list[Tensor], regime: Regime) -> Scores:
    image, text, scale = leaves
    return dense_scores(image, text, scale, margin_matrix("live", regime.gamma, text, None) if regime.gamma else None)


def _leaves(image: Tensor, text: Tensor, regime: Regime) -> list[Tensor]:
    scale = torch.tensor(regime.scale, dtype=image.dtype, device=image.device)
    return [leaf.detach().clone().requires_grad_() for leaf in (image, text, scale)]


def _gradients(leaves: list[Tensor]) -> dict[str, Tensor]:
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    return {name: grad for name, grad in zip(("image", "text", "scale"), grads, strict=True) if grad is not None}
