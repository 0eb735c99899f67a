"""What the precision of the loss path costs on the measured batch: trained values against float64 from the very same embeddings.

    loss_error, loss_relative_error    |loss as trained - float64 loss|, in nat and as a share of the float64 loss
    gradient_error                     |g - g64| / |g64| at the embeddings
    gradient_cosine                    between g and g64; nan where either is zero
    moved_bf16, moved_fp16             share of logits that rounding to that type would move by more than 0.1

    G64_ij = (p_ij - [i = j]) / N, summed over directions and divided by their number; p_ii - 1 is formed from the negatives
    g = s (G T, G' V), with the logit gradient that passed by as G, and G64 in its place for g64; both products in float64

Source: paper facts, section 7.1 (iii, iv) and 7.3. How to read: a loss error of 1 with a gradient error of 1e-3 is a print that ended;
a gradient error of .5 at cosine .8 is a lost pull, which the residual form of the loss gives back.
How it can mislead: towers in half precision have rounded the embeddings before anything here begins. The margin is taken as training
formed it. The loss scale is divided out: what it rescued counts as kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.gradients import cosine
from gradscope.metrics.loss_path import relative_error
from gradscope.metrics.softmax import log_odds, negatives, per_direction
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Step

#: A logit moved by more than this changes the odds of its cell by over a tenth.
MOVED = 0.1
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@quantities.register("precision")
@dataclass(frozen=True, kw_only=True)
class Precision:
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "full"
    needs: ClassVar[tuple[str, ...]] = ("cells",)

    def __call__(self, step: Step) -> list[Reading]:
        image, text, scale = (t.double() for t in (step.embeddings.image, step.embeddings.text, step.embeddings.scale))
        cosines = image @ text.T  # [N, N]
        readings = []
        for head in step.heads.values():
            assert head.scores is not None
            assert head.logit_grad is not None
            margin, excluded = head.scores.margin, head.scores.excluded
            raised = scale * (cosines if margin is None else cosines + margin.double())
            logits = raised if excluded is None else raised.masked_fill(excluded, -torch.inf)
            ours, exact = (
                _at_rows(g, image, text, scale) for g in (head.logit_grad.double(), exact_logit_grad(logits, head.directions))
            )
            values = {**_loss(head, logits), "gradient_error": relative_error(ours, exact), "gradient_cosine": cosine(ours, exact)}
            values |= {f"moved_{name}": _moved(raised, excluded, dtype) for name, dtype in _HALF.items()}
            readings += [
                Reading(quantity="precision", key=key, term=head.name, value=value, unit=_unit(key)) for key, value in values.items()
            ]
        return readings


def exact_logit_grad(logits: Tensor, directions: tuple[str, ...]) -> Tensor:
    """Gradient of the batch-mean softmax loss at float64 logits [N, N], the pull of each row formed from its negatives: [N, N]."""
    total = torch.zeros_like(logits)
    for side, matrix in per_direction(logits, directions).items():
        push = torch.exp(negatives(matrix) - torch.logsumexp(matrix, dim=1, keepdim=True))  # zero diagonal
        total += per_direction(push - torch.diag(torch.sigmoid(log_odds(matrix))))[side]
    return total / (len(logits) * len(directions))


def _at_rows(logit_grad: Tensor, image: Tensor, text: Tensor, scale: Tensor) -> list[Tensor]:
    return [scale * (logit_grad @ text), scale * (logit_grad.T @ image)]


def _loss(head: Head, logits: Tensor) -> dict[str, Tensor]:
    rows = [F.softplus(log_odds(m), threshold=40.0) for m in per_direction(logits, head.directions).values()]
    true = torch.cat(rows).mean()
    error = (head.loss.double() - true).abs()
    return {"loss_error": error, "loss_relative_error": error / true}


def _moved(logits: Tensor, excluded: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Share of the logits that count and would be moved; nan if any is nan."""
    moved = (logits.to(dtype).double() - logits).abs() > MOVED
    counted = torch.ones_like(moved) if excluded is None else ~excluded
    return (moved & counted).double().sum() / counted.double().sum() + 0.0 * logits.sum()


def _unit(key: str) -> str:
    if key == "loss_error":
        return "nat"
    return "share" if key.startswith("moved") else "cosine" if key == "gradient_cosine" else "ratio"
