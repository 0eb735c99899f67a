"""The norm of each rank's own gradient, before data-parallel averaging.

DDP averages inside the backward: tensor hooks on parameters see this rank's contribution, ``.grad`` afterwards holds the average. Both
are read, under different names. How it can mislead: it is of the measured micro-batch alone, and under the loop's own loss factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscope.distributed import gathered


class LocalNorm:
    """Hooks on every parameter for one backward."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._squares: list[Tensor] = []
        self._undo = [parameter.register_hook(self._add).remove for parameter in parameters]

    def _add(self, gradient: Tensor) -> None:
        self._squares.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64).square())

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def by_rank(self, unscale: Tensor | float, device: torch.device) -> Tensor:
        """[W] float64, in order of rank; a collective."""
        total = torch.stack(self._squares).sum() if self._squares else torch.zeros((), dtype=torch.float64, device=device)
        return gathered((total.sqrt() * unscale).reshape(1))
