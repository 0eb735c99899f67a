"""Products checked against float64, with settings that only pretend to be fp32."""

from __future__ import annotations

import secrets

import pytest
import torch

from gradscope import products
from gradscope.products import LARGEST_ERROR, choose, fast_fp32

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean():
    """Trials are made anew, and whatever a test did to torch's settings is undone."""
    products._trial.cache_clear()
    yield
    products._trial.cache_clear()
    torch.set_float32_matmul_precision("highest")


def unit(n: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    return torch.nn.functional.normalize(torch.randn(n, width, generator=generator), dim=1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 300, 33), (512, 1024, 256)])
def test_products_inside_are_fp32(shape):
    a, b = unit(shape[0], shape[2]), unit(shape[1], shape[2])
    with fast_fp32(CPU, shape) as found:
        assert (a @ b.T - a.double() @ b.double().T).abs().max() <= LARGEST_ERROR
        assert torch.get_float32_matmul_precision() == found.setting
    assert found.exact
    assert "fp32" in found.words


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_the_setting_comes_back_also_after_an_error(before):
    torch.set_float32_matmul_precision(before)
    with pytest.raises(ZeroDivisionError), fast_fp32(CPU, (8, 8, 8)):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_settings_made_through_the_newer_interface_come_back():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    with fast_fp32(CPU, (8, 8, 8)):
        torch.get_float32_matmul_precision()
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


def rounding(bits: int, settings: tuple[str, ...]):
    """A trial whose products are rounded to ``bits`` of the mantissa, as TF32 (10) and bf16 (7) do, under some settings."""

    def trial(setting, device, shape):
        a, b = unit(shape[0], shape[2]), unit(shape[1], shape[2])
        exact = a.double() @ b.double().T
        if setting in settings:
            a, b = ((x * 2**bits / x.abs().log2().floor().exp2()).round() * x.abs().log2().floor().exp2() / 2**bits for x in (a, b))
        return float((a @ b.T - exact).abs().max())

    return trial


@pytest.mark.parametrize("bits", [7, 10])
def test_a_faster_setting_that_rounds_is_not_used(monkeypatch, bits):
    monkeypatch.setattr(products, "_trial", rounding(bits, ("medium",)))
    found = choose(CPU, (64, 64, 512))
    assert (found.setting, found.words, found.exact) == ("highest", "torch fp32 products", True)


def test_where_nothing_is_fp32_it_says_so(monkeypatch):
    monkeypatch.setattr(products, "_trial", rounding(7, ("medium", "highest")))
    found = choose(CPU, (64, 64, 512))
    assert not found.exact
    assert "NOT fp32" in found.words


def test_autocast_is_off_inside_and_on_again_after():
    a = unit(64, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with fast_fp32(CPU, (64, 64, 32)):
            assert (a @ a.T).dtype == torch.float32
        assert (a @ a.T).dtype == torch.bfloat16


def test_a_trial_is_made_once():
    choose(CPU, (16, 16, 16), (24, 16, 16))
    misses = products._trial.cache_info().misses
    choose(CPU, (16, 16, 16), (24, 16, 16))
    assert products._trial.cache_info().misses == misses
