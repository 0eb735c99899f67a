"""The same weights at several softmax widths: how much of the saturation is the width's own.

Embeds ``records`` once, cuts one shuffle of them into batches of each width, and reads the true InfoNCE loss of every batch
(log10, float64) at the encoder's scale. Source: paper facts, section 7.7.
How it can mislead: batches of one width share no record, but the widths share records; wide ones are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from gradscope.data.batching import generator
from gradscope.encoders.dual import DualEncoder
from gradscope.evaluate import embed_records
from gradscope.metrics.softmax import log10_batch_loss
from gradscope.types import Record

if TYPE_CHECKING:
    import pandas as pd


def start_widths(
    encoder: DualEncoder,
    records: Sequence[Record],
    widths: Sequence[int],
    *,
    seed: int = 0,
    sample: int | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """A row per batch: width, batch, log10_true.

    The records are shuffled first, and only ``sample`` of them used if it is given: neighbours in a file may be relatives. The last
    records that do not fill a batch are left out. The caption of a record is its first.
    """
    import pandas as pd

    order = torch.randperm(len(records), generator=generator(seed, "start widths")).tolist()[:sample]
    embedded = embed_records(encoder, [records[i] for i in order], advance=advance)
    counts = torch.tensor([len(records[i].captions) for i in order])
    image, text = embedded.image, embedded.text[counts.cumsum(0) - counts]
    scale = encoder.scale().detach()
    rows = []
    for width in widths:
        for batch in range(len(order) // width):
            pick = slice(batch * width, (batch + 1) * width)
            logits = scale * (image[pick] @ text[pick].T)
            rows.append({"width": width, "batch": batch, "log10_true": float(log10_batch_loss(logits))})
    return pd.DataFrame(rows)
