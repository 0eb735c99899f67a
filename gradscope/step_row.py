"""The row that a step writes to ``steps.jsonl``: the loss and its terms, scale, rate, norm, what was cut and left out, memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscope.data.batching import Batches
from gradscope.encoders.dual import DualEncoder
from gradscope.metrics.duplicates import group_sizes
from gradscope.types import Batch, Term


def step_row(
    step: int,
    epoch: int,
    batches: Batches,
    losses: Sequence[Tensor],
    parts: Sequence[Tensor],
    terms: Sequence[Term],
    encoder: DualEncoder,
    norm: Tensor,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
) -> dict[str, Any]:
    """One host transfer: the loss and its terms are means over the micro-batches."""
    scale = encoder.scale().detach()
    by_term = torch.stack(list(parts)).mean(dim=0)  # [terms]
    numbers = torch.cat([torch.stack([torch.stack(list(losses)).mean(), scale, norm]), by_term])
    loss, scale_value, grad_norm, *means = numbers.double().tolist()
    context = micro_batches[0].texts["full"].shape[1]
    return {
        "step": step,
        "samples": step * batches.per_step,
        "epoch": epoch,
        "loss": loss,
        **{f"loss_{term.name}": value for term, value in zip(terms, means, strict=True)},
        "scale": scale_value,
        "lr": optimizer.param_groups[0]["lr"],
        "grad_norm": grad_norm,
        "truncated": sum(int((batch.lengths > context).sum()) for batch in micro_batches),
        "peak_mem": _peak_memory(encoder.device),
    }


def term_losses(terms: Sequence[Term]) -> Tensor:
    """[terms]: the mean of each over its anchors."""
    return torch.stack([term.loss.detach().mean() for term in terms])


def excluded_by_anchor(terms: Sequence[Term]) -> Tensor | None:
    """Of each anchor of a softmax, how many other captions were no negatives: int64 [N]."""
    scores, groups = terms[0].scores, terms[0].groups
    if groups is not None:
        return group_sizes(groups) - 1
    return None if scores is None or scores.excluded is None else scores.excluded.sum(dim=1)


def left_out(excluded: Sequence[Tensor | None]) -> dict[str, int]:
    """With --duplicates exclude: how many pairs of captions were no negatives of each other, and how many anchors had no negative."""
    counts = [count for count in excluded if count is not None]
    if not counts:
        return {}
    of_anchor = torch.stack(counts)  # [softmaxes, N]
    pairs, alone = torch.stack([of_anchor.sum() // 2, (of_anchor == of_anchor.shape[1] - 1).sum()]).tolist()
    return {"duplicates_excluded": pairs, "anchors_without_negatives": alone}


def _peak_memory(device: torch.device) -> float:
    """MiB: allocated on the GPU, or the process's resident peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # macOS counts bytes, Linux KiB
