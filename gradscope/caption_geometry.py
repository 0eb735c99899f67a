"""The job behind `gradscope caption-geometry`: captions -> embeddings -> geometry -> files.

Source: HN-CLIP, Figure 1 and A1-A6 (arXiv 2608.18521). The numbers are `gradscope.metrics.geometry`'s and
`gradscope.metrics.batch_hardness`'s; this file joins them with what is known about the captions.
How it can mislead: every number belongs to one encoder and one caption per image; the warnings of the result say what was
dropped, cut or repeated, and a result marked ``out_of_domain`` is none.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.filesize import decimal

from gradscope.data.captions import Captions
from gradscope.data.content_words import content_words
from gradscope.geometry_file import CaptionGeometry, SimilarPair, WidthCurve, load_geometry, save_geometry

if TYPE_CHECKING:
    from torch import Tensor

    from gradscope.encoders.text import TextEncoder
    from gradscope.metrics.geometry import Geometry

__all__ = ["CaptionGeometry", "load_geometry", "measure_captions", "refuse_too_few"]

Advance = Callable[[int, int], None]


@contextmanager
def _no_progress(title: str) -> Iterator[Advance]:
    yield lambda done, total: None


def measure_captions(
    captions: Captions,
    encoder: TextEncoder,
    *,
    output: Path,
    exact_quantiles: bool = False,
    progress: Callable[[str], AbstractContextManager[Advance]] = _no_progress,
    say: Callable[[str], None] = lambda line: None,
    state: Path | None = None,
    save_every: float = 120.0,
) -> CaptionGeometry:
    """Measures ``captions`` and writes ``output/<name>/`` (`gradscope.geometry_file` names the files).

    Several processes of torch.distributed embed a part each and share the pairs; the first of them writes.

    Args:
        progress: a context manager factory, title -> advance(done, total).
        say: receives the estimate line before the pass over all pairs.
        state: folder in which an unfinished pass over all pairs is kept; the same captions and encoder go on from there.
        save_every: seconds between two writes of it.

    Raises:
        ValueError: fewer than two captions with a finite embedding, or a kept state that cannot be read.
    """
    from gradscope.distributed import rank, world
    from gradscope.metrics.geometry import Course, caption_geometry

    refuse_too_few(captions)
    clock = [time.perf_counter()]
    with progress(f"{captions.name}: captions embedded") as advance:
        rows, truncated = _embedded(captions.texts, encoder, advance)
    clock.append(time.perf_counter())
    plan, seconds = _plan(captions.name, rows, passes=3 if exact_quantiles else 1)
    goes_on = f"; if stopped, the same command goes on from {state}" if state and seconds > save_every else ""
    say(plan + goes_on)
    with progress(f"{captions.name}: blocks of pairs") as advance:
        course = Course(shared=world() > 1, state=state, save_every=save_every, progress=advance)
        found = caption_geometry(rows, exact_quantiles=exact_quantiles, course=course)
    clock.append(time.perf_counter())
    if found.resumed:
        say(f"{captions.name}: {found.resumed:,} blocks of pairs were taken over from a pass that was stopped")
    curve = _width_curve(rows, found)
    clock.append(time.perf_counter())
    times = dict(zip(("embed", "pairs", "width_curve"), np.diff(clock).round(3).tolist(), strict=True))
    result = _joined(captions, encoder, found, curve, truncated, times, str(rows.device))
    if rank() == 0:
        save_geometry(result, output / captions.name)
    return result


def refuse_too_few(captions: Captions) -> None:
    """Raises ValueError where there is no pair."""
    if len(captions.texts) < 2:
        raise ValueError(f"'{captions.name}' has {len(captions.texts)} caption; a pair needs two, so give a file with more.")


def _embedded(texts: Sequence[str], encoder: TextEncoder, advance: Advance) -> tuple[Tensor, int]:
    """All rows on every process, and how many captions were truncated."""
    from gradscope.distributed import concatenated, everyones, own_share, world

    if world() == 1 or len(texts) < world():
        return encoder.embed(texts, advance)
    rows, truncated = encoder.embed(texts[own_share(len(texts))], advance)
    return concatenated([rows], rows.device), sum(everyones(truncated))


def _plan(name: str, rows: Tensor, *, passes: int) -> tuple[str, float]:
    """What the work on all pairs will take, in words, and the seconds of one pass."""
    from gradscope.distributed import world
    from gradscope.metrics.geometry import estimate

    n = len(rows)
    seconds, extra = estimate(rows, processes=world())
    took = "less than 0.1 s" if seconds * passes < 0.1 else f"about {_duration(seconds * passes)}"
    words = (
        f"{name}: {n * (n - 1) // 2:,} {'pair' if n == 2 else 'pairs'}, {took} now that they are embedded "
        f"(and seconds for the width curve), {decimal(extra)} beside {decimal(rows.numel() * 4)} of embeddings "
        f"(the full matrix would take {decimal(4 * n * n)})"
    )
    return words, seconds


def _duration(seconds: float) -> str:
    size, unit = next(pair for pair in ((3600.0, "h"), (60.0, "min"), (0.0, "s")) if seconds >= 2.0 * pair[0])
    return f"{seconds / (size or 1.0):.1f} {unit}"


def _width_curve(rows: Tensor, found: Geometry) -> WidthCurve:
    from gradscope.metrics.batch_hardness import batch_hardness
    from gradscope.metrics.geometry import NEAR

    kept = np.setdiff1d(np.arange(len(rows)), found.excluded)
    finite = rows if len(kept) == len(rows) else rows[kept.tolist()]
    curve = batch_hardness(finite, found.near_counts[kept])
    return WidthCurve(
        near=NEAR,
        widths=curve.widths,
        expected_hardest=curve.expected_hardest,
        standard_error=curve.standard_error,
        near_chance=curve.near_chance,
        anchors=curve.anchors,
        seed=curve.seed,
    )


def _joined(
    captions: Captions,
    encoder: TextEncoder,
    found: Geometry,
    curve: WidthCurve,
    truncated: int,
    seconds: dict[str, float],
    device: str,
) -> CaptionGeometry:
    repeats = Counter(captions.texts)
    hardest = found.hardest[np.isfinite(found.hardest)]
    cells = np.clip(((hardest + 1.0) / (2.0 / len(found.counts))).astype(np.int64), 0, len(found.counts) - 1)
    duplicates = sum(count for count in repeats.values() if count > 1)
    foreign = encoder.name == "tiny" and captions.name != "scenes"
    return CaptionGeometry(
        name=captions.name,
        encoder=encoder.name,
        context=encoder.context,
        out_of_domain=foreign,
        warnings=tuple(_warnings(captions, found, truncated, encoder.context, duplicates, foreign)),
        n=found.n,
        n_pairs=found.pairs,
        n_rows=captions.n_rows,
        n_empty=captions.n_empty,
        n_further=captions.n_further,
        n_repeated_ids=captions.n_repeated_ids,
        n_excluded=len(found.excluded),
        n_truncated=truncated,
        n_duplicates=duplicates,
        n_distinct=len(repeats),
        mean=found.mean,
        hardest_mean=found.hardest_mean,
        quantiles=found.quantiles,
        quantile_width=found.quantile_width,
        hardest_quantiles=found.hardest_quantiles,
        pair_shares=found.pair_shares,
        hardest_shares=found.hardest_shares,
        width_curve=curve,
        top_pairs=tuple(_similar(captions, i, j, cosine) for i, j, cosine in found.top_pairs),
        bin_width=2.0 / len(found.counts),
        dtype=f"float32 products (checked to {found.matmul_error:.0e}), float64 means and hardest",
        seconds=seconds,
        provenance=_provenance(captions, device),
        counts=found.counts,
        hardest_counts=np.bincount(cells, minlength=len(found.counts)),
        edges=found.edges,
        ids=captions.ids,
        hardest=found.hardest,
        hardest_index=found.hardest_index,
    )


def _similar(captions: Captions, i: int, j: int, cosine: float) -> SimilarPair:
    first, second = captions.texts[i], captions.texts[j]
    other = set(content_words(second))
    return SimilarPair(
        index=(i, j),
        ids=(captions.ids[i], captions.ids[j]),
        cosine=cosine,
        identical=first == second,
        captions=(first, second),
        shared_words=tuple(word for word in content_words(first) if word in other),
    )


def _warnings(captions: Captions, found: Geometry, truncated: int, context: int, duplicates: int, foreign: bool) -> Sequence[str]:
    n = len(captions.texts)
    left_out = set(found.excluded)
    measured = [text for index, text in enumerate(captions.texts) if index not in left_out]
    same = found.repeated - (len(measured) - len(set(measured)))
    lines = {
        "the encoder 'tiny' knows only 'scenes': on these captions it is out of domain, and this is not a result": foreign,
        f"{truncated:,} of {n:,} captions exceed {context} tokens and were compared by their beginning only": truncated,
        f"{same:,} captions have the very embedding of another with other words (cut alike, or words the encoder does not know)": same,
        f"{duplicates:,} captions occur more than once, word for word: false negatives, not hard ones": duplicates,
        f"{captions.n_further:,} second and later captions of an image were not used": captions.n_further,
        f"{len(found.excluded):,} captions have a non-finite embedding and were left out": len(found.excluded),
    }
    return [*(line for line, there in lines.items() if there), *captions.notes]  # the notes count empty and joined rows


def _provenance(captions: Captions, device: str) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("gradscope", "torch", "open_clip_torch", "sentence-transformers", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": captions.source,
        "sha256": captions.sha256,
        "caption_key": captions.key,
        "split": captions.split,
        "device": device,
        "versions": versions,
    }
