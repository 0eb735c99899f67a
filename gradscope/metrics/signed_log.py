"""A sketch of many signed numbers over all decades of fp32: how many of which size and sign, exact zeros and non-finite ones apart.

A number falls into the bin of its sign, its exponent and the leading three bits of its mantissa: eight bins an octave, 26.6 a decade,
read from the bits of the float, so no logarithm is taken and nothing is lost at either end. A sketch is one int64 vector [``SIZE``]:
    [0, 2048)      negative numbers by rising size; the last eight bins are -inf and nan
    [2048, 4096)   positive numbers likewise
    4096           exact zeros of either sign
Sketches merge by addition. A quantile of sizes read from one is right to a factor of 1 +- 1/17 (5.9 %) for normal numbers; below
1.2e-38 bins are 1.5e-39 wide, and that bound is lost.

Source: the relative-error guarantee of DDSketch (Masson, Rim and Lee, VLDB 2019), with the bins of a high dynamic range histogram.
How it can mislead: bf16 and fp16 numbers are counted as they are, so gaps between bins can be the dtype's; float64 numbers beyond
fp32's range count in its end bins. A size says nothing about where the number sits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscope.metrics import octaves
from gradscope.metrics.counting import counts_of, waits_for_nothing

PER_OCTAVE = 8
SIGN = 2048  # bins of one sign: 256 exponents
ZEROS = 2 * SIGN
SIZE = ZEROS + 1
FINITE = 255 * PER_OCTAVE  # bins of one sign below inf
RELATIVE_ERROR = 1.0 / (2 * PER_OCTAVE + 1)

_SHIFT = 20  # of fp32's 23 mantissa bits, three stay
_BIAS = 127
_CHUNK = 1 << 18  # 1 MiB: the passes over one chunk find it in the cache


def sketch(numbers: Sequence[Tensor | None], device: torch.device | None = None) -> Tensor:
    """All entries of the tensors in one sketch, int64 [SIZE], on the device of the first (or ``device`` where there is none)."""
    present = [tensor for tensor in numbers if tensor is not None]
    total = torch.zeros(SIZE, dtype=torch.int64, device=present[0].device if present else device)
    for tensor in present:
        for bits in _as_fp32(tensor).contiguous().view(torch.int32).flatten().split(_CHUNK):
            total += _count(bits)
    return total


def _count(bits: Tensor) -> Tensor:
    places = (bits >> _SHIFT).add_(SIGN)  # the shift keeps the sign, so these run from 0 (smallest negative) to 4095
    counts = counts_of(places, SIZE)
    if waits_for_nothing(counts) and not (counts[0] or counts[SIGN]):
        return counts
    return _without_zeros(counts, bits)


def _without_zeros(counts: Tensor, bits: Tensor) -> Tensor:
    """Zeros fall into the first bin of their sign; here they get their own. The bits are asked: a float may take 1e-40 for 0."""
    plus = bits.numel() - torch.count_nonzero(bits)
    both = bits.numel() - torch.count_nonzero(bits << 1)
    counts[ZEROS] = both
    counts[SIGN] -= plus
    counts[0] -= both - plus
    return counts


def _as_fp32(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.dtype != torch.float64:
        return tensor.float()
    limits = torch.finfo(torch.float32)
    smallest = 2.0**-149
    inside = tensor.sign() * tensor.abs().clamp(smallest, limits.max)  # 0 * smallest stays 0, nan stays nan
    return torch.where(tensor.isinf(), tensor, inside).float()


def sizes(counts: Tensor) -> Tensor:
    """Both signs together: finite non-zero entries by size, [FINITE]."""
    return counts[:FINITE] + counts[SIGN : SIGN + FINITE]


def zeros(counts: Tensor) -> Tensor:
    return counts[ZEROS]


def nonfinite(counts: Tensor) -> Tensor:
    """Entries that are inf or nan."""
    return counts[FINITE:SIGN].sum() + counts[SIGN + FINITE : ZEROS].sum()


def positive(counts: Tensor) -> Tensor:
    """Finite entries above zero."""
    return counts[SIGN : SIGN + FINITE].sum()


def quantiles(counts: Tensor, shares: Sequence[float]) -> Tensor:
    """Sizes of the finite non-zero entries at ``shares`` of them (0 to 1), float64 [shares]; nan where there is no such entry."""
    by_size = sizes(counts)
    cumulative = by_size.cumsum(0)
    wanted = torch.stack([(cumulative[-1] * share).ceil().clamp(min=1) for share in shares])
    places = torch.searchsorted(cumulative.double(), wanted.double()).clamp(max=FINITE - 1)
    found = _centres(counts.device).gather(0, places)
    return torch.where(cumulative[-1] > 0, found, torch.nan)


def _centres(device: torch.device) -> Tensor:
    """The number of least relative error in each bin, 2 / (1 / low + 1 / high), float64 [FINITE]."""
    steps = torch.arange(FINITE + 1, device=device)
    exponent, part = (steps // PER_OCTAVE).double(), (steps % PER_OCTAVE).double() / PER_OCTAVE
    subnormal = exponent == 0  # no leading one there, and the exponent of the first normal octave
    edges = torch.exp2(exponent.clamp(min=1) - _BIAS) * torch.where(subnormal, part, 1 + part)
    low, high = edges[:-1], edges[1:]
    return 2 * low * high / (low + high)


def picture(counts: Tensor) -> Tensor:
    """The sketch in octaves, as ``gradscope.metrics.octaves`` describes: int64 [octaves.LENGTH]. Non-finite entries are left out."""
    negative, above = (_octaves(counts[start : start + FINITE]) for start in (0, SIGN))
    return torch.cat([negative.flip(0), counts[ZEROS:], above])


def _octaves(by_size: Tensor) -> Tensor:
    every = by_size.view(-1, PER_OCTAVE).sum(dim=1)  # [255]: exponents -127 to 127
    low, high = octaves.LOWEST + _BIAS, octaves.HIGHEST + _BIAS
    middle = every[low + 1 : high]
    return torch.cat([every[: low + 1].sum().view(1), middle, every[high:].sum().view(1)])
