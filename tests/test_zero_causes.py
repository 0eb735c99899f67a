"""Zero accounting: the counts against loops, against constructed cases of known cause, and against torch's own Adam."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from toy import Toy, measured, toy_batch, toy_reader
from typer.testing import CliRunner

from gradscope.cli import app
from gradscope.encoders.load import load_encoder
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.metrics.zero_causes import (
    CAUSES,
    INVISIBLE,
    count_causes,
    dead_entries,
    eps_dominated,
    is_key_bias,
    name_parts,
    rows_as_entries,
    squared_underflow,
    stale,
    zeros_in_rows,
)
from gradscope.objectives.scores import plain_rows, residual_rows
from gradscope.recipe import Data, resolve
from gradscope.runlog import Run
from gradscope.train import train
from gradscope.zeros import Accounting, Tally, account
from gradscope.zeros.counterfactual import Pass, measure, reference
from gradscope.zeros.encoder_batch import account_encoder, tower_of
from gradscope.zeros.words import content, explanation, share

pytestmark = pytest.mark.usefixtures("one_thread")

FROM_GRADIENT = CAUSES[2:]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def zeros(**counts: int) -> dict[str, int]:
    return {**dict.fromkeys(CAUSES, 0), **counts}


# ---- the pure parts


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_first_cause_that_applies_takes_an_entry(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = tuple(generator.integers(1, 6, size=generator.integers(1, 4)))
    zero = generator.random(shape) < 0.7
    names = list(FROM_GRADIENT[:-1])
    masks = {name: None if generator.random() < 0.2 else generator.random(shape) < 0.4 for name in names}
    if masks["structural"] is not None and len(shape) > 1:  # as rows that broadcast
        masks["structural"] = masks["structural"].reshape(shape[0], -1).any(axis=1).reshape(-1, *[1] * (len(shape) - 1))
    slow = dict.fromkeys(FROM_GRADIENT, 0)
    for place in np.ndindex(*shape):
        if not zero[place]:
            continue
        applies = (n for n in names if masks[n] is not None and np.broadcast_to(masks[n], shape)[place])
        slow[next(applies, "unexplained")] += 1
    found = count_causes(torch.tensor(zero), {n: None if m is None else torch.tensor(m) for n, m in masks.items()})
    assert {name: int(count) for name, count in found.items()} == slow
    assert sum(slow.values()) == zero.sum()


@pytest.mark.parametrize("out_dim", [0, 1])
@pytest.mark.parametrize("shape", [(4, 3), (3, 5, 2, 2), (1, 1), (6,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_dead_units_are_whole_rows_with_their_bias_or_whole_columns(shape: tuple[int, ...], out_dim: int, has_bias: bool) -> None:
    if len(shape) == 1 and out_dim:
        return
    generator = np.random.default_rng()
    weight = generator.random(shape) < 0.3
    for dim in range(min(2, len(shape))):  # some whole rows, some whole columns
        weight[(slice(None),) * dim + (generator.random(shape[dim]) < 0.4,)] = True
    bias = generator.random(shape[out_dim]) < 0.6
    want = np.zeros_like(weight)
    for place in np.ndindex(*shape):
        unit = weight.take(place[out_dim], axis=out_dim).all() and (bias[place[out_dim]] or not has_bias)
        column = len(shape) > 1 and weight.take(place[1 - out_dim], axis=1 - out_dim).all()
        want[place] = unit or column
    mask, bias_mask = dead_entries(torch.tensor(weight), torch.tensor(bias) if has_bias else None, out_dim)
    assert mask is not None
    assert mask.tolist() == want.tolist()
    if has_bias:
        assert bias_mask is not None
        assert bias_mask.tolist() == [bool(b and weight.take(i, axis=out_dim).all()) for i, b in enumerate(bias)]
    else:
        assert bias_mask is None
    assert dead_entries(None, torch.tensor(bias))[1].tolist() == bias.tolist()


def test_the_bound_of_squared_underflow_is_exact() -> None:
    bound = 2.0**-75
    above = float(np.nextafter(np.float32(bound), np.float32(1)))
    cases = [0.0, bound, -bound, above, -above, float(np.float32(1e-45)), 1.0, float("nan"), float("inf")]
    assert int(squared_underflow(torch.tensor(cases))) == 3  # +-2^-75 and the denormal
    sizes = torch.tensor(np.exp(np.random.default_rng().uniform(np.log(1e-30), np.log(1e-15), 4000)), dtype=torch.float32)
    assert int(squared_underflow(sizes)) == int((sizes <= bound).sum()) > 0
    half = torch.tensor([2.0**-75, 2.0**-74, 2.0**-133, 0.0], dtype=torch.bfloat16)
    assert int(squared_underflow(half)) == 2
    assert int(squared_underflow(torch.zeros(3))) == 0


def test_small_helpers() -> None:
    gradient = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])
    rows = torch.tensor([True, True, False])
    assert int(zeros_in_rows(gradient, rows)) == 3
    assert rows_as_entries(rows, gradient).shape == (3, 1)
    assert rows_as_entries(gradient > 0, gradient).shape == (3, 2)
    with pytest.raises(ValueError, match=re.escape("[2] fits neither the rows nor the entries of [3, 2]")):
        rows_as_entries(torch.tensor([True, False]), gradient)
    assert name_parts("a.in_proj_weight", 6) == {f"a.in_proj_weight.{p}": slice(2 * i, 2 * i + 2) for i, p in enumerate("qkv")}
    assert name_parts("a.out_proj.weight", 6) == {"a.out_proj.weight": slice(0, 6)}
    assert name_parts("a.qkv.bias", 7) == {"a.qkv.bias": slice(0, 7)}  # no thirds
    keys = ["x.in_proj_bias.k", "blocks.0.attn.qkv.bias.k", "self_attn.k_proj.bias", "attention.self.key.bias"]
    assert all(map(is_key_bias, keys))
    assert not any(map(is_key_bias, ["x.in_proj_bias.q", "x.in_proj_weight.k", "k_proj.weight", "monkey.bias"]))
    gradient, root = torch.tensor([0.0, 1e-10, 1e-10, 1.0]), torch.tensor([0.0, 1e-10, 1e-3, 1.0])
    assert int(eps_dominated(gradient, root, 1e-8)) == 1  # an exact zero is in table A
    assert int(stale(gradient, root)) == 1


def test_tallies_add_up() -> None:
    a = Tally(entries=3, zeros=zeros(frozen=2), invisible={"stale": 1}, key_bias=1)
    b = Tally(entries=5, zeros=zeros(unexplained=4), invisible={"stale": 2, "eps_dominated": 7}, non_finite=1)
    both = a + b
    assert (both.entries, both.zero_entries, both.key_bias, both.non_finite) == (8, 6, 1, 1)
    assert both.zeros == zeros(frozen=2, unexplained=4)
    assert both.invisible == {"stale": 3, "eps_dominated": 7}


# ---- constructed cases, each cause with a known count


class Factors(nn.Module):
    """loss = sum of (w * a) * b, so that the gradient of each entry is (1 * b) * a in the dtype of the pass."""

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        super().__init__()
        first, second = torch.tensor(pairs).T
        self.w = nn.Parameter(torch.ones(len(pairs)))
        self.register_buffer("a", first.clone())
        self.register_buffer("b", second.clone())

    def forward(self) -> Tensor:
        return ((self.w * self.a) * self.b).sum()


def run_alone(run: Pass) -> Tensor:
    with run.autocast():
        return run.model()


ALIVE, NEVER, TOO_SMALL, HOPELESS = (1.0, 1.0), (0.0, 0.0), (1e-30, 1e-20), (1e-44, 1e-44)
#                                     1e-50: zero in fp32, but not under 2^127;      1e-88: zero there too


def test_a_mixture_on_one_tensor_in_fp32() -> None:
    model = Factors([ALIVE, NEVER, NEVER, NEVER, TOO_SMALL, TOO_SMALL, HOPELESS, ALIVE])
    mask = torch.tensor([True, True] + [False] * 6)
    found = account(model, run_alone, structural={"w": mask})
    total = found.total()
    assert found.exponent == 127
    assert found.references == (torch.float64,)
    assert total.zeros == zeros(structural=1, dtype_underflow=3, unexplained=2)
    assert (total.entries, total.zero_entries, total.comes_back, total.contradicted, total.key_bias) == (8, 6, 2, 1, 0)
    assert "1 entries announced as structural have a gradient" in found.notes[0]


def test_without_a_reference_what_a_factor_brings_back_is_saturation() -> None:
    found = account(Factors([ALIVE, NEVER, TOO_SMALL, HOPELESS]), run_alone, references=())
    assert found.total().zeros == zeros(saturation_underflow=1, unexplained=2)
    found = account(Factors([ALIVE, NEVER, TOO_SMALL, HOPELESS]).double(), run_alone, dtype=torch.float64)
    assert found.total().zeros == zeros(unexplained=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_fp32_cannot_hold_either_is_saturation_in_half_precision(dtype: torch.dtype) -> None:
    found = account(Factors([ALIVE, NEVER, TOO_SMALL, HOPELESS]), run_alone, dtype=dtype)  # sums and products stay in fp32
    assert found.references == (torch.float32, torch.float64)
    assert found.total().zeros == zeros(saturation_underflow=2, unexplained=1)


class Every(nn.Module):
    """One of everything: 12 frozen, 6 unused, a table of which 7 of 10 rows are not used, a dead unit of a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 6)
        self.out = nn.Linear(6, 5)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        with torch.no_grad():
            self.hidden.bias[2] = -100.0  # never active

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(self.table(ids))).relu())


IDS = torch.tensor([1, 2, 2, 5])


def shrunk(factor: float):
    """A loss whose gradient into the model is ``factor`` times a usual one; ``factor`` is applied in the dtype of the logits."""

    def closure(run: Pass) -> Tensor:
        with run.autocast():
            logits = run.model(IDS)
        return F.cross_entropy(logits.float(), torch.tensor([0, 1, 2, 3])) * factor

    return closure


STRUCTURE = {"frozen": 12, "unused": 6, "structural": 7 * 4, "dead_unit": (4 + 1) + 5}


def test_each_structural_cause_has_its_count() -> None:
    torch.manual_seed(3)  # all other units are active for some sample
    model = Every()
    model.hidden.bias.data[[0, 1, 3, 4, 5]] = 2.0
    found = account(model, shrunk(1.0))
    assert found.total().zeros == zeros(**STRUCTURE)
    assert found.total("hidden").zeros == zeros(dead_unit=5)
    assert found.total("out").zeros == zeros(dead_unit=5)
    assert found.groups == ["table", "hidden", "out", "unused", "frozen"]
    announced = account(model, shrunk(1.0), structural={"table.weight": torch.arange(10) > 5})  # the mask goes before the guess
    assert announced.total("table").zeros == zeros(structural=4 * 4, unexplained=3 * 4)


def test_fp16_underflow_of_everything_is_not_taken_for_dead_units() -> None:
    torch.manual_seed(3)
    model = Every()
    model.hidden.bias.data[[0, 1, 3, 4, 5]] = 2.0
    found = account(model, shrunk(1e-9), dtype=torch.float16)
    reached = sum(p.numel() for p in model.parameters()) - sum(STRUCTURE.values())
    assert found.total().zeros == zeros(**STRUCTURE, dtype_underflow=reached)
    assert found.total().comes_back == reached
    assert "lost in this pass's dtype" in explanation(found)
    rescued = account(model, shrunk(1e-9), dtype=torch.float16, loss_scale=2.0**found.exponent)
    assert rescued.total().zeros == zeros(**STRUCTURE)
    assert rescued.total().non_finite == 0
    over = account(model, shrunk(1e-9), dtype=torch.float16, loss_scale=2.0 ** (found.exponent + 1))
    assert over.total().non_finite > 0  # the factor was the largest
    assert "overflow" in explanation(over)


def test_saturated_softmax_in_fp32_shows_in_float64_only() -> None:
    """A gap of 120 logits: p = exp(-120) is no fp32 number, and no factor of the loss brings it back. The positive's own cell, p - 1,
    is zero in float64 too: only the residual form knows that one."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[120.0, 0.0], [0.0, 120.0]])
    x = torch.eye(2)

    def closure(run: Pass) -> Tensor:
        with run.autocast():
            logits = run.model(run.cast(x))
        return form(logits.float()).mean()

    form = plain_rows
    assert account(model, closure).total().zeros == zeros(dtype_underflow=2, unexplained=2)
    assert account(model, closure).total().comes_back == 0
    assert account(model, closure, dtype=torch.bfloat16).total().zeros == zeros(saturation_underflow=2, unexplained=2)
    assert account(model, closure, references=()).total().zeros == zeros(unexplained=4)
    form = residual_rows
    assert account(model, closure).total().zeros == zeros(dtype_underflow=4)


def test_the_bias_of_attention_keys_has_no_gradient_but_rounding(small_encoder) -> None:
    """The claim behind ``is_key_bias``, on the towers of open_clip: in float64 what is not 0 there is 1e-12 of what the others have."""
    encoder = load_encoder(str(small_encoder)).train()
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name.endswith("in_proj_bias"):
                parameter.normal_(std=0.2)
    pixels, ids = torch.randn(4, 3, 16, 16), encoder.tokenize(["one", "two and three", "four", "five"]).ids

    def closure(run: Pass) -> Tensor:
        image, text, scale = run.model.model(run.cast(pixels), ids)
        return plain_rows(scale * image @ text.T).mean()

    gradient = reference(encoder, closure, torch.float64)
    biases = [g.chunk(3) for name, g in gradient.items() if name.endswith("in_proj_bias")]
    assert len(biases) >= 2
    for query, key, value in biases:
        assert query.abs().max() > 0
        assert key.abs().max() < 1e-12 * max(query.abs().max(), value.abs().max())


def test_transposed_and_grouped_convolutions_norms_and_attention_know_their_units() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "first": nn.Conv1d(2, 4, 1),
            "up": nn.ConvTranspose1d(4, 3, 2),
            "norm": nn.GroupNorm(1, 3),
            "attention": nn.MultiheadAttention(3, 1, batch_first=True),
        }
    )
    model["first"].bias.data = torch.tensor([5.0, 5.0, -99.0, 5.0])
    model["attention"].out_proj.weight.data[:, 1] = 0.0  # value unit 1 leads nowhere
    x = torch.rand(2, 2, 5)

    def closure(run: Pass) -> Tensor:
        m = run.model
        hidden = m["norm"](m["up"](m["first"](run.cast(x)).relu())).transpose(1, 2)
        return m["attention"](hidden, hidden, hidden, need_weights=False)[0].square().sum()

    found = account(model, closure)
    by_name = {t.name: t.tally.zeros for t in found.tensors}
    assert by_name["first.weight"] == zeros(dead_unit=2)
    assert by_name["first.bias"] == zeros(dead_unit=1)
    assert by_name["up.weight"] == zeros(dead_unit=3 * 2)
    assert by_name["attention.in_proj_weight.v"] == zeros(dead_unit=3)
    assert by_name["attention.in_proj_bias.v"] == zeros(dead_unit=1)
    assert by_name["attention.in_proj_weight.q"] == zeros()


def test_places_of_a_kernel_that_only_meet_padding_are_structural() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 1))
    found = account(model, lambda run: run.model(run.cast(torch.rand(2, 2, 1, 1))).square().sum())  # one pixel: the middle alone counts
    assert found.total().zeros == zeros(structural=8 * 6)


def test_zeros_of_the_key_bias_are_structural() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return ((self.q_proj(x) @ self.k_proj(x).T).softmax(1) @ x).square().sum()

    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # equal rows: the softmax is flat, and every gradient of the logits exactly 0
    found = account(Attend(), lambda run: run.model(run.cast(x)))
    by_name = {t.name: t.tally for t in found.tensors}
    assert by_name["k_proj.bias"].zeros == zeros(structural=2)
    assert by_name["k_proj.bias"].key_bias == 2
    assert by_name["q_proj.bias"].zeros == zeros(unexplained=2)


# ---- random cases


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_causes_sum_to_the_zeros_of_a_plain_backward(dtype: torch.dtype) -> None:
    seed = random.randrange(2**30)
    model, batch = Toy(scale=60.0, seed=seed), toy_batch(6, seed)
    model.token_embedding.weight.requires_grad_(seed % 3 > 0)
    closure = toy_closure(batch)
    found = account(model, closure, dtype=dtype, structural=model.structural_rows(batch.texts["full"]), group=tower_of)
    closure(Pass(model=model, dtype=dtype)).backward()
    for tally in found.tensors:
        gradient = dict(model.named_parameters())[tally.name].grad
        want = tally.tally.entries if gradient is None else int((gradient == 0).sum())
        assert tally.tally.zero_entries == want, (tally.name, seed)
    total = found.total()
    assert total.entries == sum(p.numel() for p in model.parameters())
    assert total.zero_entries == sum(found.total(g).zero_entries for g in found.groups)
    table = content_of(found)
    assert sum(sum(t["zeros"].values()) for t in table["tensors"]) == total.zero_entries == table["total"]["zero_entries"]


def toy_closure(batch):
    def closure(run: Pass) -> Tensor:
        images = run.cast(batch.images["full"])
        with run.autocast():
            image = images.flatten(1) @ run.model.visual.proj
            text = run.model.token_embedding.weight[batch.texts["full"]].mean(dim=1) @ run.model.text_projection
        logits = run.model.logit_scale.exp() * F.normalize(image.float(), dim=1) @ F.normalize(text.float(), dim=1).T
        target = torch.arange(len(logits))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    return closure


def content_of(found: Accounting) -> dict:
    from gradscope.zeros.encoder_batch import ZeroBatch

    return content(ZeroBatch(encoder="toy", data="d", split="s", width=6, precision="fp32", objective="infonce", accounting=found))


# ---- the passes


def test_a_reference_is_float64_throughout_although_the_closure_says_float() -> None:
    seed = random.randrange(2**30)
    model, batch = Toy(scale=60.0, seed=seed), toy_batch(6, seed)
    found = reference(model, toy_closure(batch), torch.float64)
    wide = Toy(scale=60.0, seed=seed).double()
    image = F.normalize(batch.images["full"].double().flatten(1) @ wide.visual.proj, dim=1)
    text = F.normalize(wide.token_embedding.weight[batch.texts["full"]].mean(dim=1) @ wide.text_projection, dim=1)
    logits = wide.logit_scale.exp() * image @ text.T
    ((F.cross_entropy(logits, torch.arange(6)) + F.cross_entropy(logits.T, torch.arange(6))) / 2).backward()
    for name, parameter in wide.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-11, atol=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x.float())).relu().float()


class Restless(nn.Module):
    """Batch norm, dropout, a tied table, and activations that are computed anew in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.block = Block()
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.utils.checkpoint.checkpoint(self.block, self.table(ids), use_reentrant=False))


def restless(run: Pass) -> Tensor:
    with run.autocast():
        logits = run.model(torch.tensor([0, 1, 2, 3, 4, 4, 5]))
    return F.cross_entropy(logits.float(), torch.tensor([1, 2, 3, 4, 5, 6, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_of_the_model_changes(dtype: torch.dtype) -> None:
    model = Restless()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    account(model, restless, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is grad and torch.equal(grad, copy) for p, (grad, copy) in zip(model.parameters(), grads, strict=True))
    assert model.training
    assert model.block.drop.training
    assert torch.get_default_dtype() == torch.float32


class Moving(nn.Module):
    """Buffers that are replaced, not written to; spectral normalisation, which moves on whenever its weight is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.average = 0.9 * self.average + out.detach().mean(0)
        self.seen = torch.ones(())
        return out + self.average


def test_buffers_that_are_replaced_are_the_old_ones_again() -> None:
    model = Moving()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    gradient = [measure(model, lambda run: run.model(torch.ones(2, 4)).square().sum(), torch.float32, 1.0).gradient for _ in range(2)]
    account(model, lambda run: run.model(run.cast(torch.ones(2, 4))).square().sum())
    assert dict(model.named_buffers()).keys() == before.keys()
    assert model.seen is None
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])
    assert all(torch.equal(a, b) for a, b in zip(*(g.values() for g in gradient), strict=True))


def test_a_sparse_gradient_is_counted_like_a_dense_one() -> None:
    torch.manual_seed(1)
    dense = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    sparse = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    sparse.load_state_dict(dense.state_dict())
    both = [account(model, lambda run: run.model(IDS).square().sum()).total() for model in (dense, sparse)]
    assert both[0] == both[1]
    assert both[1].zeros == zeros(structural=6 * 4)


@pytest.mark.parametrize("kind", [torch.FloatTensor, "torch.FloatTensor", torch.float32])
def test_older_words_for_a_cast_are_understood(kind: object) -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    wide = reference(model, lambda run: run.model(run.cast(torch.ones(1, 2))).type(kind).exp().sum(), torch.float64)
    twin = nn.Linear(2, 2).double()
    twin.load_state_dict(model.state_dict())
    twin(torch.ones(1, 2).double()).exp().sum().backward()
    torch.testing.assert_close(wide["weight"], twin.weight.grad, rtol=1e-13, atol=0)


def test_whole_numbers_become_floating_ones_in_a_reference() -> None:
    model = nn.Linear(4, 1)
    gradient = reference(model, lambda run: run.model(IDS.float()).sum() + IDS.float().mean(), torch.float64)
    assert gradient["weight"].tolist() == [IDS.tolist()]


def test_all_passes_draw_the_same_dropout() -> None:
    model = Restless()
    torch.manual_seed(random.randrange(2**30))
    narrow = measure(model, restless, torch.float32, 1.0).gradient
    wide = reference(model, restless, torch.float64)
    torch.manual_seed(random.randrange(2**30))
    other = measure(model, restless, torch.float32, 1.0).gradient
    for name, gradient in narrow.items():
        torch.testing.assert_close(gradient.double(), wide[name], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(other["table.weight"], narrow["table.weight"], rtol=1e-2)


def test_the_gradient_is_unscaled_and_equals_a_plain_one() -> None:
    model = Every()
    found = measure(model, shrunk(1.0), torch.float32, 1024.0)
    shrunk(1.0)(Pass(model=model, dtype=torch.float32)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert found.gradient.get(name) is None
        else:
            torch.testing.assert_close(found.gradient[name], parameter.grad, rtol=1e-6, atol=1e-9)


def test_the_factor_is_the_largest_by_trying_them_all() -> None:
    model = Every()
    found = measure(model, shrunk(0.3), torch.float16, 1.0)
    finite = []
    for k in range(40):
        loss = shrunk(0.3)(Pass(model=model, dtype=torch.float16)) * 2.0**k
        grads = torch.autograd.grad(loss, [*model.out.parameters(), *model.hidden.parameters(), model.table.weight])
        finite.append(all(g.isfinite().all() for g in grads))
    assert found.exponent == finite.index(False) - 1
    assert 0 < found.exponent < 39


@pytest.mark.parametrize(
    ("closure", "words"),
    [
        (lambda run: FOREIGN(IDS).sum(), "does not depend on run.model"),
        (lambda run: run.model(IDS), "one number with a gradient; it returned a tensor of shape [4, 5]"),
        (lambda run: 3.0, "it returned nothing with a gradient"),
        (lambda run: run.model(IDS).sum().detach(), "it returned nothing with a gradient"),
        (lambda run: run.model(IDS).sum() * float("inf"), "the loss of the float32 pass is"),
        (lambda run: (run.model(IDS) @ torch.ones(5, 1).detach().clone()).sum(), ""),
    ],
)
def test_a_closure_that_cannot_be_used_is_one_sentence(closure, words: str) -> None:
    if words:
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            account(FOREIGN if "depend" in words else Every(), closure)
        assert "\n" not in str(error.value)
    else:
        assert account(Every(), closure).total().entries  # a tensor made inside is made in the reference's dtype


FOREIGN = Every()


def test_a_model_that_the_loss_does_not_reach_and_a_sharded_one_are_refused(tmp_path) -> None:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ValueError, match="the loss of the closure does not depend"):
        account(Every(), lambda run: FOREIGN(IDS).sum(), references=())
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        fully_shard(model)
        with pytest.raises(ValueError, match="the model is sharded"):
            account(model, lambda run: run.model(run.cast(torch.ones(1, 2))).sum())
    finally:
        distributed.destroy_process_group()


def test_inputs_that_were_not_cast_and_an_autocast_of_ones_own_are_named() -> None:
    x = torch.rand(3, 2)
    with pytest.raises(ValueError, match=re.escape("does not run in float64")) as error:
        account(nn.Linear(2, 2), lambda run: run.model(x).sum())
    assert "run.cast" in str(error.value)

    def own_autocast(run: Pass) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run.model(run.cast(x)).float().sum()

    with pytest.raises(ValueError, match="the float32 pass computed in bfloat16 at 'linear'"):
        account(nn.Linear(2, 2), own_autocast, dtype=torch.bfloat16)


class Reentrant(Every):
    def forward(self, ids: Tensor) -> Tensor:
        x = torch.ones(4, 4, requires_grad=True)
        return self.out(torch.utils.checkpoint.checkpoint(lambda x: self.hidden(x).relu(), x, use_reentrant=True))


def test_reentrant_checkpoints_are_refused_not_called_unused() -> None:
    with pytest.raises(ValueError, match="use use_reentrant=False"):
        account(Reentrant(), shrunk(1.0))


def test_an_autocast_inside_the_model_is_held_against_float64() -> None:
    class Own(Every):
        def forward(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids)

    model = Own()
    with pytest.raises(ValueError, match=re.escape("references=(torch.float64,)")):
        account(model, shrunk(1.0), dtype=torch.bfloat16)
    assert account(model, shrunk(1.0), dtype=torch.bfloat16, references=(torch.float64,)).total().zeros["unused"] == 6


def test_tensors_that_are_no_buffers_and_hooks_on_parameters_are_in_the_references_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].turn = torch.eye(3)  # no buffer: .to(dtype) leaves it
    model[0].register_forward_hook(lambda module, _, out: out @ module.turn)
    kept = torch.tensor([1.0, 0.0, 1.0])
    model[0].weight.register_hook(lambda g: g * kept)  # as who trains some columns only
    found = account(model, lambda run: run.model(run.cast(torch.ones(1, 3))).square().sum())
    assert found.total().zeros["dtype_underflow"] == 0
    assert found.total("0").zero_entries == 3


def test_masks_and_references_that_do_not_fit_are_refused() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the loss scale must be a positive number"):
            account(Every(), shrunk(1.0), loss_scale=wrong)
    for wrong in (torch.int32, "fp16"):
        with pytest.raises(ValueError, match=re.escape("give one of torch.float16, torch.bfloat16")):
            account(Every(), shrunk(1.0), dtype=wrong)
    with pytest.raises(ValueError, match="is a bool tensor"):
        account(Every(), shrunk(1.0), structural={"table.weight": torch.ones(10, dtype=torch.int64)})
    with pytest.raises(ValueError, match="structural names 'tabel'"):
        account(Every(), shrunk(1.0), structural={"tabel": torch.ones(10, dtype=torch.bool)})
    with pytest.raises(ValueError, match="fits neither"):
        account(Every(), shrunk(1.0), structural={"table.weight": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="a float64 pass needs float64 parameters"):
        account(Every(), shrunk(1.0), dtype=torch.float64)
    for narrow in (torch.float32, torch.bfloat16):  # autocast leaves float64 as it is
        with pytest.raises(ValueError, match="the model has float64 ones"):
            account(Every().double(), shrunk(1.0), dtype=narrow)
    with pytest.raises(ValueError, match="no parameter of the model trains"):
        account(Every().requires_grad_(False), shrunk(1.0))
    for wrong in ([torch.float16], [torch.float64, torch.float32], [torch.float32]):
        with pytest.raises(ValueError, match="references must be wider"):
            account(Every(), shrunk(1.0), references=wrong)


# ---- table B against torch's own Adam


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize(
    "kind",
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.01)}),  # a memory that forgets, but for its maximum
        (torch.optim.Adam, {"weight_decay": 0.3}),
        (torch.optim.AdamW, {"weight_decay": 0.3, "amsgrad": True, "maximize": True}),
        (torch.optim.Adam, {"weight_decay": 0.3, "maximize": True}),
    ],
)
def test_the_second_moment_is_the_one_the_coming_step_forms(kind: tuple, steps: int) -> None:
    optimizer_class, more = kind
    torch.manual_seed(random.randrange(2**30))
    model = Every()
    settings = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-4, **more}
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], **settings)
    for step in range(steps):
        optimizer.zero_grad()
        (shrunk(1.0)(Pass(model=model, dtype=torch.float32)) * 10 * 0.5**step).backward()
        optimizer.step()
    found = account(model, shrunk(1e-3), optimizer=optimizer).total()
    optimizer.zero_grad()
    shrunk(1e-3)(Pass(model=model, dtype=torch.float32)).backward()
    optimizer.step()
    want = dict.fromkeys(INVISIBLE, 0)
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        state = optimizer.state[parameter]
        second = state["max_exp_avg_sq" if "max_exp_avg_sq" in state else "exp_avg_sq"]
        roots = (second.double() / (1 - settings["betas"][1] ** float(state["step"]))).sqrt().flatten().tolist()
        for g, root in zip(parameter.grad.double().flatten().tolist(), roots, strict=True):
            want["eps_dominated"] += g != 0 and root < 1e-4
            want["stale"] += 0 < abs(g) < root / 100
            want["squared_underflow"] += 0 < abs(g) <= 2.0**-75
    assert found.invisible == want
    if steps:
        assert want["stale"]
    elif "weight_decay" not in more or optimizer_class is torch.optim.AdamW:
        assert want["eps_dominated"]


def test_without_an_adam_nothing_is_claimed() -> None:
    model = Every()
    found = account(model, shrunk(1.0), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert set(found.total().invisible) == {"squared_underflow"}
    assert "in no Adam" in found.notes[0]
    adamax = torch.optim.Adamax(model.parameters())
    shrunk(1.0)(Pass(model=model, dtype=torch.float32)).backward()
    adamax.step()  # remembers a maximum, not a mean of squares
    assert set(account(model, shrunk(1.0), optimizer=adamax).tensors[0].tally.invisible) == {"squared_underflow"}
    fresh = account(Factors([ALIVE, (1e-9, 1.0), (1e-30, 1.0)]), run_alone)  # the first step of any Adam: sqrt(v_hat) = |g|
    assert fresh.total().invisible == {"squared_underflow": 1, "eps_dominated": 2, "stale": 0}


def test_the_sentence_names_causes_and_what_a_loss_scale_would_do() -> None:
    says = lambda *pairs, **more: explanation(account(Factors(list(pairs)), run_alone, **more))  # noqa: E731
    assert says(ALIVE) == "None of 1 entries is exactly zero."
    assert says(ALIVE, (1e-9, 1.0)).endswith("exactly zero. Of the non-zero entries, 50 % are small against Adam's eps.")
    assert "100 % of all entries are inf or nan" in says((1e38, 1.0), loss_scale=1024.0)
    assert says(ALIVE, NEVER).startswith("50 % of 2 entries are exactly zero. Of these, 100 % are zero in every pass. Nothing here")
    assert "With the largest loss scale that overflows nowhere, 2^127, 50 % of the dtype underflow would come back; the rest" in says(
        ALIVE, TOO_SMALL, HOPELESS
    )
    assert "No loss scale brings any of the dtype underflow back: it is rounding" in says(ALIVE, HOPELESS)
    assert "widen the softmax, or change the objective" in says(ALIVE, TOO_SMALL, dtype=torch.bfloat16)
    assert "Of the non-zero entries, 50 % are small against Adam's eps" in says(ALIVE, (1e-9, 1.0), NEVER)
    overflows = says((1e38, 1.0), (-1e38, 1.0), NEVER, loss_scale=1024.0)
    assert overflows.startswith(
        "The pass overflows: 66.67 % of all entries are inf or nan, and the rest is no guide. 33.33 % of 3 entries are exactly zero."
    )
    assert "loss scale" not in overflows


def test_no_share_is_printed_as_0_or_100_that_is_not() -> None:
    assert [share(*pair) for pair in ((0, 9), (9, 9), (1, 10**6), (10**6 - 1, 10**6), (1, 3), (1, 4), (0, 0))] == [
        "0 %", "100 %", "<0.01 %", ">99.99 %", "33.33 %", "25 %", "-",
    ]  # fmt: skip


# ---- the quantity


def test_the_probe_counts_what_needs_no_further_pass() -> None:
    seed = random.randrange(2**30)
    toy = Toy(seed=seed)
    toy.register_parameter("still", nn.Parameter(torch.zeros(9, 8), requires_grad=False))
    toy.register_parameter("idle", nn.Parameter(torch.zeros(3, 2)))
    toy.register_parameter("in_proj_bias", nn.Parameter(torch.zeros(6)))
    batch = toy_batch(5, seed)
    step, values = measured(toy, batch)
    for head in step.heads.values():
        assert head.param_grads is not None
        grads = dict(zip(step.names, head.param_grads, strict=True))
        table = grads["token_embedding.weight"]
        unseen = [i for i in range(50) if i not in set(batch.texts["full"].flatten().tolist())]
        exact = sum(int((g == 0).sum()) for g in grads.values() if g is not None)
        want = {
            "entries": 9 * 8 + 12 * 6 + 50 * 6 + 36 + 1 + 6 + 6,
            "frozen": 72,
            "unused": 12,
            "zeros": exact + 72 + 12,
            "structural": sum(int((table[i] == 0).sum()) for i in unseen),
            "squared_underflow": sum(int(((g != 0) & (g.abs() <= 2.0**-75)).sum()) for g in grads.values() if g is not None),
        }
        want["other"] = exact - want["structural"]
        for key, value in want.items():
            assert values["zero_causes", head.name, key] == value, (key, seed)


def test_the_quantity_and_the_accounting_agree() -> None:
    seed = random.randrange(2**30)
    model, batch = Toy(seed=seed), toy_batch(8, seed)
    _, values = measured(model, batch)
    found = account(
        model,
        lambda run: total_loss(Clip()(embedded(run, batch))),
        structural=model.structural_rows(batch.texts["full"]),
    ).total()
    assert values["zero_causes", "infonce", "structural"] == found.zeros["structural"]
    assert values["zero_causes", "infonce", "zeros"] == found.zero_entries
    assert toy_reader(model).needs("param_grads")


def embedded(run: Pass, batch):
    import dataclasses

    model: Toy = run.model
    return model.embed(dataclasses.replace(batch, images={"full": run.cast(batch.images["full"])}))


# ---- a real encoder, a run, and the command


def test_an_encoder_on_scenes(scenes_folder, small_encoder) -> None:
    encoder = load_encoder(str(small_encoder))
    found = account_encoder(
        str(small_encoder), data=Data(name=str(scenes_folder)), split="train", width=4, precision="fp16", objective=None,
        loss_scale=1.0, seed=1, device="cpu",
    )  # fmt: skip
    total = found.accounting.total()
    assert total.entries == sum(p.numel() for p in encoder.parameters())
    assert set(found.accounting.groups) == {"image", "text", "scale"}
    assert total.zeros["structural"] > 0.5 * total.zero_entries
    assert total.zeros["unexplained"] == total.zeros["dead_unit"] == 0
    assert {t.name.rsplit(".", 1)[-1] for t in found.accounting.tensors if "in_proj" in t.name} == {"q", "k", "v"}
    assert found.objective == "infonce"


def test_a_run_brings_what_it_trains_with(scenes_folder, small_encoder, tmp_path) -> None:
    settings = {
        "data.name": str(scenes_folder), "encoder.name": str(small_encoder), "encoder.freeze": "image", "train.device": "cpu",
        "train.batch_size": 8, "train.max_steps": 2, "train.lr": 1e-3, "objective.name": "hn", "objective.gamma": 0.25,
        "objective.margin": "frozen", "objective.token_weight": 0.5, "objective.duplicates": "exclude",
    }  # fmt: skip
    train(resolve({}, settings), tmp_path / "run", quiet=True)
    common = {
        "data": Data(name=str(scenes_folder)), "split": "train", "width": 4, "precision": "fp32", "loss_scale": 1.0, "seed": 1,
        "device": "cpu",
    }  # fmt: skip
    found = account_encoder(str(tmp_path / "run"), objective=None, **common)
    assert found.objective == "hn (gamma 0.25, frozen margin), token term 0.5, duplicates excluded"
    image = found.accounting.total("image")
    assert image.zeros == zeros(frozen=image.entries)
    assert found.accounting.total().invisible["stale"] > 0  # the optimizer's memory was loaded
    alone = account_encoder(str(tmp_path / "run"), objective={"name": "infonce"}, **common)
    assert alone.objective == "infonce, duplicates excluded"
    assert alone.accounting.total("scale").zeros["unused"] == 1  # the token term's own scale
    with pytest.raises(ValueError, match="has 160 usable records; lower --width"):
        account_encoder(str(small_encoder), objective=None, **{**common, "width": 161})


def test_a_half_precision_run_brings_its_precision_and_loss_scale(scenes_folder, small_encoder, tmp_path) -> None:
    settings = {
        "data.name": str(scenes_folder), "encoder.name": str(small_encoder), "train.device": "cpu", "train.batch_size": 8,
        "train.max_steps": 2, "train.precision": "fp16",
    }  # fmt: skip
    train(resolve({}, settings), tmp_path / "run", quiet=True)
    scale = Run(tmp_path / "run").steps["loss_scale"].iloc[-1]
    common = {"data": Data(name=str(scenes_folder)), "split": "train", "width": 4, "objective": None, "seed": 1, "device": "cpu"}
    for name, precision, loss_scale, want in [
        (tmp_path / "run", None, None, ("fp16", scale)),
        (tmp_path / "run", "fp32", None, ("fp32", 1.0)),
        (tmp_path / "run", None, 2.0, ("fp16", 2.0)),
        (small_encoder, None, None, ("fp32", 1.0)),
    ]:
        found = account_encoder(str(name), precision=precision, loss_scale=loss_scale, **common)
        assert (found.precision, found.accounting.loss_scale) == want


def test_the_command_writes_both_files_and_refuses_in_one_sentence(scenes_folder, small_encoder, tmp_path) -> None:
    def run(*words: str):
        return CliRunner().invoke(app, ["zeros", str(small_encoder), "--data", str(scenes_folder), "--width", "4", *words])

    done = run("--precision", "bf16", "--output", str(tmp_path / "z.json"), "--objective", "hn")
    assert done.exit_code == 0, done.output
    assert "first match wins" in done.stdout
    assert "structural" in done.stdout
    stored = json.loads((tmp_path / "z.json").read_text())
    assert stored["objective"] == "hn (gamma 0.5)"
    assert stored["explanation"] in done.stdout.replace("\n", " ").replace("  ", " ")
    lines = (tmp_path / "z.csv").read_text().splitlines()
    assert lines[0].startswith("name,tower,entries,frozen,unused,structural")
    assert len(lines) == 1 + len(stored["tensors"])
    assert set(lines[0].split(",")) >= {"of_structural_key_bias", "of_dtype_underflow_comes_back", "contradicted", "non_finite"}
    for words, says in [
        (("--precision", "int8"), "choose fp32, bf16, fp16"),
        (("--gamma", "0.3"), "--gamma belongs to --objective hn"),
        (("--loss-scale", "-1"), "must be a positive number"),
        (("--output", "z.txt"), "ends in .json"),
        (("--checkpoint", "both"), "choose last or best"),
        (("--checkpoint", "best"), "needs a run directory"),
    ]:
        refused = run(*words)
        assert isinstance(refused.exception, ValueError), words
        assert says in str(refused.exception)
