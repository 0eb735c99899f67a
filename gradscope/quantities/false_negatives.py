"""What of the measured batch is pushed apart although it belongs together: duplicates, near-duplicates and likely false negatives.

Captions, over the N(N-1)/2 pairs or the N captions of the batch (``captions`` has the mean, the number of repeated strings, ...):
    cosine_q50, _q90, _q99, cosine_max   of a pair; order statistics are interpolated linearly
    pairs_above_0.95, pairs_above_0.99   share of pairs at that cosine or over
    captions_above_0.99                  share of captions with another at .99 or over
    same_string                          share of captions whose string another one has
    same_tokens, same_tokens_share       captions whose token ids another one has under a different string: one text to the encoder
    same_tokens_cut                      how many of those were cut at the context: the difference was in the part that went
    truncated_share                      share of captions cut at the context
    overlap_hardest, overlap_nearest     Jaccard |A and B| / |A or B| of the sets of token ids, start, end and padding left out: of the
                                         pair with the largest cosine; mean over captions, each with its nearest
    same_image                           share of images whose unit row another one has (cosine 1 to rounding)

Likely false negatives: share of negatives whose guide similarity exceeds the anchor's own positive cosine p_i = S_ii less a margin
(absolute: p - m; relative: p - |p| m, so that m = .05 is "95 % of the positive" whatever its sign), and their mean number per anchor:
    masked_G_M, masked_G_M_per_anchor    M = absolute, relative; G = captions (guide G_ij, the cosine of the two captions) or
                                         pairs (guide S_ij, the cosine of the anchor and the other tower's row; over all directions)

By objective, the share of the remaining push, over all anchors and directions, that lies on such cells; the positive is no part of it:
    push_identical                       captions with identical token ids (strings, where the loop does not tell the ids)
    push_same_image                      pairs of the same image
    push_G_M                             cells that masked_G_M counts
    share = sum of p_ij over those cells / sum of the residuals 1 - p_ii, formed on p / max p, in float64

Source: GISTEmbed (Solatorio, 2024), positive-positive and anchor-positive masks, with the live encoder as its own guide; margins as in
sentence-transformers' GISTEmbedLoss, which removes the cells that are only counted here. Paper facts, section 7.5.
How to read: push_identical .3 says that three tenths of what is left of the gradient separates what cannot be separated. With
``gradscope train --duplicates exclude`` such cells are no negatives, and neither masked_ nor push_ counts them.
How it can mislead: between an image and a text tower lies the modality gap. Captions are compared with captions (.8, say) and the
positive with the other tower (.3), so masked_captions is 1 for almost every CLIP; it means something where both towers see text, and
masked_pairs means something everywhere. The live encoder judges itself: captions it cannot tell apart yet are called alike. A pair of
images at cosine 1 may be a collapsed tower. Where no negative is left, shares are nan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.counting import counts_of, sums_of
from gradscope.metrics.duplicates import above_positive, identical_rows, same_strings, token_overlap
from gradscope.metrics.order_statistics import order_statistics
from gradscope.metrics.softmax import LOG2_E, per_direction, row_slices
from gradscope.objectives.margin import remembered_cosines
from gradscope.quantities import quantities
from gradscope.types import Head, Reading, Scores, Step

NEAR = (0.95, 0.99)
QUANTILES = (50, 90, 99)

#: Two unit rows of one image differ in their last bits only: a cosine of 1 to fp32 rounding.
SAME_IMAGE = 1 - 1e-6

#: The masks that a guide makes, and that are counted.
GUIDES = ("captions_", "pairs_")


Values = dict[str, tuple[Tensor, str]]


@quantities.register("false_negatives")
@dataclass(frozen=True, kw_only=True)
class FalseNegatives:
    """``absolute`` and ``relative`` are the two margins m under the anchor's own positive cosine."""

    absolute: float = 0.0
    relative: float = 0.05
    phase: ClassVar[str] = "batch"
    tier: ClassVar[str] = "default"
    needs: ClassVar[tuple[str, ...]] = ("cells",)

    def __call__(self, step: Step) -> list[Reading]:
        if len(step.embeddings.text) < 2:
            return []  # no negatives
        scores = next(iter(step.heads.values())).scores
        assert scores is not None
        cosines = remembered_cosines(step.embeddings.text, step.memo)  # [N, N]
        identical, strings = _identical(step), _strings(step)
        pictures = remembered_cosines(step.embeddings.image, step.memo)
        images = (pictures >= SAME_IMAGE).fill_diagonal_(False)
        hardest, nearest = cosines.clone().fill_diagonal_(-2.0).max(dim=1)  # [N] of each caption among the others
        values = _closeness(cosines, hardest) | _texts(step, identical, strings) | _overlap(step, hardest, nearest)
        values["same_image"] = (_share(images) + 0.0 * pictures.sum(), "share")
        readings = [_reading(key, value, unit) for key, (value, unit) in values.items()]
        duplicates = strings if identical is None else identical
        masks = {"same_image": images} if duplicates is None else {"identical": duplicates, "same_image": images}
        return readings + self._guided(step, scores, cosines, masks)

    def _guided(self, step: Step, scores: Scores, cosines: Tensor, masks: Mapping[str, Tensor]) -> list[Reading]:
        """Where each guide masks, and the share of each objective's push on every mask."""
        masks = {**masks, **{f"captions_{kind}": mask for kind, mask in self._above(cosines, scores.cosine).items()}}
        directions = next(iter(step.heads.values())).directions
        shared = Chosen.of(masks, scores.excluded)
        chosen: dict[str, Chosen] = {}
        for direction, matrix in per_direction(scores.cosine, directions).items():
            pairs = {f"pairs_{kind}": mask for kind, mask in self._above(matrix.contiguous(), scores.cosine).items()}
            chosen[direction] = shared.joined(Chosen.of(pairs, scores.excluded))
        names = chosen[directions[0]].names
        readings, nan = [], 0.0 * scores.cosine.sum()
        kept = _kept(len(cosines), scores.excluded)
        counts = torch.stack([each.counts() for each in chosen.values()]).mean(dim=0) + nan  # [masks]
        for name, count in zip(names, counts, strict=True):
            if name.startswith(GUIDES):
                readings.append(_reading(f"masked_{name}", count / kept, "share"))
                readings.append(_reading(f"masked_{name}_per_anchor", count / len(cosines), "negatives"))
        return readings + [reading for head in step.heads.values() for reading in _pushes(head, chosen)]

    def _above(self, guide: Tensor, cosine: Tensor) -> dict[str, Tensor]:
        positive = cosine.diagonal()
        return {
            "absolute": above_positive(guide, positive, absolute=self.absolute),
            "relative": above_positive(guide, positive, relative=self.relative),
        }


def _closeness(cosines: Tensor, hardest: Tensor) -> Values:
    pairs = torch.cat([row[i + 1 :] for i, row in enumerate(cosines.unbind())])
    nan = 0.0 * pairs.sum()
    values: Values = {f"cosine_q{q}": (value + nan, "cosine") for q, value in zip(QUANTILES, _quantiles(pairs), strict=True)}
    values["cosine_max"] = (pairs.amax() + nan, "cosine")
    values |= {f"pairs_above_{near}": (torch.count_nonzero(pairs >= near).double() / len(pairs) + nan, "share") for near in NEAR}
    values[f"captions_above_{NEAR[-1]}"] = ((hardest >= NEAR[-1]).double().mean() + nan, "share")
    return values


def _quantiles(pairs: Tensor) -> list[Tensor]:
    """Of ``QUANTILES``, between neighbours linearly: float64 [] each."""
    places = [q / 100 * (len(pairs) - 1) for q in QUANTILES]
    ranks = [rank for place in places for rank in (int(place), min(int(place) + 1, len(pairs) - 1))]
    ends = order_statistics(pairs, ranks).double().view(-1, 2)
    return [torch.lerp(low, high, place - int(place)) for (low, high), place in zip(ends, places, strict=True)]


def _texts(step: Step, identical: Tensor | None, strings: Tensor | None) -> Values:
    values: Values = {}
    if strings is not None:
        values["same_string"] = (_share(strings), "share")
    if identical is not None and strings is not None:
        other = (identical & ~strings).any(dim=1)  # [N]
        values["same_tokens"] = (other.sum(), "captions")
        values["same_tokens_share"] = (other.double().mean(), "share")
    if step.lengths is not None and step.token_ids is not None:
        cut = step.lengths.to(step.token_ids.device, non_blocking=True) > step.token_ids.shape[1]
        values["truncated_share"] = (cut.double().mean(), "share")
        if "same_tokens" in values and len(cut) == len(other):
            values["same_tokens_cut"] = ((other & cut).sum(), "captions")
    return values


def _overlap(step: Step, hardest: Tensor, nearest: Tensor) -> Values:
    words = _words(step)
    if words is None:
        return {}
    assert step.token_ids is not None
    overlap = token_overlap(step.token_ids, words, step.token_ids.index_select(0, nearest), words.index_select(0, nearest))
    nan = 0.0 * hardest.sum()
    first = overlap.gather(0, hardest.argmax().view(1))[0]
    return {"overlap_hardest": (first + nan, "share"), "overlap_nearest": (overlap.mean() + nan, "share")}


def _words(step: Step) -> Tensor | None:
    """Which token ids are words, [N, L]: what the tokenizer calls valid less the last, which is end-of-text; or, in a loop that tells
    lengths only, all but the first and the last token. None where neither is known of these N captions."""
    ids, valid = step.token_ids, step.embeddings.text_valid
    if ids is None or len(ids) != len(step.embeddings.text):
        return None
    position = torch.arange(ids.shape[1], device=ids.device)
    if valid is not None and valid.shape == ids.shape:
        return valid & (position < (position * valid).amax(dim=1, keepdim=True))
    if step.lengths is None:
        return None
    ends = step.lengths.to(ids.device, non_blocking=True).clamp(max=ids.shape[1])
    return (position >= 1) & (position < ends[:, None] - 1)


def _identical(step: Step) -> Tensor | None:
    """[N, N] captions of the same token ids, where the ids of all N are known."""
    known = step.token_ids is not None and len(step.token_ids) == len(step.embeddings.text)
    return identical_rows(step.token_ids) if known else None  # type: ignore[arg-type]


def _strings(step: Step) -> Tensor | None:
    known = step.captions is not None and len(step.captions) == len(step.embeddings.text)
    return same_strings(step.captions, step.embeddings.text.device) if known else None  # type: ignore[arg-type]


def _pushes(head: Head, chosen: Mapping[str, Chosen]) -> list[Reading]:
    """The share of the head's push on the cells of each mask, over all anchors of all directions."""
    assert head.scores is not None
    odds = head.anchors.log_odds
    largest = torch.cat([F.logsigmoid(x) for x in odds.values()]).max()  # of the residuals: no sum of shares is far from 1
    sums = [
        each.push(per_direction(head.scores.logits)[direction].contiguous(), odds[direction], largest)
        for direction, each in chosen.items()
    ]
    *on_masks, total = torch.stack(sums).sum(dim=0)
    names = next(iter(chosen.values())).names
    return [_reading(f"push_{name}", value / total, "share", head.name) for name, value in zip(names, on_masks, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Several masks [N, N] of one direction, anchors in rows, as the bits of one number per cell: each is counted in one pass for all.

    What is no negative (the diagonal, an excluded cell) is in none.
    """

    names: tuple[str, ...]
    codes: Tensor  # uint8 [N, N]

    @classmethod
    def of(cls, masks: Mapping[str, Tensor], excluded: Tensor | None) -> Chosen:
        first, *others = masks.values()
        codes = first.to(torch.uint8)
        for bit, mask in enumerate(others, 1):
            codes |= mask.to(torch.uint8) << bit
        codes.fill_diagonal_(0)
        return cls(names=tuple(masks), codes=codes if excluded is None else codes.masked_fill_(excluded, 0))

    def joined(self, other: Chosen) -> Chosen:
        """The masks of both."""
        return Chosen(names=self.names + other.names, codes=self.codes | other.codes << len(self.names))

    def counts(self) -> Tensor:
        """How many cells each mask chose, float64 [masks]."""
        return self._by_mask(counts_of(self.codes.flatten(), self._size))

    def push(self, logits: Tensor, log_odds: Tensor, largest: Tensor) -> Tensor:
        """The sum over the cells of each mask, and over all negatives, of p_ij / exp(largest): float64 [masks + 1].

        ``logits`` [N, N] of this direction, -inf where excluded; ``log_odds`` [N] of its anchors.
        """
        norm = logits.diagonal().double() + F.softplus(log_odds, threshold=40.0) + largest  # [N]
        # Most cells have one and the same code: dealt into lanes, an addition need not wait for the one before.
        lanes = min(8, 256 // self._size)
        lane = (torch.arange(logits.shape[1], device=logits.device) % lanes * self._size).to(torch.uint8)
        total = torch.zeros(lanes * self._size, dtype=torch.float64, device=logits.device)
        for rows in row_slices(*logits.shape):
            cells = logits[rows].to(torch.float64, copy=True).sub_(norm[rows, None]).mul_(LOG2_E).exp2_()
            cells.diagonal(rows.start).fill_(0.0)
            total += sums_of((self.codes[rows] + lane).flatten(), cells.flatten(), lanes * self._size)
        total = total.view(lanes, self._size).sum(dim=0)
        return torch.cat([self._by_mask(total), total.sum().view(1)])

    @property
    def _size(self) -> int:
        return 1 << len(self.names)

    def _by_mask(self, by_code: Tensor) -> Tensor:
        """Counts or sums of the numbers 0 ... -> float64 [masks], exact up to 2^53."""
        codes, bits = (torch.arange(size, device=by_code.device) for size in (self._size, len(self.names)))
        return (codes >> bits[:, None] & 1).double() @ by_code.double()


def _kept(n: int, excluded: Tensor | None) -> Tensor | int:
    """How many cells are negatives."""
    return n * (n - 1) if excluded is None else n * (n - 1) - excluded.sum()


def _share(pairs: Tensor) -> Tensor:
    """The share of rows of a bool [N, N] with any True."""
    return pairs.any(dim=1).double().mean()


def _reading(key: str, value: Tensor, unit: str, term: str = "") -> Reading:
    return Reading(quantity="false_negatives", key=key, term=term, value=value, unit=unit)
