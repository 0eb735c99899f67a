"""Full-width negatives on a small device: embed all micro-batches, one loss over all of them, replay (GradCache, Gao et al., 2021).

    1. embed every micro-batch without a graph          O(one micro-batch) activations
    2. one loss over the B x accumulate embeddings, whose gradient stops at the embeddings; the scale's gradient is taken here, once
    3. embed each micro-batch again and hand its slice of that gradient to the towers

Same gradient as one batch of the full width, to rounding, at the cost of a second forward pass. A layer whose output depends on
the other rows (BatchNorm) or draws random numbers (dropout) would be replayed differently, so such encoders are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradscope.encoders.dual import DualEncoder
from gradscope.types import Batch, Embeddings

Embed = Callable[[Batch], Embeddings]
#: The tensors of Embeddings that the towers make, one row per record.
_ROWS = ("image", "text", "image_tokens", "text_tokens")


def check_replayable(encoder: DualEncoder) -> None:
    """Raises ValueError for encoders whose replay would differ from the first pass."""
    if encoder.has_batch_norm():
        raise ValueError(
            f"encoder '{encoder.name}' has BatchNorm, whose output depends on the micro-batch: --accumulate-mode cached would not "
            "equal one wide batch; use --accumulate-mode narrow"
        )
    if encoder.has_dropout():
        raise ValueError(
            f"encoder '{encoder.name}' has dropout, which a replay would draw anew; use --accumulate-mode narrow or set it to 0"
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """The micro-batches of a step as one batch."""
    return Batch(
        ids=tuple(i for batch in batches for i in batch.ids),
        images={},  # the full-width batch is never held in pixels
        texts={"full": torch.cat([batch.texts["full"] for batch in batches])},
        lengths=torch.cat([batch.lengths for batch in batches]),
        captions=tuple(c for batch in batches for c in batch.captions),
    )


def embed_all(embed: Embed, batches: Sequence[Batch], scale: Tensor, token_scale: Tensor | None) -> Embeddings:
    """Step 1: leaves of the full width, with the live scales."""
    with torch.no_grad():
        parts = [embed(batch) for batch in batches]
    leaves: dict[str, Any] = {}
    for name in _ROWS:
        rows = [getattr(part, name) for part in parts]
        leaves[name] = None if rows[0] is None else torch.cat(rows).requires_grad_()
    valid = [part.text_valid for part in parts if part.text_valid is not None]
    return replace(parts[0], **leaves, text_valid=torch.cat(valid) if valid else None, scale=scale, token_scale=token_scale)


def replay(embed: Embed, batches: Sequence[Batch], full: Embeddings, before: Callable[[Embeddings, slice], None]) -> None:
    """Step 3, after the loss was propagated to ``full``. ``before`` sees each live micro-batch ahead of its backward."""
    start = 0
    for batch in batches:
        rows = slice(start, start + len(batch))
        start = rows.stop
        live = embed(batch)
        before(live, rows)
        outputs, gradients = [], []
        for name in _ROWS:
            leaf = getattr(full, name)
            if leaf is not None:
                outputs.append(getattr(live, name))
                gradients.append(leaf.grad[rows])
        torch.autograd.backward(outputs, gradients)
