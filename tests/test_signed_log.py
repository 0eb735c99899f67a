"""The signed sketch against counting one number at a time in float64."""

from __future__ import annotations

import math
import secrets

import numpy as np
import pytest
import torch
from toy import Toy, toy_batch, toy_reader

from gradscope.figures import figures
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.metrics import octaves, signed_log
from gradscope.quantities.sketch import QUANTILES
from gradscope.runlog import Run, RunLog

TINY = 2.0**-149


def numbers(size: int = 4000, decades: float = 8.0) -> torch.Tensor:
    """Both signs over some forty decades, with zeros of both signs, subnormals and what is not finite."""
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    x = torch.randn(size, generator=generator) * 10 ** (torch.randn(size, generator=generator) * decades - 8).clamp(-38, 30)
    special = [0.0, -0.0, 0.0, TINY, -TINY, 1e-40, -1e-40, 1.0, -1.0, 2.0**-96, 2.0**17, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
    return torch.cat([x, torch.tensor(special)])[torch.randperm(size + len(special), generator=generator)]


def slow_place(value: float) -> int:
    """The bin of one finite non-zero number among those of its sign, by arithmetic."""
    size = abs(value)
    mantissa, exponent = math.frexp(size)  # size = mantissa * 2^exponent, mantissa in [0.5, 1)
    if exponent - 1 < -126:
        return int(size / 2.0**-129)
    return (exponent - 1 + 127) * 8 + int((2 * mantissa - 1) * 8)


def slow_sketch(values: torch.Tensor) -> np.ndarray:
    counts = np.zeros(signed_log.SIZE, dtype=np.int64)
    for value in values.double().tolist():
        if value == 0:
            counts[signed_log.ZEROS] += 1
        elif math.isfinite(value):
            counts[slow_place(value) + (0 if value < 0 else signed_log.SIGN)] += 1
    return counts


def finite_part(counts: torch.Tensor) -> np.ndarray:
    kept = counts.numpy().copy()
    for start in (0, signed_log.SIGN):
        kept[start + signed_log.FINITE : start + signed_log.SIGN] = 0
    return kept


def test_every_number_is_counted_once_in_the_bin_that_arithmetic_says():
    x = numbers()
    counts = signed_log.sketch([x[:1000].reshape(10, 100), None, x[1000:]])
    assert counts.dtype == torch.int64
    assert counts.sum() == x.numel()
    np.testing.assert_array_equal(finite_part(counts), slow_sketch(x))
    assert signed_log.nonfinite(counts) == (~x.isfinite()).sum() == 3
    assert signed_log.zeros(counts) == (x.double() == 0).sum()
    assert signed_log.positive(counts) == (x[x.isfinite()].double() > 0).sum()


def test_flushing_denormals_does_not_turn_them_into_zeros():
    x = torch.tensor([1e-40, -1e-40, 0.0, -0.0, 1.0])
    before = signed_log.sketch([x])
    torch.set_flush_denormal(True)
    try:
        flushed = signed_log.sketch([x])
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(before, flushed)
    assert signed_log.zeros(before) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_counted_as_they_are(dtype: torch.dtype):
    x = numbers(decades=2.0).to(dtype)
    counts = signed_log.sketch([x])
    assert counts.sum() == x.numel()
    np.testing.assert_array_equal(finite_part(counts), slow_sketch(x))


def test_float64_beyond_fp32_lands_in_the_end_bins():
    counts = signed_log.sketch([torch.tensor([1e-300, -1e-300, 1e300, -1e300, 0.0, math.inf], dtype=torch.float64)])
    assert [int(counts[i]) for i in (0, signed_log.SIGN, signed_log.FINITE - 1, signed_log.SIGN + signed_log.FINITE - 1)] == [1] * 4
    assert signed_log.zeros(counts) == signed_log.nonfinite(counts) == 1


def test_sketches_merge_by_addition_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch):
    x = numbers(20_000)
    whole = signed_log.sketch([x])
    monkeypatch.setattr(signed_log, "_CHUNK", 777)
    parts = sum(signed_log.sketch([part]) for part in x.split(3001))
    assert torch.equal(whole, parts)
    assert torch.equal(whole, signed_log.sketch([x.view(-1, 2).t()])), "a tensor that is not contiguous"


@pytest.mark.parametrize("size", [1, 2, 17, 3000])
def test_quantiles_keep_their_error_bound(size: int):
    x = numbers(size)
    x = x[(x != 0) & x.isfinite() & (x.abs() >= torch.finfo(torch.float32).tiny)]
    shares = (0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0)
    found = signed_log.quantiles(signed_log.sketch([x]), shares)
    ordered = np.sort(x.abs().double().numpy())
    for share, value in zip(shares, found.tolist(), strict=True):
        true = ordered[max(1, math.ceil(share * len(ordered))) - 1]
        assert abs(value / true - 1) <= signed_log.RELATIVE_ERROR * (1 + 1e-12)


def test_nothing_to_count_has_no_quantile():
    for x in (torch.zeros(5), torch.empty(0), torch.full((3,), math.nan)):
        assert signed_log.quantiles(signed_log.sketch([x]), (0.5,)).isnan().all()
    assert signed_log.sketch([None], torch.device("cpu")).sum() == 0


def test_the_picture_counts_octaves_and_keeps_what_lies_beyond():
    x = numbers()
    negative, zero, positive = octaves.split(signed_log.picture(signed_log.sketch([x])).tolist())
    finite = x[x.isfinite()].double().numpy()
    for counts, side in ((negative, -finite[finite < 0]), (positive, finite[finite > 0])):
        expected = np.zeros(octaves.OCTAVES)
        for size in side:
            expected[min(max(math.frexp(size)[1] - 1, octaves.LOWEST), octaves.HIGHEST) - octaves.LOWEST] += 1
        np.testing.assert_array_equal(counts, expected)
    assert zero == (finite == 0).sum()
    assert len(octaves.edges()) == octaves.LENGTH + 1
    assert (np.diff(octaves.edges()) > 0).all()
    with pytest.raises(ValueError, match="227 counts; got 3"):
        octaves.split([1, 2, 3])


# ---- the quantity and its figure


def test_the_quantity_reads_the_averaged_gradient_by_tower():
    encoder, batch = Toy(seed=secrets.randbits(31)), toy_batch(6, secrets.randbits(31))
    values, expected = step_readings(encoder, batch)
    for tower, gradient in expected.items():
        sizes = np.sort(np.abs(gradient[gradient != 0]))
        assert values[f"zero.{tower}"] == pytest.approx((gradient == 0).mean())
        assert values[f"positive.{tower}"] == pytest.approx((gradient > 0).sum() / len(sizes))
        assert values[f"nonfinite.{tower}"] == 0
        for name, share in QUANTILES.items():
            true = math.log10(sizes[math.ceil(share * len(sizes)) - 1])
            assert values[f"log10_{name}.{tower}"] == pytest.approx(true, abs=0.026)
        assert sum(values[f"counts.{tower}"]) == gradient.size
        assert values[f"counts.{tower}"][octaves.ZERO] == (gradient == 0).sum()
    assert (expected["text"] == 0).any(), "unreached rows of the token embedding are exact zeros"


def test_a_loss_scale_is_taken_out():
    encoder, batch = Toy(seed=1), toy_batch(6, 1)
    plain, _ = step_readings(encoder, batch)
    scaled, _ = step_readings(encoder, batch, factor=1024.0)
    assert plain == scaled


def test_nan_gradients_are_counted():
    encoder, batch = Toy(seed=1), toy_batch(6, 1)
    values, _ = step_readings(encoder, batch, factor=math.nan)
    assert values["nonfinite.image"] == encoder.visual.proj.numel()
    assert math.isnan(values["log10_q50.image"])


def step_readings(encoder: Toy, batch, factor: float = 1.0):
    """The sketch of one backward whose gradient is multiplied by ``factor`` and told so; and the plain gradients by tower."""
    reader = toy_reader(encoder)
    reader.begin(1, 0)
    encoder.zero_grad(set_to_none=True)
    embeddings = encoder.embed(batch)
    terms = Clip(objective=reader.heads.objectives["infonce"])(embeddings)
    with reader.watching(batch, embeddings, terms):
        total_loss(terms).backward()
    expected = {
        "image": encoder.visual.proj.grad.double().flatten().numpy(),
        "text": torch.cat([encoder.token_embedding.weight.grad.flatten(), encoder.text_projection.grad.flatten()]).double().numpy(),
    }
    expected = {name: gradient.copy() for name, gradient in expected.items()}
    for parameter in encoder.parameters():
        parameter.grad *= factor
    reader.accumulated([], unscale=1.0 / factor)
    rows = {row["key"]: row["value"] for row in reader.flush() if row["quantity"] == "sketch"}
    return rows, expected


def test_the_figure_draws_what_was_logged(tmp_path):
    log = RunLog.create(tmp_path / "run", recipe_toml="[train]\n", provenance={})
    drawn = {}
    with log:
        for step in (1, 6, 11):
            gradient = torch.randn(500) * 10.0**-step
            gradient[:100] = 0
            counts = signed_log.picture(signed_log.sketch([gradient])).double().tolist()
            drawn[step] = counts
            rows = [
                {
                    "step": step,
                    "quantity": "sketch",
                    "term": "total",
                    "key": f"counts.{t}",
                    "value": counts,
                    "unit": "entries",
                    "stamps": "",
                }
                for t in ("image", "text")
            ]
            log.write_readings(rows)
            log.write_steps([{"step": step, "samples": step, "epoch": 1, "loss": 1.0}])
    figure, frame = figures["sketch"](Run(tmp_path / "run"))
    for axes in figure.axes[:4]:
        assert axes.get_xlim()[0] == 0.5, "nothing before the first step"
        assert all(tick == round(tick) for tick in axes.get_xticks()), "whole steps"
    image = frame[frame["tower"] == "image"]
    for step, counts in drawn.items():
        rows = image[image["step"] == step]
        assert rows["entries"].sum() == sum(counts) == 500
        assert rows[rows["sign"] == 0]["entries"].tolist() == [100]
        for sign in (-1, 1):
            side = octaves.split(counts)[0 if sign < 0 else 2]
            found = dict(zip(rows[rows["sign"] == sign]["octave"], rows[rows["sign"] == sign]["entries"], strict=True))
            assert found == {octaves.LOWEST + i: n for i, n in enumerate(side) if n}


def test_the_figure_names_the_setting_that_would_record_it(tmp_path):
    RunLog.create(tmp_path / "run", recipe_toml="[train]\n", provenance={}).close()
    with pytest.raises(ValueError, match="--log-grads"):
        figures["sketch"](Run(tmp_path / "run"))
