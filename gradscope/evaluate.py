"""Embed a split and score it: retrieval in both directions over the whole gallery.

Evaluation mode, no gradient, fp32 logits; mode, gradient setting and random state are as before afterwards. Nothing here knows an
objective: the same weights give the same bytes whatever they were trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gradscope.data.batching import Pixels
from gradscope.encoders.dual import DualEncoder, evaluating
from gradscope.metrics.recall import Retrieval, retrieval
from gradscope.types import Record

Advance = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """A split's unit rows: image [N, D], text [M, D], image_of_text [M]; truncated captions are counted."""

    ids: tuple[str, ...]
    image: Tensor
    text: Tensor
    image_of_text: Tensor
    truncated: int


def embed_records(
    encoder: DualEncoder, records: Sequence[Record], *, batch_size: int = 128, workers: int = 0, advance: Advance | None = None
) -> Embedded:
    """All images and all captions of ``records``, in order. Rows are fp32 on the encoder's device."""
    captions = [caption for record in records for caption in record.captions]
    owner = [i for i, record in enumerate(records) for _ in record.captions]
    tokenized = encoder.tokenize(captions)
    distinct, row_of = _distinct(tokenized.ids)
    total, done = len(records) + len(distinct), 0
    images: list[Tensor] = []
    with evaluating(encoder):
        # A loader draws a seed when it starts; from its own generator, so that training's random state is left alone.
        own = torch.Generator()
        loader = DataLoader(Pixels(records, encoder.preprocess()), batch_size=batch_size, num_workers=workers, generator=own)
        for pixels in loader:
            images.append(encoder.embed_image(pixels.to(encoder.device)))
            done += len(pixels)
            if advance:
                advance(done, total)
    text = encoder.embed_texts(distinct, batch_size=batch_size, progress=(lambda n, _: advance(done + n, total)) if advance else None)[
        row_of
    ]
    return Embedded(
        ids=tuple(record.id for record in records),
        image=torch.cat(images),
        text=text,
        image_of_text=torch.tensor(owner, device=encoder.device),
        truncated=tokenized.truncated(),
    )


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The different rows in order of appearance, and which of them each row is. Equal captions are embedded once: in two batches
    they would differ by rounding, and a tie between them would be broken by it."""
    seen: dict[bytes, int] = {}
    firsts: list[int] = []
    row_of: list[int] = []
    for index, row in enumerate(ids.numpy()):
        key = row.tobytes()
        if key not in seen:
            seen[key] = len(firsts)
            firsts.append(index)
        row_of.append(seen[key])
    return ids[firsts], torch.tensor(row_of)


def evaluate(
    encoder: DualEncoder,
    records: Sequence[Record],
    *,
    resamples: int = 2000,
    batch_size: int = 128,
    workers: int = 0,
    advance: Advance | None = None,
) -> tuple[Retrieval, Embedded]:
    """Embed and score. See ``gradscope.metrics.recall`` for what each number means."""
    embedded = embed_records(encoder, records, batch_size=batch_size, workers=workers, advance=advance)
    return retrieval(embedded.image, embedded.text, embedded.image_of_text, resamples=resamples), embedded
