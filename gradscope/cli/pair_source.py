"""What a command that reads pairs is given: a file of stored embeddings, or an encoder and data to embed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradscope.cli.evaluate import refuse_settings_of_files

if TYPE_CHECKING:
    from gradscope.paired_rows import Pairs
    from gradscope.recipe import Data


#: Matrices of one batch that are alive at once, in float64; a width that takes more than this many bytes is announced.
_MATRICES, _LARGE = 12, 2**30


@dataclass(frozen=True, kw_only=True)
class PairSource:
    """``scale`` is the encoder's own, None where only its embeddings are at hand; ``notes`` are those of the data, ``split`` that which
    was read, "" where it was not chosen here."""

    pairs: Pairs
    scale: float | None
    notes: tuple[str, ...]
    split: str = ""


def read_pairs(
    source: str,
    settings: Data,
    *,
    data: str | None,
    split: str | None,
    batch_size: int,
    workers: int,
    trust_archive: bool,
    device: str,
) -> PairSource:
    """The pairs of ``source``, embedded here unless it is a file of embeddings. ``data`` and ``split`` are the flags as given.

    Raises:
        ValueError: no such source or data, data beside stored embeddings, or no finite pair.
    """
    from gradscope.embeddings_file import is_embeddings_file, load_embeddings
    from gradscope.paired_rows import paired_rows

    if is_embeddings_file(source):
        refuse_settings_of_files(source, {"--data": data, "--split": split})
        embedded, protocol = load_embeddings(source)
        return PairSource(pairs=paired_rows(embedded), scale=None, notes=tuple(protocol.notes))
    from gradscope.console import progress
    from gradscope.cpu_speed import cpu_speed
    from gradscope.encoders.load import load_encoder, resolve_device
    from gradscope.evaluate import embed_records
    from gradscope.gallery import read_gallery

    place = resolve_device(device)
    with progress("checking pictures") as advance:
        gallery = read_gallery(settings, split, workers=workers, advance=advance)
    encoder = load_encoder(source, place, trust_archive=trust_archive)
    with cpu_speed(place, encoder.longest_sequence), progress("embedding") as advance:
        embedded = embed_records(
            encoder,
            gallery.records,
            batch_size=batch_size,
            workers=workers,
            decode=settings.decode,
            on_too_long=settings.on_too_long,
            advance=advance,
        )
    return PairSource(pairs=paired_rows(embedded), scale=float(encoder.scale().detach()), notes=gallery.notes, split=gallery.split)


def announce_memory(width: int) -> None:
    """Says what a batch of a large width takes."""
    from gradscope.console import console

    if (takes := 8 * _MATRICES * width**2) > _LARGE:
        console.print(f"note: a width of {width:,} takes about {takes / 2**30:,.1f} GiB", soft_wrap=True)
