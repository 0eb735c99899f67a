"""A gallery's embeddings as pairs, and batches of pairs as training would draw them: what audits and what-ifs read.

Pair i is image i with its first caption, which is the one training uses. Batches are drawn without replacement from one seeded
permutation, so that equal seeds give equal batches for every precision, scale and objective.

How it can mislead: pairs of a test split are not what training saw; and rows of several captions per image, left out here, are the
near-duplicates that make a softmax hard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.evaluate import Embedded
from gradscope.metrics.gallery_scores import finite_rows


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Unit rows of N pairs, [N, D] each; ``left_out`` counts pairs with a row that is not finite."""

    image: Tensor
    text: Tensor
    left_out: int


def paired_rows(embedded: Embedded) -> Pairs:
    """Images with their first captions, in order. Raises ValueError if no pair is finite, or if a row is not of length 1."""
    owner = embedded.image_of_text
    order = torch.arange(len(owner), device=owner.device)
    first = torch.full((len(embedded.image),), len(owner), device=owner.device).scatter_reduce(0, owner, order, "amin")
    image, text = embedded.image, embedded.text[first]
    kept = finite_rows(image) & finite_rows(text)
    if not kept.any():
        raise ValueError("no pair of embeddings is finite; look at the encoder with `gradscope encoders check`.")
    off = max(float((rows[kept].norm(dim=1) - 1.0).abs().max()) for rows in (image, text))
    if off > 1e-3:
        raise ValueError(f"rows of embeddings must be of length 1, and some are off by {off:.3g}; divide each row by its norm.")
    return Pairs(image=image[kept], text=text[kept], left_out=int((~kept).sum()))


def refuse_width(width: int, pairs: int, split: str) -> None:
    """Raises ValueError where ``pairs`` of ``split`` do not fill one softmax of ``width``; "" where no split can be chosen."""
    if pairs >= 2 and not 2 <= width <= pairs:
        of, other = (f" of split '{split}'", ", another --split") if split else ("", "")
        raise ValueError(f"a width of {width:,} does not fit {pairs:,} pairs{of}; choose --width 2 to {pairs:,}{other}, or more data.")


def draw_batches(pairs: int, width: int, batches: int, seed: int) -> list[Tensor]:
    """At most ``batches`` index tensors [width] without replacement; fewer where the pairs do not fill so many.

    Raises:
        ValueError: a width under 2, or over the number of pairs; a seed of more than 64 bits.
    """
    if pairs < 2:
        raise ValueError("a softmax needs two pairs or more, and there is one; give more data.")
    if not 2 <= width <= pairs:
        raise ValueError(f"a width of {width:,} does not fit {pairs:,} pairs; choose 2 to {pairs:,}, or more data.")
    order = torch.randperm(pairs, generator=seeded(seed))
    return [order[at : at + width] for at in range(0, width * min(batches, pairs // width), width)]


def seeded(seed: int) -> torch.Generator:
    """A generator at ``seed``. Raises ValueError where torch cannot hold the number."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed must fit 64 bits; got {seed}.")
    return torch.Generator().manual_seed(seed)
