"""Embed a split and score it: retrieval in both directions over the whole gallery.

Evaluation mode, no gradient, fp32 towers, float64 scores; mode, gradient setting and random state are as before afterwards. Nothing
here knows an objective: the same weights give the same bytes whatever they were trained with.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.data.batching import Pixels, decoded
from gradscope.data.pixels import pixel_path
from gradscope.data.too_long import refuse_too_long
from gradscope.distributed import concatenated, is_sharded, own_share, world
from gradscope.encoders.dual import DualEncoder, blank_pixels, evaluating
from gradscope.metrics.gallery_curve import CurvePoint, gallery_curve
from gradscope.metrics.hardness_recall import HardnessBin, caption_hardness, hardness_recall, query_hardness
from gradscope.metrics.recall import Retrieval, retrieval
from gradscope.metrics.true_recall import true_recall_rows
from gradscope.types import Record

Advance = Callable[[int, int], None]

PRECISION = "fp32 towers and unit rows, float64 scores"


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """A split's unit rows: image [N, D], text [M, D], image_of_text int64 [M]; truncated captions are counted.

    ``captions`` are the strings, empty where the rows were read from a file; ``digests`` name them in any case.
    """

    ids: tuple[str, ...]
    image: Tensor
    text: Tensor
    image_of_text: Tensor
    truncated: int
    digests: tuple[str, ...]  # sha256 of each caption
    captions: tuple[str, ...] = ()
    context: int = 0  # tokens
    preprocessing: str = ""
    precision: str = PRECISION


@dataclass(frozen=True, kw_only=True)
class Details:
    """Beside the recalls of a gallery: R@1 by hardness, and in smaller galleries."""

    hardness: list[HardnessBin]
    curve: list[CurvePoint]


def embed_records(
    encoder: DualEncoder,
    records: Sequence[Record],
    *,
    batch_size: int = 128,
    workers: int = 0,
    decode: str = "fast",
    on_too_long: str = "truncate",
    read: Callable[[str], Tensor] | None = None,
    advance: Advance | None = None,
) -> Embedded:
    """All images and all captions of ``records``, in order. Rows are fp32 on the encoder's device.

    Several ranks embed a part each, and each gets all rows. What they are dealt are whole batches, consecutive ones, so every batch is
    the one that a single process would have: the same bits, no row twice and none too many.

    Args:
        read: path -> picture, where it is not decoded from its file; equal to what ``decode`` gives (see ``image_cache``).

    Raises:
        ValueError: a picture is missing or damaged, or a caption is too long and ``on_too_long`` is "error".
    """
    captions = [caption for record in records for caption in record.captions]
    owner = [i for i, record in enumerate(records) for _ in record.captions]
    tokenized = encoder.tokenize(captions)
    if on_too_long == "error":
        refuse_too_long([records[i].id for i in owner], tokenized.lengths.tolist(), encoder.context)
    distinct, row_of = _distinct(tokenized.ids)
    plan = dealt(torch.arange(len(records)), batch_size)
    total, done = sum(map(len, plan)) + sum(map(len, dealt(distinct, batch_size))), 0
    images: list[Tensor] = []
    with evaluating(encoder):
        pictures = Pixels(records, read or pixel_path(encoder.config["preprocess_cfg"], decode))
        for pixels in decoded(pictures, [rows.tolist() for rows in plan], workers=workers, pin=encoder.device.type == "cuda"):
            images.append(encoder.embed_image(pixels.to(encoder.device, non_blocking=True)))
            done += len(pixels)
            if advance:
                advance(done, total)
        keep_step(encoder, len(records), batch_size, lambda: encoder.embed_image(blank_pixels(encoder, 1)))
    text = embed_captions(encoder, distinct, batch_size=batch_size, advance=(lambda n: advance(done + n, total)) if advance else None)
    return Embedded(
        ids=tuple(record.id for record in records),
        image=concatenated(images, encoder.device),
        text=text[row_of],
        image_of_text=torch.tensor(owner, device=encoder.device),
        truncated=tokenized.truncated(),
        digests=tuple(hashlib.sha256(caption.encode()).hexdigest() for caption in captions),
        captions=tuple(captions),
        context=encoder.context,
        preprocessing=_preprocessing(encoder, decode),
    )


def embed_captions(encoder: DualEncoder, ids: Tensor, *, batch_size: int = 128, advance: Callable[[int], None] | None = None) -> Tensor:
    """Token ids [M, L], the same on every rank -> unit rows [M, D] of all of them, dealt to the ranks as ``embed_records`` does."""
    rows: list[Tensor] = []
    with evaluating(encoder):
        for piece in dealt(ids, batch_size):
            rows.append(encoder.embed_text(piece.to(encoder.device)))
            if advance:
                advance(sum(map(len, rows)))
        keep_step(encoder, len(ids), batch_size, lambda: encoder.embed_text(ids[:1].to(encoder.device)))
    return concatenated(rows, encoder.device)


def dealt(rows: Tensor, batch_size: int) -> Sequence[Tensor]:
    """This rank's batches of ``rows``: consecutive ones, as a single process would form them."""
    batches = rows.split(batch_size)
    return batches[own_share(len(batches))]


def keep_step(encoder: DualEncoder, rows: int, batch_size: int, forward: Callable[[], Tensor]) -> None:
    """Where parameters are sharded, each forward pass collects them from all ranks: a rank with one batch less makes a blank one, of
    which nothing is kept."""
    batches = -(-rows // batch_size)
    own = own_share(batches)
    if any(map(is_sharded, encoder.parameters())) and own.stop - own.start < -(-batches // world()):
        forward()


def _preprocessing(encoder: DualEncoder, decode: str) -> str:
    """The way from file to tensor in words."""
    path = pixel_path(encoder.config["preprocess_cfg"], decode)
    return f"pixels {path.size[0]} x {path.size[1]}, {path.interpolation}, resize {path.resize_mode}, decode {decode}"


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
    decode: str = "fast",
    on_too_long: str = "truncate",
    read: Callable[[str], Tensor] | None = None,
    advance: Advance | None = None,
) -> tuple[Retrieval, Embedded]:
    """Embed and score, together where there are several ranks. See ``gradscope.metrics.recall`` for what each number means."""
    embedded = embed_records(
        encoder, records, batch_size=batch_size, workers=workers, decode=decode, on_too_long=on_too_long, read=read, advance=advance
    )
    return score(embedded, resamples=resamples, shared=world() > 1), embedded


def score(embedded: Embedded, *, resamples: int = 2000, shared: bool = False) -> Retrieval:
    """Both directions; where images have several captions, the recall of all of them too (rows "true R@k").

    ``shared``: all ranks hold these rows and count a part each (a collective); the answer is that of one process.

    Raises:
        ValueError: the rows do not form a gallery (see ``gradscope.metrics.ranks``).
    """
    parts = embedded.image, embedded.text, embedded.image_of_text
    result = retrieval(*parts, resamples=resamples, shared=shared)
    if len(embedded.text) == len(embedded.image):
        return result
    return dataclasses.replace(result, rows=[*result.rows, *true_recall_rows(*parts, resamples=resamples)])


def details(embedded: Embedded, result: Retrieval) -> Details:
    """R@1 by hardness and by gallery size, with the result's own resamples."""
    hardness = caption_hardness(embedded.text, embedded.image_of_text)
    both = (result.i2t, result.t2i)
    bins = [
        hardness_recall(counts, query_hardness(counts, hardness, embedded.image_of_text), resamples=result.resamples) for counts in both
    ]
    curves = [gallery_curve(counts, resamples=result.resamples) for counts in both]
    return Details(hardness=[b for part in bins for b in part], curve=[point for part in curves for point in part])


def memory_note(n_images: int, n_captions: int, width: int, block: int = 1024) -> str:
    """What scoring takes, in words, before it starts."""
    tiles, rows = 4 * 8 * block * block, 4 * width * (n_images + n_captions)
    whole = 8 * n_images * n_captions
    return (
        f"scoring {n_images:,} x {n_captions:,} in tiles: about {(tiles + rows) / 2**20:,.0f} MiB with the embeddings "
        f"(the whole matrix would take {whole / 2**30:,.1f} GiB)"
    )
