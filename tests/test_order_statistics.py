"""Order statistics against a sort, on numbers of both signs and many sizes; sums by bin against a loop."""

from __future__ import annotations

import math
import secrets

import pytest
import torch

from gradscope.metrics import counting
from gradscope.metrics.counting import sums_of
from gradscope.metrics.order_statistics import nan_median, order_statistics, quantile


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("size", [1, 2, 1000, 200_000])
def test_equal_to_a_sort(size: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        monkeypatch.setattr(counting, "waits_for_nothing", lambda tensor: False)  # the path of a GPU
    values = torch.randn(size) * torch.exp(torch.randint(-80, 80, (size,)).float())
    values[: size // 3] = values[size // 3 : 2 * (size // 3)]  # ties
    values[size // 2] = 0.0
    ranks = sorted({0, size // 2, size // 3, size - 1, *torch.randint(0, size, (4,)).tolist()})
    assert torch.equal(order_statistics(values, ranks), values.sort().values[ranks])


def test_close_numbers_infinities_and_nan() -> None:
    values = 0.5 + torch.arange(70_000) * 2.0**-24  # neighbours in fp32
    values = torch.cat([values, torch.tensor([math.inf, -math.inf, -0.25])])[torch.randperm(70_003)]
    ordered = values.sort().values
    ranks = [0, 1, 2, 3, 35_000, 70_001, 70_002]
    assert torch.equal(order_statistics(values, ranks), ordered[ranks])
    values[5] = math.nan
    assert math.isnan(float(order_statistics(values, [70_002])[0]))
    assert float(order_statistics(values, [0])[0]) <= -0.25


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_nan_of_either_sign_is_the_largest(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        monkeypatch.setattr(counting, "waits_for_nothing", lambda tensor: False)
    values = torch.rand(70_000)
    values[:2] = torch.copysign(torch.tensor(math.nan), torch.tensor([1.0, -1.0]))  # inf - inf is the second on many processors
    lowest, *highest = order_statistics(values, [0, 69_998, 69_999]).tolist()
    assert lowest == float(values[2:].min())
    assert all(map(math.isnan, highest))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_sums_by_bin(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        monkeypatch.setattr(counting, "waits_for_nothing", lambda tensor: False)
    places, weights = torch.randint(0, 9, (300,), dtype=torch.uint8), torch.rand(300, dtype=torch.float64)
    slow = [sum(float(w) for p, w in zip(places, weights, strict=True) if p == k) for k in range(12)]
    assert sums_of(places, weights, 12).tolist() == pytest.approx(slow, abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 7, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_are_torchs(size: int, dtype: torch.dtype) -> None:
    values = torch.randn(50, size, dtype=dtype, generator=torch.Generator().manual_seed(secrets.randbits(32)))
    holes = values.masked_fill(values > 0.5, math.nan)
    close = 400 * torch.finfo(dtype).eps  # numbers at most 10 apart, and a place that is rounded to 15 * eps
    torch.testing.assert_close(nan_median(holes), holes.nanquantile(0.5, dim=1), rtol=0, atol=close, equal_nan=True)
    for row in (*values, *holes):
        for q in (0.0, 0.1, 0.5, 0.9, 1.0):
            torch.testing.assert_close(quantile(row, q), row.quantile(q), rtol=0, atol=close, equal_nan=True)
