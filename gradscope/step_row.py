"""The row that a step writes to ``steps.jsonl``: the loss and its terms, scale, rate, norm, what was cut and left out, memory."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.data.batching import Batches
from gradscope.encoders.dual import DualEncoder
from gradscope.metrics.duplicates import group_sizes
from gradscope.types import Batch, Term


@dataclass
class StepLosses:
    """What the softmaxes of one step came to, an entry each: one of a micro-batch, or the one of a cached step."""

    totals: list[Tensor] = field(default_factory=list)  # [] each
    by_term: list[Tensor] = field(default_factory=list)  # [terms] each: the means over the anchors
    excluded: list[Tensor] = field(default_factory=list)  # [N] each, unless --duplicates keep: see ``_excluded_by_anchor``
    terms: tuple[str, ...] = ()

    def add(self, total: Tensor, terms: Sequence[Term]) -> None:
        """``total``: the loss that was propagated."""
        self.totals.append(total.detach())
        self.by_term.append(torch.stack([term.loss.detach().mean() for term in terms]))
        self.terms = tuple(term.name for term in terms)
        excluded = _excluded_by_anchor(terms[0])
        if excluded is not None:
            self.excluded.append(excluded)

    def numbers(self) -> Tensor:
        """[1 + terms]: the loss and its terms, means over the softmaxes."""
        return torch.cat([torch.stack(self.totals).mean()[None], torch.stack(self.by_term).mean(dim=0)])

    def left_out(self) -> dict[str, int]:
        """Unless --duplicates keep: how many pairs of captions were no negatives of each other; how many anchors had none."""
        if not self.excluded:
            return {}
        of_anchor = torch.stack(self.excluded)  # [softmaxes, N]
        pairs, alone = torch.stack([of_anchor.sum() // 2, (of_anchor == of_anchor.shape[1] - 1).sum()]).tolist()
        return {"duplicates_excluded": pairs, "anchors_without_negatives": alone}


def step_row(
    step: int,
    batches: Batches,
    losses: StepLosses,
    encoder: DualEncoder,
    norm: Tensor,
    optimizer: torch.optim.Optimizer,
    everyone: Sequence[Batch],
) -> dict[str, Any]:
    """One host transfer, and one more where captions were left out. ``everyone``: the micro-batches of all ranks."""
    numbers = torch.cat([torch.stack([encoder.scale().detach(), norm]), losses.numbers()])
    scale, grad_norm, loss, *by_term = numbers.double().tolist()
    context = everyone[0].texts["full"].shape[1]
    return {
        "step": step,
        "samples": step * batches.per_step,
        "epoch": batches.epoch_of(step),
        "loss": loss,
        **{f"loss_{name}": value for name, value in zip(losses.terms, by_term, strict=True)},
        "scale": scale,
        "lr": optimizer.param_groups[0]["lr"],
        "grad_norm": grad_norm,
        "truncated": sum(int((batch.lengths > context).sum()) for batch in everyone),
        "peak_mem": _peak_memory(encoder.device),
        **losses.left_out(),
    }


def _excluded_by_anchor(term: Term) -> Tensor | None:
    """Of each anchor of a softmax, how many other captions were no negatives: int64 [N]."""
    if term.groups is not None:
        return group_sizes(term.groups) - 1
    return None if term.scores is None or term.scores.excluded is None else term.scores.excluded.sum(dim=1)


def _peak_memory(device: torch.device) -> float:
    """MiB: allocated on the GPU, or the process's resident peak."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else _resident_peak()


def _resident_peak(status: Path = Path("/proc/self/status")) -> float:
    """MiB. Linux keeps it in ``status``; its ``ru_maxrss`` is no less than the peak of the process that started this one."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if found:
        return int(found[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS counts bytes, Linux KiB
