"""Norms, cosines and zero counts against exact rational sums and float64; crossings of hand-made traces."""

from __future__ import annotations

import math
import secrets
from fractions import Fraction

import pytest
import torch

from gradscope.metrics import counting
from gradscope.metrics.crossing import crossing
from gradscope.metrics.gradients import (
    PIECE,
    change_and_size,
    cosine,
    max_abs,
    naive_norm,
    norm_over_ranks,
    pieces,
    plain_squares,
    present,
    squared_parts,
    statistics,
    true_norm,
    zero_counts,
)

SHAPES = [(7, 5), (11,), (), (3, 2, 4)]


def gradient(seed: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [(t * size).to(dtype) for t in tensors]


def fractions(tensors) -> list[Fraction]:
    return [Fraction(value) for t in present(tensors) for value in t.double().flatten().tolist()]


def exact_sum(first, second) -> Fraction:
    return sum((a * b for a, b in zip(fractions(first), fractions(second), strict=True)), Fraction(0))


def root(value: Fraction) -> float:
    """Square root without ever leaving the range of a double."""
    return math.isqrt(int(value * 10**400)) / 10**200 if value < 1 else math.sqrt(value)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-12, 1e-20, 1e-30, 1e-37, 1e18])
def test_true_norm_is_exact_over_all_sizes(size):
    seed = secrets.randbits(32)
    tensors = gradient(seed, size)
    assert float(true_norm(tensors)) == pytest.approx(root(exact_sum(tensors, tensors)), rel=1e-6), seed


def test_true_norm_of_mixed_sizes():
    """Entries from 1e-38 to 1 in one gradient: 1e-6 of the exact sum, which the largest dominate."""
    seed = secrets.randbits(32)
    tensors = [t for size in (1.0, 1e-8, 1e-19, 1e-30, 1e-38) for t in gradient(seed, size)]
    assert float(true_norm(tensors)) == pytest.approx(root(exact_sum(tensors, tensors)), rel=1e-6), seed


def test_the_naive_norm_underflows_where_the_true_one_does_not():
    tensors = [torch.full((4, 4), 1e-30), None, torch.zeros(3)]
    assert float(naive_norm(tensors)) == 0.0
    assert float(true_norm(tensors)) == pytest.approx(4e-30, rel=1e-6)
    assert float(true_norm([torch.full((9,), 1e-45)])) == pytest.approx(3 * float(torch.tensor(1e-45)), rel=1e-6)


def test_naive_norm_is_the_fp32_sum_of_squares():
    seed = secrets.randbits(32)
    tensors = gradient(seed)
    expected = math.sqrt(sum(float((t.float() ** 2).sum()) for t in tensors))
    assert float(naive_norm(tensors)) == pytest.approx(expected, rel=1e-6), seed
    assert naive_norm(tensors).dtype == torch.float32


def test_zero_nan_and_absent():
    zero = [torch.zeros(3, 2), None, torch.zeros(())]
    assert float(true_norm(zero)) == float(naive_norm(zero)) == float(max_abs(zero)) == 0.0
    assert zero_counts(zero).tolist() == [6, 0, 1]
    assert math.isnan(float(cosine(zero, zero)))
    bad = [torch.tensor([1.0, math.nan, 0.0]), None, torch.tensor([0.0, -0.0])]
    assert math.isnan(float(true_norm(bad)))
    assert math.isnan(float(max_abs(bad)))
    assert zero_counts(bad).tolist() == [1, 0, 2]
    infinite = [torch.tensor([1.0, math.inf])]
    assert not math.isfinite(float(true_norm(infinite)))


def test_parts_add_up_and_absent_ones_are_zero():
    seed = secrets.randbits(32)
    tensors = gradient(seed, 1e-25)
    tensors.insert(1, None)
    unit = max_abs(tensors)
    parts = squared_parts(tensors, unit)
    assert parts.dtype == torch.float64
    assert parts.shape == (5,)
    assert float(parts[1]) == 0.0
    for tensor, part in zip(tensors, parts, strict=True):
        if tensor is not None:
            expected = float((tensor.double() / unit.double()).pow(2).sum())
            assert float(part) == pytest.approx(expected, rel=1e-6), seed


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float64)])
def test_squares_are_in_units_whatever_the_kinds_and_pieces(dtypes):
    """Of mixed kinds, several pieces, nothing, an empty shard; the twin is float64 entry by entry."""
    tensors = [torch.randn(PIECE + 5).to(dtypes[0]), None, torch.randn(3, 4).to(dtypes[1]), torch.zeros(0, dtype=dtypes[0])]
    unit = torch.rand(()) * 1e-3 + 1e-6
    expected = [0.0 if t is None else float((t.double() / unit.double()).square().sum()) for t in tensors]
    assert squared_parts(tensors, unit).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-30, 1.0), (1e-36, 1e-36), (1e15, 1e-20)])
def test_cosine_is_exact_over_all_sizes(sizes):
    seed = secrets.randbits(32)
    first, second = gradient(seed, sizes[0]), gradient(seed + 1, sizes[1])
    dot, a, b = exact_sum(first, second), exact_sum(first, first), exact_sum(second, second)
    expected = float(dot / a) * math.sqrt(float(a / b))
    assert float(cosine(first, second)) == pytest.approx(expected, abs=1e-6), seed
    assert float(cosine(first, first)) == pytest.approx(1.0, abs=1e-7)
    assert float(cosine(first, [-t for t in first])) == pytest.approx(-1.0, abs=1e-7)


def test_cosine_counts_a_tensor_absent_on_one_side_as_zero_there():
    seed = secrets.randbits(32)
    first, second = gradient(seed), gradient(seed + 1)
    filled = [second[0], torch.zeros_like(second[1]), *second[2:]]
    assert float(cosine(first, [second[0], None, *second[2:]])) == pytest.approx(float(cosine(first, filled)), abs=1e-12), seed


def test_zero_counts_equal_a_count():
    seed = secrets.randbits(32)
    tensors = [torch.where(torch.rand_like(t) < 0.4, 0.0, t) for t in gradient(seed, 1e-44)]
    assert zero_counts(tensors).tolist() == [sum(v == 0 for v in t.flatten().tolist()) for t in tensors]


# ---- pieces, shared statistics, counts


def wide(seed: int) -> list[torch.Tensor]:
    """More than one piece, a piece and one entry, rows out of order in memory, an empty shard."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).float()  # noqa: E731
    return [draw(3, PIECE // 2), draw(PIECE + 1) * 1e-25, draw(40, 7).T, torch.zeros(0, 5)]


def test_pieces_hold_every_entry_once():
    for tensor in wide(secrets.randbits(32)):
        found = torch.cat(pieces(tensor))
        assert torch.equal(found, tensor.flatten())
        assert all(piece.numel() <= PIECE for piece in pieces(tensor))


def test_statistics_of_wide_tensors_equal_float64():
    seed = secrets.randbits(32)
    tensors = wide(seed)
    flat = torch.cat([t.double().flatten() for t in tensors])
    found = statistics(tensors, {})
    assert float(true_norm(tensors)) == pytest.approx(float(flat.norm()), rel=1e-12), seed
    assert float(found.norm) == float(norm_over_ranks(tensors, False, {})) == float(true_norm(tensors))
    assert float(found.largest) == float(flat.abs().max())
    assert found.zeros.tolist() == [int((t == 0).sum()) for t in tensors]
    factor = torch.tensor(2.0)
    sums, counts = plain_squares(tensors, factor)
    squares = [(t * 2) ** 2 for t in tensors]
    assert sums.tolist() == pytest.approx([float(q.double().sum()) for q in squares], rel=1e-5)
    assert counts.tolist() == [int((q != 0).sum()) for q in squares]
    assert counts[1] == 0, "the squares of 1e-25 are not there"
    moved = [t + 1e-3 * torch.randn_like(t) for t in tensors]
    gap = torch.cat([(a - b).double().flatten() for a, b in zip(moved, tensors, strict=True)])
    change, size = change_and_size(moved, tensors)
    assert float(change) == pytest.approx(float(gap.norm()), rel=1e-6)
    assert float(size) == pytest.approx(float(torch.cat([t.double().flatten() for t in tensors]).norm()), rel=1e-6)


def test_statistics_are_formed_anew_where_a_tensor_was_written_to():
    memo: dict = {}
    tensors = [torch.ones(4), None, torch.zeros(2)]
    first = statistics(tensors, memo)
    assert statistics(list(tensors), memo) is first
    torch._foreach_mul_([tensors[0]], 3.0)
    second = statistics(tensors, memo)
    assert second is not first
    assert float(second.norm) == 6.0
    assert statistics([tensors[2], None, tensors[0]], memo) is not second


def test_float64_entries_beyond_the_squares_of_float64():
    tensors = [torch.full((3,), 1e-200, dtype=torch.float64), torch.full((6,), 1e-200, dtype=torch.float64)]
    assert float(true_norm(tensors)) == pytest.approx(3e-200, rel=1e-12)
    assert float(cosine(tensors, tensors)) == pytest.approx(1.0, rel=1e-12)


def test_counts_are_the_same_on_both_ways(monkeypatch):
    places = torch.randint(0, 37, (10_000,), dtype=torch.int32)
    short = counting.counts_of(places, 40)
    monkeypatch.setattr(counting, "waits_for_nothing", lambda tensor: False)
    assert torch.equal(short, counting.counts_of(places, 40))
    assert short.tolist() == [places.tolist().count(k) for k in range(40)]


# ---- crossings


def trace(*values: float) -> list[float]:
    return [math.log10(v) if v > 0 else -math.inf for v in values]


def test_first_crossing():
    found = crossing([1, 6, 11, 16], trace(1.0, 2e-3, 9e-4, 1e-4), 1e-3)
    assert (found.first, found.entries, found.share, found.on) == (11, 1, 0.5, True)


def test_a_wobble_is_one_crossing():
    """Up to three times the threshold it stays on; above, it is off and may enter again."""
    values = trace(9e-4, 1.1e-3, 9e-4, 2.9e-3, 9e-4)
    assert crossing(range(1, 6), values, 1e-3).entries == 1
    values = trace(9e-4, 3.1e-3, 2e-3, 9e-4, 5e-4)
    found = crossing(range(1, 6), values, 1e-3)
    assert (found.first, found.entries, found.share, found.on) == (1, 2, 0.6, True)


def test_the_threshold_itself_is_not_under_it():
    assert crossing([1], [math.log10(1e-3)], 1e-3).first is None


def test_never_left_nan_zero_and_empty():
    assert crossing([1, 2], trace(1.0, 1.0), 1e-3).first is None
    assert not crossing([1, 2], trace(1e-4, 1.0), 1e-3).on
    found = crossing([1, 2, 3], [math.nan, -math.inf, math.nan], 1e-5)
    assert (found.first, found.entries, found.on) == (2, 1, True)
    assert found.share == pytest.approx(2 / 3)
    empty = crossing([], [], 1e-3)
    assert empty.first is None
    assert math.isnan(empty.share)
    with pytest.raises(ValueError):
        crossing([1, 2], [0.0], 1e-3)


def test_crossing_equals_a_slow_twin():
    seed = secrets.randbits(32)
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(300, generator=generator).double().cumsum(0) * 0.4 - 3).tolist()
    states = [False]
    for value in values:
        states.append(10**value <= 3e-3 if states[-1] else 10**value < 1e-3)
    entries = [i for i in range(1, 301) if states[i] and not states[i - 1]]
    found = crossing(range(1, 301), values, 1e-3)
    assert found.first == (entries[0] if entries else None), seed
    assert found.entries == len(entries), seed
    assert found.share == pytest.approx(sum(states[1:]) / 300), seed
