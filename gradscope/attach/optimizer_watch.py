"""When a step of a loop that is not ours begins to change the weights, and when it is over: any number of optimizers, found or told.

    ready      before the first optimizer of the step (where it is handed a closure, after the first evaluation of that)
    updated    after each
    over       after the last: all that stepped the time before, or, the first time, all that hold our parameters; at the latest when
               the next forward pass is seen, or an optimizer steps that holds the same parameters
    inside     an optimizer steps while a backward runs: neither the averaged gradient nor the update of the step is ever whole

Optimizers that another one calls (Lookahead, SAM) are part of its step. How it can mislead: one that steps every few steps only, or
after the others' step is over, belongs to the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerWatch:
    """Looks like one optimizer to whoever reads ``param_groups`` and ``state``.

    Args:
        parameters: those whose optimizers are looked for.
        told: an optimizer that is known already.
        ready: takes the optimizer; False says that this is no step of its own.
        updated, inside: take the optimizer.
        over: takes the number of optimizers that mixed precision left out.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        told: Optimizer | None,
        *,
        ready: Callable[[Optimizer], bool],
        updated: Callable[[Optimizer], None],
        inside: Callable[[], None],
        over: Callable[[int], None],
    ) -> None:
        self._ours = {id(parameter) for parameter in parameters}
        self._told, self._ready, self._updated, self._inside, self._over = told, ready, updated, inside, over
        self.known: dict[int, Optimizer] = {}
        self.stepping: Optimizer | None = None
        self._holds: dict[int, set[int]] = {}
        self._hooks: dict[int, list[Callable[[], None]]] = {}
        self._others: WeakSet[Optimizer] = WeakSet()
        self._forget_all()

    def _forget_all(self) -> None:
        self._done: set[int] = set()
        self._before_that: set[int] = set()
        self._is_ready, self._settled, self._left_out, self._steps = False, False, 0, 0
        self.stepping = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._acting() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: state for optimizer in self._acting() for parameter, state in optimizer.state.items()}

    def _acting(self) -> list[Optimizer]:
        """Those that step in this step, as far as that is known."""
        stepping = set() if self.stepping is None else {id(self.stepping)}
        keys = (self._done | stepping) or self._before_that
        return [optimizer for key, optimizer in self.known.items() if key in keys]

    # ---- attaching

    def attach(self) -> None:
        self._forget_all()
        self._global = register_optimizer_step_pre_hook(self.find)
        if self._told is not None:
            self._add(self._told)

    def detach(self) -> None:
        self._global.remove()
        for key in list(self.known):
            self._forget(key)

    def find(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """An optimizer that is about to step: it is watched from here on if it holds parameters of ours."""
        if id(optimizer) in self.known or self.stepping is not None or optimizer in self._others:
            return
        if _held(optimizer) & self._ours:
            self._add(optimizer)  # its own hooks come after the one that called this, in this very step
        else:
            self._others.add(optimizer)

    def _add(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        self.known[key], self._holds[key] = optimizer, _held(optimizer)
        self._hooks[key] = [
            optimizer.register_step_pre_hook(self._before).remove,
            optimizer.register_step_post_hook(self._after).remove,
        ]

    def _forget(self, key: int) -> None:
        del self.known[key], self._holds[key]
        for undo in self._hooks.pop(key):
            undo()

    # ---- a step

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A loop that hands a closure (Lightning, L-BFGS) runs forward, backward and clipping inside the step."""
        if torch._C._current_graph_task_id() != -1:
            self._inside()
            return None
        if self.stepping is not None and self.stepping is not optimizer:
            return None
        if self._shares(optimizer, self._done):
            self.next_step(optimizer)
        if self.stepping is optimizer:
            self._is_ready = False  # its last step ended in an exception
        self.stepping = optimizer
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer itself
        if closure is None:
            self._gradient_ready(optimizer)
            return None

        def watched() -> Any:
            result = closure()
            self._gradient_ready(optimizer)
            return result

        return (args[0], watched, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _gradient_ready(self, optimizer: Optimizer) -> None:
        """Once a step: L-BFGS evaluates its closure many times, at weights of its own trying."""
        if not self._is_ready:
            self._is_ready = self._ready(optimizer)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is not self.stepping:
            return
        self.stepping = None
        self._steps += 1
        if self._is_ready:
            self._done.add(id(optimizer))
            self._updated(optimizer)
            self._finished(optimizer)

    def scaled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Around ``GradScaler.step``: a step that it leaves out never reaches an optimizer's hooks."""

        def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.find(optimizer)
            steps = self._steps
            result = step(optimizer, *args, **kwargs)
            if id(optimizer) in self.known and self._steps == steps:
                self._left_out += 1
                self._finished(optimizer)
            return result

        return call

    def _finished(self, optimizer: Optimizer) -> None:
        self._done.add(id(optimizer))
        if self._done >= set(self.known) and (self._settled or self._all_held()):
            self._end()

    def _all_held(self) -> bool:
        return self._ours <= set().union(*self._holds.values())

    def is_late(self, optimizer: Optimizer) -> bool:
        """Whether the step before was over without it: other optimizers, of other parameters."""
        if not self._settled or id(optimizer) in self._before_that:
            return False
        return not self._shares(optimizer, self._before_that)

    def _shares(self, optimizer: Optimizer, others: set[int]) -> bool:
        return bool(others) and any(self._holds[id(optimizer)] & self._holds[key] for key in others if key in self._holds)

    @property
    def trying(self) -> bool:
        """Whether an optimizer evaluates its closure again after the first time."""
        return self.stepping is not None and self._is_ready

    def next_step(self, coming: Optimizer | None = None) -> None:
        """A forward pass is seen, ``coming`` is about to step, or the loop is over: whatever stepped until here was one step. One that
        did not is looked for again."""
        if self._done and self.stepping is None:
            for key in set(self.known) - self._done:
                if self.known[key] not in (self._told, coming):
                    self._forget(key)
            self._end()

    def _end(self) -> None:
        left_out, self._left_out = self._left_out, 0
        self._before_that, self._done = self._done, set()
        self._is_ready, self._settled = False, True
        self._over(left_out)


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
