"""The loss path against the user's own code, a float64 closed form and plain counting; facts about fp32 and fp16 that it rests on."""

from __future__ import annotations

import math
import secrets
from dataclasses import asdict

import numpy as np
import open_clip
import pytest
import torch
from torch.nn import functional as F

from gradscope.metrics.gradients import naive_norm
from gradscope.metrics.loss_path import (
    ORDERS,
    PRECISIONS,
    LossPath,
    PairLoss,
    exact_pass,
    flushes_denormals,
    lost_pulls,
    measure,
    one_pass,
    pair_loss,
    relative_error,
    row_sum_violation,
)
from gradscope.objectives.dcl import DCL
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.scores import plain_rows, residual_rows
from gradscope.objectives.siglip import SigLIP
from gradscope.precision_audit import made_pairs

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(n: int = 9, dim: int = 16, seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(secrets.randbits(32) if seed is None else seed)
    text = torch.randn(n, dim, generator=generator)
    image = text + 0.7 * torch.randn(n, dim, generator=generator)
    return F.normalize(image, dim=1), F.normalize(text, dim=1)


def path(objective: object = None, **settings: str) -> PairLoss:
    return pair_loss(objective or InfoNCE(), **settings)  # type: ignore[arg-type]


def twin(image: torch.Tensor, text: torch.Tensor, scale: float, gamma: float) -> dict[str, float]:
    """Loss, residual and gradient of HN in numpy, entry by entry; the negatives are summed, nothing is subtracted from 1."""
    v, t = image.double().numpy(), text.double().numpy()
    n = len(v)
    margin = gamma * (t @ t.T)
    np.fill_diagonal(margin, 0.0)
    logits = scale * (v @ t.T + margin)
    losses, residuals, gradient = [], [], np.zeros((n, n))
    for side, matrix in (("i2t", logits), ("t2i", logits.T)):
        for i in range(n):
            others = [math.exp(matrix[i, j] - matrix[i, i]) for j in range(n) if j != i]
            push = math.fsum(others)
            losses.append(math.log1p(push))
            residuals.append(push / (1 + push))
            for j in range(n):
                cell = -residuals[-1] if j == i else math.exp(matrix[i, j] - matrix[i, i]) / (1 + push)
                gradient[(i, j) if side == "i2t" else (j, i)] += cell / (2 * n)
    norm = math.sqrt(((scale * gradient @ t) ** 2).sum() + ((scale * gradient.T @ v) ** 2).sum())
    return {"loss": np.mean(losses), "residual": np.mean(residuals), "gradient_norm": norm}


@pytest.mark.parametrize("scale", [3.0, 40.0, 100.0])
@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_exact_pass_is_the_closed_form(scale: float, gamma: float) -> None:
    image, text = rows()
    found = measure(image, text, scale, path(HN(gamma=gamma), form="residual"), precision="fp64")
    for key, value in twin(image, text, scale, gamma).items():
        assert getattr(found, key) == pytest.approx(value, rel=1e-8, abs=1e-15), key
    assert found.log10_loss_true == pytest.approx(math.log10(twin(image, text, scale, gamma)["loss"]), abs=1e-9)
    assert (found.zero_share, found.pull_lost, found.non_finite, found.logit_rounding) == (0, 0, 0, 0)


def users_code(
    image: torch.Tensor, text: torch.Tensor, scale: float, precision: str, loss_scale: float, order: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a training loop with autocast and a loss scale does; with two products, open_clip's own loss."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    wide = torch.float64 if precision == "fp64" else torch.float32
    v, t = (x.to(wide).clone().requires_grad_() for x in (image, text))
    s = torch.tensor(scale, dtype=wide)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        if order == "two products":
            loss = open_clip.ClipLoss()(v, t, s)
        else:
            logits = (s * v) @ t.T if order == "scale first" else s * (v @ t.T)
            target = torch.arange(len(v))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    (loss * loss_scale).backward()
    return loss.detach(), [v.grad, t.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
def test_each_precision_is_what_a_training_loop_gets(order: str, precision: str, loss_scale: float) -> None:
    image, text = made_pairs(0.4, pairs=16, dim=64, seed=secrets.randbits(32))
    found = measure(image, text, 60.0, path(order=order), precision=precision, loss_scale=loss_scale)
    loss, gradients = users_code(image, text, 60.0, precision, loss_scale, order)
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    flat = torch.cat([g.flatten() for g in gradients])
    assert found.zero_share == pytest.approx(float((flat == 0).double().mean()), abs=1e-3)
    assert found.non_finite == pytest.approx(float((~flat.isfinite()).double().mean()))
    if not found.non_finite:  # 65536 overflows fp16 where the loss is not small
        assert found.gradient_norm == pytest.approx(float(flat.double().norm()) / loss_scale, rel=1e-3, abs=1e-12)
    assert (found.precision, found.loss_scale) == (precision, loss_scale)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_errors_are_those_of_the_tensors(precision: str) -> None:
    image, text = rows(12, 24)
    objective = path(HN(gamma=0.3))
    truth, made = exact_pass(image, text, 50.0, objective), one_pass(image, text, 50.0, objective, precision=precision)
    found = measure(image, text, 50.0, objective, precision=precision, exact=truth)
    a = torch.cat([g.double().flatten() for g in made.gradient])
    b = torch.cat([g.flatten() for g in truth.gradient])
    assert found.gradient_error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-9)
    # in one draw of twenty every gradient is below fp16's smallest number: then there is no direction
    assert found.direction == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-9, nan_ok=True)
    assert found.logit_rounding == pytest.approx(float((made.logits.double() - truth.logits).abs().max()))
    assert found.zero_rows == pytest.approx(float((torch.cat(made.gradient) == 0).all(dim=1).double().mean()))
    assert made.logits.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert all(g.dtype == torch.float32 for g in made.gradient)


def test_a_gradient_that_fp16_flushes_to_zero_has_no_direction() -> None:
    image, text = rows(12, 24)
    found = measure(image, text, 10.0, path(HN(gamma=0.3)), precision="fp16", loss_scale=1e-8)
    assert (found.zero_share, found.gradient_norm) == (1.0, 0.0)
    assert found.gradient_error == pytest.approx(1.0)
    assert math.isnan(found.direction)


def test_lost_pulls_and_row_sums_by_plain_loops() -> None:
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    for _ in range(20):
        g = torch.randn(5, 5, generator=generator) * (torch.rand(5, 5, generator=generator) < 0.4)
        slow = [float(g[i, i]) == 0 and any(float(x) != 0 for x in [*g[i], *g[:, i]]) for i in range(5)]
        assert lost_pulls(g).tolist() == slow
        for i, found in enumerate(row_sum_violation(g).tolist()):
            size = sum(abs(float(x)) for x in g[i])
            assert found == pytest.approx(abs(sum(float(x) for x in g[i])) / size if size else 0.0)


def test_relative_error_over_forty_decades() -> None:
    exact = [torch.randn(4, 3, dtype=torch.float64) * 1e-200, torch.randn(5, dtype=torch.float64) * 1e-200]
    assert float(relative_error([1.25 * e for e in exact], exact)) == pytest.approx(0.25)
    assert float(relative_error([0.0 * e for e in exact], exact)) == pytest.approx(1.0)


def test_a_loss_scale_is_exact_in_fp32_rescues_fp16_and_can_be_too_large() -> None:
    image, text = made_pairs(0.3, pairs=16, dim=512, seed=secrets.randbits(32))
    one, many = (measure(image, text, 100.0, path(), precision="fp32", loss_scale=k) for k in (1.0, 65536.0))
    assert one.gradient_norm == pytest.approx(many.gradient_norm, rel=1e-12)
    assert one.gradient_error == pytest.approx(many.gradient_error, rel=1e-9)
    plain, rescued = (measure(image, text, 100.0, path(), precision="fp16", loss_scale=k) for k in (1.0, 65536.0))
    assert rescued.zero_share < plain.zero_share
    far = measure(*rows(), 5.0, path(), precision="fp16", loss_scale=2.0**40)
    assert far.non_finite > 0


def test_the_residual_form_keeps_the_pull_where_cross_entropy_and_a_loss_scale_do_not() -> None:
    """At 0.46 every row is below the floor (it takes a negative at 6.5 deviations to print): a single row above it would carry
    the whole gradient. One hard pair (i, j) then gives 2 t_j - t_i to image i and -t_j to image j, and plain fp32 keeps 2 t_j only:
    an error of sqrt(2 / (6 - 4 c)) and a direction of (2 - c) / sqrt(6 - 4 c) with c = t_i.t_j, which is within 0.3; ties err more.
    """
    image, text = made_pairs(0.46, pairs=64, dim=512, seed=secrets.randbits(32))
    plain, scaled = (measure(image, text, 100.0, path(), precision="fp32", loss_scale=k) for k in (1.0, 65536.0))
    kept = measure(image, text, 100.0, path(form="residual"), precision="fp32")
    assert (plain.pull_lost, scaled.pull_lost) == (1, 1)
    assert plain.gradient_error > 0.5
    assert plain.direction < 0.9
    assert (kept.pull_lost, kept.zero_share) == (0, 0)
    assert kept.gradient_error < 1e-3
    assert kept.row_sum < 1e-5
    assert plain.row_sum > 0.9


def test_other_objectives_pass_too() -> None:
    image, text = rows()
    for objective in (SigLIP(bias=-5.0), DCL()):
        found = measure(image, text, 20.0, path(objective), precision="bf16")
        assert math.isnan(found.row_sum)
        assert 0 <= found.gradient_error < 0.5
        assert found.residual == pytest.approx(
            float(objective.residual(one_pass(image, text, 20.0, path(objective), precision="bf16").logits).mean())
        )
    for wrong in ({"form": "residual"}, {"order": "scale first"}):
        with pytest.raises(ValueError, match="SigLIP has one only"):
            pair_loss(SigLIP(), **wrong)


def test_the_orders_are_one_in_exact_arithmetic() -> None:
    image, text = rows()
    plain, *others = (measure(image, text, 30.0, path(HN(gamma=0.4), order=order), precision="fp64") for order in ORDERS)
    for other in others:
        for key, value in asdict(plain).items():
            assert getattr(other, key) == (value if key == "precision" else pytest.approx(value, rel=1e-6, abs=1e-9)), key


def test_nothing_outside_is_touched() -> None:
    image, text = (x.clone().requires_grad_() for x in rows())
    before, state = image.detach().clone(), torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = measure(image, text, torch.tensor(20.0), path(), precision="fp32")
    outside = measure(image.detach(), text.detach(), 20.0, path(), precision="fp32")
    assert inside == outside
    assert image.grad is None
    assert torch.equal(image, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(outside, LossPath)


def test_nan_stays_nan() -> None:
    image, text = rows()
    image[0, 0] = math.nan
    found = measure(image, text, 20.0, path(), precision="fp32")
    assert math.isnan(found.loss)
    assert math.isnan(found.gradient_norm)
    assert found.non_finite > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp8"}, "unknown precision"),
        ({"loss_scale": 0.0}, "above 0"),
        ({"loss_scale": math.inf}, "above 0"),
        ({"text": torch.zeros(3, 4)}, "one shape"),
        ({"image": torch.zeros(1, 4), "text": torch.zeros(1, 4)}, "at least 2"),
        ({"image": torch.zeros(3, 4).half(), "text": torch.zeros(3, 4).half()}, "fp32 or float64"),
    ],
)
def test_wrong_arguments_are_one_sentence(change: dict, words: str) -> None:
    image, text = rows()
    given = {"image": image, "text": text, "scale": 10.0, "objective": path(), "precision": "fp32", **change}
    with pytest.raises(ValueError, match=words):
        measure(**given)
    for wrong in ({"form": "smooth"}, {"order": "none"}):
        with pytest.raises(ValueError, match="unknown"):
            path(**wrong)


# ---- what fp32 and fp16 do: the facts behind the words of the audit


def softmax_row(shape: tuple[int, int], gap: float, form=plain_rows, factor: float = 1.0) -> tuple[float, float, float, float]:
    """Printed loss, true loss, gradient on the positive and on a negative of rows whose positive leads by ``gap``."""
    n, width = shape
    place = torch.arange(n)
    logits = torch.full(shape, -gap)
    logits[place, place] = 0.0
    leaf = logits.requires_grad_()
    loss = form(leaf) if n == width else F.cross_entropy(leaf, place, reduction="none")
    (loss.mean() * factor).backward()
    return (
        float(loss.detach()[0]),
        math.log1p((width - 1) * math.exp(-gap)),
        float(leaf.grad[0, 0]) / factor,
        float(leaf.grad[0, 1]) / factor,
    )


@pytest.mark.parametrize("width", [4, 16, 64, 256])
@pytest.mark.parametrize("positive", [1.0, 30.0, 100.0])
def test_fp32_cross_entropy_prints_zero_below_a_floor_and_not_above(width: int, positive: float) -> None:
    """The smallest true loss that prints is between 4e-8 and 4e-7, whatever the width and the positive logit."""
    for true, prints in ((4e-8, False), (4e-7, True)):
        gap = math.log((width - 1) / true)
        logits = torch.full((width,), positive - gap)
        logits[0] = positive
        loss = F.cross_entropy(logits[None], torch.tensor([0]))
        rounding = width * positive * 2.0**-24  # of the gap itself
        if rounding < 0.5:
            assert (float(loss) > 0) == prints, (width, positive, float(loss))


@pytest.mark.parametrize("shape", [(1, 8), (2, 8)])
def test_the_pull_is_lost_with_the_printed_loss_and_no_factor_brings_it_back(shape: tuple[int, int]) -> None:
    """Gap 17: the loss is 2.9e-7 and prints 0, the positive's gradient is exactly 0 and the negatives' is not."""
    for factor in (1.0, 65536.0):
        printed, true, pull, push = softmax_row(shape, 17.0, factor=factor)
        assert printed == 0.0
        assert true == pytest.approx(2.9e-7, rel=0.01)
        assert pull == 0.0
        assert push == pytest.approx(math.exp(-17) / shape[0], rel=1e-3)


def test_the_floor_depends_on_the_path() -> None:
    """The same gap in a wider row prints and pulls; at gap 25 the wide one is lost as well, and the residual form is not."""
    printed, true, pull, _ = softmax_row((1, 64), 17.0)
    assert printed == pytest.approx(true, rel=0.1)
    assert pull == pytest.approx(-true, rel=0.1)
    for shape in ((1, 64), (64, 64)):
        printed, true, pull, push = softmax_row(shape, 25.0)
        assert (printed, pull) == (0.0, 0.0)
        assert push > 0
    printed, true, pull, _ = softmax_row((64, 64), 25.0, form=residual_rows)
    assert printed == pytest.approx(true, rel=1e-3)
    assert pull == pytest.approx(-true / 64, rel=1e-3)


def test_a_gradient_can_vanish_inside_an_fp16_layer_while_the_weight_gradient_is_fp32() -> None:
    """1e-9 from above is no fp16 number: the weight's gradient is fp32, and exactly 0. A loss scale repairs this one."""
    layer = torch.nn.Linear(8, 8)
    for factor, zeros in ((1.0, True), (65536.0, False)):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = layer(torch.randn(4, 8))
        out.float().backward(torch.full((4, 8), 1e-9 * factor))
        assert layer.weight.grad.dtype == torch.float32
        assert bool((layer.weight.grad == 0).all()) == zeros


def test_a_naive_norm_underflows_where_the_measured_one_does_not() -> None:
    image, text = made_pairs(0.8, pairs=64, dim=512, seed=secrets.randbits(32))
    found = measure(image, text, 100.0, path(form="residual"), precision="fp32")
    made = one_pass(image, text, 100.0, path(form="residual"), precision="fp32")
    assert found.zero_share == 0
    assert float(naive_norm(made.gradient)) == 0.0
    assert 0 < found.gradient_norm < 1e-22
    assert found.log10_loss_true < -25


def test_flushed_denormals_are_seen() -> None:
    assert not flushes_denormals(torch.device("cpu"))
    if torch.set_flush_denormal(True):
        try:
            assert flushes_denormals(torch.device("cpu"))
            assert int(torch.count_nonzero(torch.tensor([1e-40]) * 1.0)) == 0
        finally:
            torch.set_flush_denormal(False)
