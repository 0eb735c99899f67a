"""The geometry of a whole gallery's embeddings, in strips: O(block * M) memory, four passes over all pairs.

Every number of ``gradscope.metrics.embedding_geometry`` (formulas and sources are there), between N pictures and M captions, where a
picture may have several:
    alignment, relative_gap                       over the M pairs of a caption and its picture
    uniformity, mean_cosine, effective_rank ...   of each tower's rows, every pair once
    hub_skewness, hub_largest, antihubs           of the k nearest of ALL candidates, the true ones too, as retrieval returns them
    gap_q10, gap_q50, gap_q90 .<direction>        best own cosine minus hardest other cosine, over anchors
    violated.<direction>                          share of anchors with a negative gap: 1 - R@1 up to ties

How to read: several files of one gallery side by side are a course over time. hub_largest .05 at k = 10 says that one caption is among
the first ten of every twentieth picture.
How it can mislead: effective rank, hubness and gap depend on N and M, so compare files of one gallery only. Products are fp32 (checked,
never TF32), so cosines are right to about 1e-6: uniformity, gaps and hubness of near-ties inherit that; all else is float64. A row
that is not finite is left out and counted, and so is its pair; its partner stays a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gradscope.metrics import embedding_geometry as measure
from gradscope.metrics.gallery_scores import check_gallery, finite_rows
from gradscope.products import fast_fp32

Progress = Callable[[int, int], None]  # (strips done, strips in all)

GAP_QUANTILES = {"gap_q10": 0.1, "gap_q50": 0.5, "gap_q90": 0.9}


def embedding_geometry(
    image: Tensor,
    text: Tensor,
    image_of_text: Tensor | None = None,
    *,
    k: int = 10,
    block: int = measure.BLOCK,
    progress: Progress | None = None,
) -> dict[str, float]:
    """All numbers of this module, by key.

    Args:
        image, text: unit rows [N, D] and [M, D].
        image_of_text: int64 [M], each caption's picture; None where row i belongs to row i.
        k: nearest candidates counted for hubness; at most all of them are taken.
        block: rows per strip; results do not depend on it beyond fp32 rounding.
        progress: called with (strips done, strips in all).

    Raises:
        ValueError: shapes that do not belong together, rows that are not unit, or fewer than two finite rows in a tower.
    """
    owner = torch.arange(len(text)) if image_of_text is None else image_of_text
    check_gallery(image, text, owner)
    kept = {"image": finite_rows(image), "text": finite_rows(text)}
    towers = {name: rows[kept[name]].float() for name, rows in (("image", image), ("text", text))}
    for name, rows in towers.items():
        _check_rows(name, rows)
    if k < 1 or block < 1:
        raise ValueError(f"k and block must be at least 1, got {k} and {block}.")
    place = _places(kept["image"], owner[kept["text"].cpu()].to(image.device))
    if not bool((place >= 0).any()):
        raise ValueError("embedding geometry needs a caption and its picture both finite, and found none; look for the cause of nan.")
    tick = _ticker(2 * sum(math.ceil(len(rows) / block) for rows in towers.values()), progress)
    with fast_fp32(image.device, *((min(block, len(a)), len(b), image.shape[1]) for a in towers.values() for b in towers.values())):
        values = {**_pairs(towers, place), **_towers(towers, block, tick), **_between(towers, place, k, block, tick)}
    counts = {"images": len(image), "captions": len(text), "k": k, "width": image.shape[1]}
    lost = {f"excluded.{name}": int((~rows).sum()) for name, rows in kept.items()}
    return {**{name: float(count) for name, count in {**counts, **lost}.items()}, **values}


def _check_rows(name: str, rows: Tensor) -> None:
    if len(rows) < 2:
        raise ValueError(f"embedding geometry needs two or more finite {name} rows, got {len(rows)}; look for the cause of nan or inf.")
    off = float((rows.norm(dim=1) - 1.0).abs().max())
    if off > 1e-3:
        raise ValueError(f"embedding geometry needs unit rows, but a norm in {name} is off by {off:.3g}; divide each row by its norm.")


def _places(kept: Tensor, owner: Tensor) -> Tensor:
    """Each kept caption's picture among the kept pictures, int64; -1 where that one was left out."""
    return torch.where(kept[owner], kept.cumsum(0)[owner] - 1, -1)


def _pairs(towers: dict[str, Tensor], place: Tensor) -> dict[str, float]:
    image, text = towers["image"], towers["text"]
    parts = [((image[own.clamp_min(0)].double() - rows.double()).square().sum(1)) for rows, own in _by(text, place)]
    aligned = torch.cat(parts)[place >= 0].mean()
    gap = measure.modality_gap(image, text)
    return {"alignment": float(aligned), "modality_gap": float(gap), "relative_gap": float(measure.relative_gap(image, text, aligned))}


def _by(text: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(text.split(4096), place.split(4096), strict=True)


def _towers(towers: dict[str, Tensor], block: int, tick: Callable[[], None]) -> dict[str, float]:
    values = {}
    for name, rows in towers.items():
        values[f"uniformity.{name}"] = float(measure.uniformity(rows, block=block, tick=tick))
        values[f"mean_cosine.{name}"] = float(measure.mean_cosine(rows))
        ranks = measure.effective_ranks([rows])[0].tolist()
        values |= {f"effective_rank.{name}": ranks[0], f"effective_rank_centred.{name}": ranks[1]}
    return values


def _between(towers: dict[str, Tensor], place: Tensor, k: int, block: int, tick: Callable[[], None]) -> dict[str, float]:
    image, text = towers["image"], towers["text"]
    own = torch.arange(len(image), device=image.device)
    values = _direction("i2t", image, text, own, place, k, block, tick)
    return {**values, **_direction("t2i", text, image, place, own, k, block, tick)}


def _direction(
    name: str, anchors: Tensor, candidates: Tensor, mine: Tensor, theirs: Tensor, k: int, block: int, tick: Callable[[], None]
) -> dict[str, float]:
    """One direction; ``mine`` [N] and ``theirs`` [M] are equal where an anchor and a candidate belong together, -1 for nobody's."""
    counts = torch.zeros(len(candidates), dtype=torch.int64, device=anchors.device)
    gaps = []
    for start, cosine in measure.strips(anchors, candidates, block, tick):
        counts += measure.k_occurrences(cosine, min(k, len(candidates)))
        ids = mine[start : start + block, None]
        true = (ids == theirs[None]) & (ids >= 0)
        gaps.append(cosine.masked_fill(~true, -math.inf).amax(1) - cosine.masked_fill_(true, -math.inf).amax(1))
    gap = torch.cat(gaps).double()
    gap = gap[torch.isfinite(gap)]  # an anchor whose partners were all left out has none
    found = measure.hubness(counts, len(anchors))
    values = {f"hub_skewness.{name}": found["skewness"], f"hub_largest.{name}": found["largest"], f"antihubs.{name}": found["antihubs"]}
    levels = measure.quantiles(gap, [*GAP_QUANTILES.values()])
    values |= {f"{key}.{name}": level for key, level in zip(GAP_QUANTILES, levels, strict=True)}
    values[f"violated.{name}"] = (gap < 0).double().mean()
    return {key: float(value) for key, value in values.items()}


def _ticker(total: int, progress: Progress | None) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return tick
