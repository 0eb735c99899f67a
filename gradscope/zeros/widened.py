"""A model in a wider dtype, and the mode under which everything that its forward pass computes stays that wide.

How it can mislead: a kernel that rounds inside is not seen; tensors that the model holds in lists or closures are not widened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def narrower(dtype: object, than: torch.dtype) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < than.itemsize


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy in ``dtype``, tensors included that are no buffers; with the hooks that change the gradient of a parameter."""
    twin = copy.deepcopy(model).to(dtype)
    for module in twin.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and narrower(value.dtype, dtype):
                vars(module)[name] = value.to(dtype)
    for own, wide in zip(model.parameters(), twin.parameters(), strict=True):
        for hook in (own._backward_hooks or {}).values():
            wide.register_hook(hook)
    return twin


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Widened(TorchFunctionMode):
    """Turns casts to narrower dtypes into casts to ``dtype``, and notes the first operation that narrows all the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.narrowed = ""

    def enter_in(self, model: nn.Module) -> None:
        """Every forward of ``model``'s parts enters the mode, which is off where checkpointed activations are computed anew."""
        for module in model.modules():
            module.forward = self._under(module.forward)

    def _under(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return wrapped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            wide = args[0].is_floating_point() and not narrower(args[0].dtype, self.dtype)
            return args[0] if wide else args[0].to(self.dtype)
        if func is Tensor.type and len(args) > 1:
            args = [args[0], _dtype_of(args[1])]
        args = [self._wide(value) for value in args]
        kwargs = {key: self._wide(value) for key, value in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and narrower(result.dtype, self.dtype) and not self.narrowed:
            inputs = [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if self.dtype in inputs:
                self.narrowed = f"{word(result.dtype)} at '{getattr(func, '__name__', func)}'"
        return result

    def _wide(self, value: Any) -> Any:
        return self.dtype if narrower(value, self.dtype) else value


def _dtype_of(kind: Any) -> Any:
    """A dtype by its older names: torch.FloatTensor, "torch.FloatTensor"."""
    kind = getattr(torch, kind.rsplit(".", 1)[-1]) if isinstance(kind, str) else kind
    return getattr(kind, "dtype", kind)
