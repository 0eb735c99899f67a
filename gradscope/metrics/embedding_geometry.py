"""The shape of two clouds of unit rows: alignment, uniformity, modality gap, effective rank, hubness, the gap, the order of neighbours.

For image rows v_i and caption rows t_i of matching pairs, all unit:
    alignment        E |v_i - t_i|^2                                  0 ... 4; 2 - 2 * mean cosine of the pairs
    uniformity       log E_{i<j} exp(-2 |x_i - x_j|^2) of one tower   -4 for rows spread over a wide sphere, 0 for one point
    mean cosine      E_{i<j} <x_i, x_j> of one tower                  the cone: 0 spread out, 1 one point
    modality gap     |mean v - mean t|                                0 ... 2
    relative gap     A / (A + (W_v + W_t) / 2), A the alignment, W the mean squared distance of two rows of one tower;
                     .5: a pair is as far apart as two rows of one tower taken at random
    effective rank   exp(entropy of s_k / sum s)                      s: singular values of the rows; 1 ... min(N, D)
    hubness          N_k(j) = number of anchors that have candidate j among their k nearest: its skewness over candidates, the
                     largest as a share of the anchors, and the share of candidates with none (anti-hubs)

Sources: Wang and Isola (2020), alignment with power 2 and uniformity with t = 2; Liang et al. (2022), modality gap; Schrodi et al.
(2025), relative gap; Roy and Vetterli (2007) and, as a readout of representations, RankMe (Garrido et al., 2023), effective rank, both
without centring; Radovanovic et al. (2010), skewness of N_k, here between towers as in retrieval.

How to read: alignment and uniformity both fall while the towers learn; alignment falling with uniformity rising is collapse.
How it can mislead, by the number of rows N: alignment, uniformity, mean cosine and relative gap are means over pairs, so a small N
makes them noisy, hardly biased. The modality gap is biased upwards: its
square by (A - gap^2) / N on average, for N pairs. Effective rank is cut at min(N, D), one less when centred: a batch of 16 cannot show
more than 16 and understates it long before. Not centred, one long mean direction (a cone) counts as one large singular value and
hides the rest; centred, the cone is gone from the answer. Hubness grows with N and with the intrinsic dimension, so compare it at one N
and one k. Uniformity cannot tell a few duplicates from a slightly narrower cone.

Rows are multiplied in the dtype given and summed in float64, in strips of ``block`` rows: give float64 rows where fp32 products may be
TF32. Without a host read anywhere, except inside the eigenvalues of the effective rank on a GPU, where the library waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 256  # a strip of 256 x 50,000 fp32 products is 51 MB
_TEMPERATURE = 2.0  # t of uniformity


def alignment(image: Tensor, text: Tensor) -> Tensor:
    """Mean squared distance of paired rows [N, D] and [N, D]: [] float64."""
    return (image.double() - text.double()).square().sum(1).mean()


def uniformity(rows: Tensor, *, block: int = BLOCK, tick: Callable[[], None] | None = None) -> Tensor:
    """Log of the mean Gaussian kernel over distinct pairs of unit rows [N, D]: [] float64; nan for one row."""
    n = len(rows)
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    for start in range(0, n, block):
        cosine = rows[start : start + block] @ rows[start:].T  # its strict upper triangle holds each pair i < j of these rows once
        kernel = cosine.sub_(1.0).mul_(2.0 * _TEMPERATURE).exp_()  # |x - y|^2 = 2 - 2 cosine
        total += kernel.triu_(1).sum(dtype=torch.float64)
        if tick is not None:
            tick()
    return (total / (n * (n - 1) / 2)).log() if n > 1 else total + math.nan


def mean_squared_distance(rows: Tensor) -> Tensor:
    """E |x_i - x_j|^2 over distinct pairs of rows [N, D], in closed form: [] float64; nan for one row."""
    n, total, squares = len(rows), *_sums(rows)
    return 2.0 * (n * squares - total.square().sum()) / (n * (n - 1)) if n > 1 else squares + math.nan


def mean_cosine(rows: Tensor) -> Tensor:
    """E <x_i, x_j> over distinct pairs of rows [N, D], in closed form: [] float64; nan for one row."""
    n, total, squares = len(rows), *_sums(rows)
    return (total.square().sum() - squares) / (n * (n - 1)) if n > 1 else squares + math.nan


def modality_gap(image: Tensor, text: Tensor) -> Tensor:
    """Distance of the two towers' means, rows [N, D] and [M, D]: [] float64."""
    return (_sums(image)[0] / len(image) - _sums(text)[0] / len(text)).norm()


def relative_gap(image: Tensor, text: Tensor, aligned: Tensor) -> Tensor:
    """``aligned`` (see ``alignment``) against the towers' own spread, rows [N, D] and [M, D]: [] float64 between 0 and 1."""
    spread = (mean_squared_distance(image) + mean_squared_distance(text)) / 2.0
    return aligned / (aligned + spread)


def effective_rank(rows: Tensor, *, centred: bool = False, block: int = BLOCK) -> Tensor:
    """exp(entropy of the normalised singular values) of rows [N, D]: [] float64.

    Formed from the eigenvalues of the smaller of the two Gram matrices, O(N D min(N, D)). Eigenvalues that rounding alone can make
    count as zero; nan if none is left (all rows alike, centred) or a row is not finite.
    """
    return _spectral([(rows, centred)], block)[0]


def effective_ranks(clouds: Sequence[Tensor], *, block: int = BLOCK) -> Tensor:
    """``effective_rank`` of clouds of one shape [N, D], as they are and centred: [len(clouds), 2] float64.

    All eigenvalues come from one call: a GPU waits for the host once, however many clouds there are.
    """
    return _spectral([(rows, centred) for rows in clouds for centred in (False, True)], block).view(-1, 2)


def k_occurrences(cosine: Tensor, k: int) -> Tensor:
    """How often each candidate is among an anchor's k nearest: cosines [N, M], anchors in rows -> int64 [M].

    Sums over strips of anchors. -inf marks what is no candidate, and is not counted; ties at the k-th place are cut arbitrarily.
    """
    found, nearest = cosine.topk(k, dim=1, sorted=False)
    counts = torch.zeros(cosine.shape[1], dtype=torch.int64, device=cosine.device)
    return counts.scatter_add_(0, nearest.flatten(), (found > -math.inf).long().flatten())  # bincount would make a GPU wait


def hubness(counts: Tensor, anchors: int) -> dict[str, Tensor]:
    """Skewness, largest share and anti-hub share of k-occurrences int64 [M] over ``anchors`` anchors: three [] float64.

    The skewness is that of the population, E (N - mean)^3 / sd^3; nan where all candidates are equally frequent.
    """
    away = counts.double() - counts.double().mean()
    return {
        "skewness": away.pow(3).mean() / away.square().mean().pow(1.5),
        "largest": counts.max().double() / anchors,
        "antihubs": (counts == 0).double().mean(),
    }


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of two vectors [K], ties at their mean rank: [] float64; nan if one is constant or holds a nan."""
    x, y = (_ranks(values) - (len(values) + 1) / 2.0 for values in (a, b))
    return (x * y).sum() / (x.square().sum() * y.square().sum()).sqrt() + 0.0 * (a.sum() + b.sum())


def quantiles(values: Tensor, at: Sequence[float]) -> Tensor:
    """Quantiles of [K] values, linear between order statistics: float64 [len(at)]; nan if a value is.

    torch's own takes several levels as a tensor only, which a GPU would wait for, and at most 2^24 values.
    """
    ordered = values.double().sort().values
    places = [q * (len(ordered) - 1) for q in at]
    low, high = (torch.stack([ordered[end(place)] for place in places]) for end in (math.floor, math.ceil))
    weight = torch.stack([torch.full_like(ordered[0], place % 1.0) for place in places])
    return torch.where(ordered.isnan().any(), math.nan, torch.lerp(low, high, weight))


def strips(anchors: Tensor, candidates: Tensor, block: int, tick: Callable[[], None] | None = None) -> Iterator[tuple[int, Tensor]]:
    """(first row, products [b, M]) for strips of ``block`` rows of ``anchors`` [N, D]; each strip is the caller's to change.

    ``tick`` is called when a strip is done with.
    """
    for start in range(0, len(anchors), block):
        yield start, anchors[start : start + block] @ candidates.T
        if tick is not None:
            tick()


def _sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the rows [D] and of their squared norms [], float64, without a float64 copy of all rows."""
    parts = [(part.double().sum(0), part.double().square().sum()) for part in rows.split(4096)]
    return torch.stack([total for total, _ in parts]).sum(0), torch.stack([square for _, square in parts]).sum()


def _spectral(asked: Sequence[tuple[Tensor, bool]], block: int) -> Tensor:
    """``effective_rank`` of (rows, centred), all of one shape: [len(asked)]."""
    grams = torch.stack([_gram(rows, centred, block) for rows, centred in asked])
    finite = torch.nan_to_num(grams, nan=0.0, posinf=0.0, neginf=0.0)  # the library would raise on them
    found = torch.linalg.eigvalsh(finite)  # [K, min(N, D)]
    size = torch.stack([max(rows.shape) * _sums(rows)[1] for rows, _ in asked])
    singular = torch.where(found < torch.finfo(torch.float64).eps * size[:, None], 0.0, found).sqrt()
    share = singular / singular.sum(dim=1, keepdim=True)
    return torch.special.entr(share).sum(dim=1).exp() + 0.0 * grams.sum(dim=(1, 2))


def _gram(rows: Tensor, centred: bool, block: int) -> Tensor:
    """X X^T [N, N] or X^T X [D, D], whichever is smaller, float64; X has its mean taken off if ``centred``."""
    mean = _sums(rows)[0] / len(rows) if centred else 0.0
    if len(rows) <= rows.shape[1]:
        wide = rows.double() - mean
        return wide @ wide.T
    gram = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for part in rows.split(block):
        wide = part.double() - mean
        gram += wide.T @ wide
    return gram


def _ranks(values: Tensor) -> Tensor:
    """1 ... K [K] float64; equal values share the mean of their ranks."""
    ordered = values.detach().sort().values
    below, through = (torch.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return (below + through + 1).double() / 2.0
