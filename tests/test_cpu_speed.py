"""The faster CPU kernels are fp32, and the old settings come back."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import nn

from gradscope.cpu_speed import cpu_speed
from gradscope.products import LARGEST_ERROR


@pytest.mark.parametrize("tokens", [20, 5000])
def test_products_inside_are_fp32_and_the_setting_comes_back(tokens: int) -> None:
    before = torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    with cpu_speed(torch.device("cpu"), tokens) as words:
        assert ("plain attention" in words) == (tokens == 20)
        for shape in ((16, 16, 128), (300, 200, 64), (1024, 1024, 256)):
            a, b = (torch.nn.functional.normalize(torch.randn(n, shape[2], generator=generator), dim=1) for n in shape[:2])
            assert (a @ b.T - a.double() @ b.double().T).abs().max() <= LARGEST_ERROR
    assert torch.get_float32_matmul_precision() == before


def test_other_devices_are_left_alone() -> None:
    before = torch.get_float32_matmul_precision()
    with cpu_speed(torch.device("meta"), 20) as words:
        assert words == f"torch {before}"
        assert torch.get_float32_matmul_precision() == before


def test_autocast_inside_sees_weights_that_changed():
    """Autocast keeps the weights it has cast until the outermost one ends; none may be left open around a training loop."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with cpu_speed(torch.device("cpu"), 16):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                found = layer(x)
            expected = x.bfloat16() @ layer.weight.bfloat16().T + layer.bias.bfloat16()
            assert torch.allclose(found, expected, atol=0.05)
            with torch.no_grad():
                layer.weight.add_(1.0)
