"""One batch, run again under other circumstances: in wider dtypes, and with the loss multiplied before backward.

A closure makes the forward pass and returns the loss []. It is handed a ``Pass`` and must use it, so that the same lines give every
pass:

    def closure(run):
        with run.autocast():
            image, text = run.model(run.cast(pixels), ids)
        return contrastive_loss(image, text)

All passes see the same random draws. The weights, ``.grad``, buffers, modes and random state of the model are left as they were; a
reference runs on a copy. Inside a reference, casts to a narrower dtype (``.float()``, ``.to(torch.float32)``, ``dtype=torch.float32``)
become casts to the reference's, and new tensors are made in it.
The model may not be sharded, nor wrapped for compilation or several processes: give the module inside.
How it can mislead: a kernel that rounds inside is not seen, nor are modules with weights that are not part of ``model``; dropout of a
device whose generator draws differently by dtype has another mask in the references. Float64 rounds too: a softmax residual under
1e-16 is lost in the positive's own cell there as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.distributed import is_sharded
from gradscope.zeros.widened import Widened, copied, default_dtype, narrower, word

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What a closure is asked for: ``model`` is the user's or a copy in a wider dtype, ``dtype`` what to compute in."""

    model: nn.Module
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast to ``dtype`` in a half-precision pass, none in the others."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=self.dtype) if self.dtype in HALF else torch.autocast(device, enabled=False)

    def cast(self, tensor: Tensor) -> Tensor:
        """Inputs for the model: floating tensors narrower than ``dtype`` are widened, others returned as they are."""
        return tensor.to(self.dtype) if narrower(tensor.dtype, self.dtype) else tensor


Closure = Callable[[Pass], Tensor]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The pass itself, and the same graph under the largest power of two that overflows nowhere.

    ``gradient`` is unscaled, by parameter name, None where the loss does not reach. ``multiplied`` says which entries are non-zero
    under 2^``exponent``; both are empty or None where even a factor of 1 overflows.
    """

    loss: float
    gradient: Mapping[str, Tensor | None]
    exponent: int | None
    multiplied: Mapping[str, Tensor]


def wider(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes a pass is held against, the narrowest first."""
    return tuple(wide for wide in (torch.float32, torch.float64) if narrower(dtype, wide))


def measure(model: nn.Module, closure: Closure, dtype: torch.dtype, loss_scale: float) -> Measured:
    """Runs the pass on the user's model and searches the largest factor. Raises ValueError for a loss that cannot be used."""
    parameters = _trainable(model)
    _check_dtypes(parameters, dtype)
    with _kept(model), torch.enable_grad():
        loss = _checked(closure(Pass(model=model, dtype=dtype)), dtype)
        _refuse_reentrant(loss)
        gradient = _gradient(loss, parameters, loss_scale)
        exponent, multiplied = _largest_factor(loss, parameters)
    if loss_scale != 1:
        gradient = {name: None if g is None else g / loss_scale for name, g in gradient.items()}
    return Measured(loss=float(loss.detach()), gradient=gradient, exponent=exponent, multiplied=multiplied)


def reference(model: nn.Module, closure: Closure, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The gradient of a copy of ``model`` in ``dtype``, by name; None where the loss does not reach.

    Raises:
        ValueError: the closure does not use its ``Pass``, or the model cannot be copied.
    """
    try:
        twin = copied(model, dtype)
    except Exception as error:
        raise ValueError(f"the model cannot be copied for the {word(dtype)} pass ({error}); leave it out with references=()") from error
    mode = Widened(dtype)
    mode.enter_in(twin)
    try:
        with _kept(twin), torch.enable_grad(), default_dtype(dtype), mode:
            loss = _checked(closure(Pass(model=twin, dtype=dtype)), dtype)
            gradient = _gradient(loss, _trainable(twin), 1.0)
    except RuntimeError as error:
        what = str(error).splitlines()[0]
        raise ValueError(
            f"the closure does not run in {word(dtype)} ({what}); pass floating inputs through run.cast(...), or leave the reference "
            "out with references=()"
        ) from error
    if mode.narrowed:
        raise ValueError(
            f"the {word(dtype)} pass computed in {mode.narrowed}; use run.autocast() in place of torch.autocast, or, where the model "
            "has an autocast of its own, references=(torch.float64,), which no autocast narrows"
        )
    return gradient


# ---- backward


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _check_dtypes(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Autocast narrows float32 and nothing wider."""
    if not parameters:
        raise ValueError("no parameter of the model trains, so there is no gradient to count; set requires_grad on some")
    if any(is_sharded(p) for p in parameters.values()):
        raise ValueError("the model is sharded, and an entry's cause needs whole parameters; count on one process, before fully_shard")
    fitting = (dtype, torch.float32) if dtype in HALF else (dtype,)
    wrong = next((p.dtype for p in parameters.values() if p.dtype not in fitting), None)
    if wrong is not None:
        needs = " or ".join(word(fits) for fits in fitting)
        raise ValueError(
            f"a {word(dtype)} pass needs {needs} parameters, the model has {word(wrong)} ones; give the dtype of the model's, or "
            "that of its autocast"
        )


def _gradient(loss: Tensor, parameters: Mapping[str, nn.Parameter], factor: float) -> dict[str, Tensor | None]:
    """The gradient of factor * loss, dense. The graph is kept; ``.grad`` is not touched, and no hook of an optimizer fires."""
    seed = torch.full_like(loss, factor)
    found = torch.autograd.grad(loss, list(parameters.values()), seed, retain_graph=True, allow_unused=True)
    if all(g is None for g in found):
        raise ValueError("the loss of the closure does not depend on run.model; compute it with run.model, not with your own variable")
    return {name: None if g is None else g.to_dense() for name, g in zip(parameters, found, strict=True)}


def _refuse_reentrant(loss: Tensor) -> None:
    """What a reentrant checkpoint holds has no graph: its parameters would look unused."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError("the model is checkpointed with use_reentrant=True, which hides its parameters; use use_reentrant=False")
        left += [below for below, _ in node.next_functions]


def _largest_factor(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> tuple[int | None, dict[str, Tensor]]:
    """By bisection over k: a factor that overflows somewhere still does when it is doubled."""
    low, high, best = -1, math.frexp(torch.finfo(loss.dtype).max)[1] - 1, {}
    while low < high:
        k = (low + high + 1) // 2
        found = {name: g for name, g in _gradient(loss, parameters, 2.0**k).items() if g is not None}
        if all(torch.stack([torch.isfinite(g).all() for g in found.values()]).tolist()):
            low, best = k, {name: g != 0 for name, g in found.items()}
        else:
            high = k - 1
    return (low, best) if low >= 0 else (None, {})


def _checked(loss: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) and loss.ndim else "nothing with a gradient"
        raise ValueError(f"the closure must return the loss, one number with a gradient; it returned {what}")
    if not math.isfinite(float(loss.detach())):
        raise ValueError(
            f"the loss of the {word(dtype)} pass is {float(loss.detach())}, so there is no gradient; try a wider precision"
        )
    return loss


# ---- leaving no trace


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Restores random states and buffers afterwards, so that every pass starts from the same: a buffer that was written to has its
    values again, one that was replaced is the old tensor again."""
    owned = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, own in owned:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
