"""The streaming loss against float64 autograd of the dense objectives, against brute force, and at the edges of fp32."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradscope.kernels import blocks
from gradscope.kernels.cells import Cells, caption_mean, group_numbers, positive_pairs
from gradscope.kernels.choice import dense_limit, kernel_for, kernel_words
from gradscope.kernels.forward import forward_strip
from gradscope.kernels.largest import Largest, places_of_largest
from gradscope.kernels.stream import Streamed, stream
from gradscope.metrics.softmax import log_odds, negative_log_shares, negatives
from gradscope.objectives.hn import HN
from gradscope.objectives.margin import MARGINS, caption_cosines, off_diagonal_mean
from gradscope.types import Scores

FORMS = ("shared", "safe")


def rows(count: int, width: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=1).to(dtype)


def generator(seed: int | None = None) -> torch.Generator:
    found = torch.Generator()
    found.manual_seed(torch.seed() if seed is None else seed)
    return found


def dense(image: Tensor, text: Tensor, scale: Tensor, gamma: float, margin: str, other: Tensor, groups: Tensor | None) -> Scores:
    excluded = None if groups is None else (groups[:, None] == groups).fill_diagonal_(False)
    return HN(gamma=gamma, margin=margin).scores(image, text, scale, other, excluded)


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


@pytest.fixture(params=[1024, 48, 7])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks that hold all, and blocks that do not divide the batch."""
    monkeypatch.setattr(blocks, "BLOCK", request.param)
    return int(request.param)


# ---- float64


@pytest.mark.parametrize("count", [2, 3, 17, 130])
@pytest.mark.parametrize("margin", MARGINS)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_value_gradients_and_readings_are_those_of_the_dense_loss(count, margin, grouped, form, block):
    draw = generator()
    image, text = (rows(count, 6, draw).requires_grad_() for _ in range(2))
    other = rows(count, 4, draw)
    scale = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    groups = torch.randint(-5, max(count // 2, 1), (count,), generator=draw) * 10**12 if grouped else None
    upstream = torch.randn(count, generator=draw, dtype=torch.float64)
    scores = dense(image, text, scale, 0.4, margin, other, groups)
    expected = HN(gamma=0.4).exact_loss(scores)
    found = stream(image, text, scale, gamma=0.4, margin=margin, margin_text=other, groups=groups, top=3, backend=form)
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-300)
    wanted = gradients((expected * upstream).sum(), image, text, scale)
    assert int(found.zero_cells) == -1
    for got, want in zip(gradients((found.loss * upstream).sum(), image, text, scale), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    check_readings(found, scores)
    if form == "safe":
        assert found.shared_share() == 0


def check_readings(found: Streamed, scores: Scores, tolerance: float = 1e-12) -> None:
    """Anchors against the cells."""
    logits, excluded = scores.logits.detach(), scores.excluded
    cells = (logits / scores.scale.detach()).double()
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(found.anchors.positive, cells.diagonal(), **close)
    for direction, matrix, sides in (("i2t", logits, cells), ("t2i", logits.T, cells.T)):
        torch.testing.assert_close(found.anchors.log_odds[direction], log_odds(matrix), **close)
        torch.testing.assert_close(found.anchors.hardest[direction], negatives(sides, excluded).amax(dim=1), **close)
    shares = negative_log_shares(logits).exp().sort(dim=1, descending=True).values.cumsum(dim=1)
    last = shares.shape[1] - 1
    expected = torch.stack([shares[:, min(k, last)] for k in range(3)]).mean(dim=1)
    torch.testing.assert_close(found.anchors.top_share["i2t"], expected, **close)


def several_by_hand(image: Tensor, text: Tensor, scale: Tensor, gamma: float, groups: Tensor) -> Tensor:
    """-log of the probability of all positives, one anchor after the other."""
    cosine, margin = image @ text.T, gamma * (text @ text.T).detach()
    losses = []
    for i in range(len(image)):
        directions = []
        for cells, margins in ((cosine[i], margin[i]), (cosine[:, i], margin[:, i])):
            mine = groups == groups[i]
            logits = scale * torch.where(mine, cells, cells + margins)
            directions.append(logits.logsumexp(0) - logits[mine].logsumexp(0))
        losses.append((directions[0] + directions[1]) / 2)
    return torch.stack(losses)


@pytest.mark.parametrize("count", [2, 17, 60])
@pytest.mark.parametrize("form", FORMS)
def test_several_positives_by_brute_force(count, form, block):
    draw = generator()
    image, text = (rows(count, 5, draw).requires_grad_() for _ in range(2))
    scale = torch.tensor(12.0, dtype=torch.float64, requires_grad=True)
    groups = torch.randint(0, max(count // 3, 2), (count,), generator=draw)
    groups[0], groups[1] = 0, 1  # at least two groups: a loss of exactly 0 is another test
    upstream = torch.rand(count, generator=draw, dtype=torch.float64)
    expected = several_by_hand(image, text, scale, 0.3, groups)
    found = stream(image, text, scale, gamma=0.3, groups=groups, several="positives", backend=form)
    torch.testing.assert_close(found.loss, expected, rtol=1e-10, atol=1e-13)
    wanted = gradients((expected * upstream).sum(), image, text, scale)
    for got, want in zip(gradients((found.loss * upstream).sum(), image, text, scale), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("margin", ["live", "centred"])
def test_gradcheck(margin, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    draw = generator()
    image, text = (rows(7, 4, draw).requires_grad_() for _ in range(2))
    scale = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    still = text.detach().clone()  # numerical differences would move the margin too, which has no gradient
    if margin == "live":
        margin_text, kind = still, "frozen"
    else:
        margin_text, kind = None, "live"

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        gamma = 0.5 if kind == "frozen" else 0.0
        return stream(image, text, scale, gamma=gamma, margin=kind, margin_text=margin_text).loss

    assert torch.autograd.gradcheck(loss, (image, text, scale))


def test_only_what_needs_a_gradient_gets_one():
    draw = generator()
    leaves = [rows(40, 8, draw), rows(40, 8, draw), torch.tensor(20.0, dtype=torch.float64)]
    full = [leaf.clone().requires_grad_() for leaf in leaves]
    wanted = gradients(stream(*full, gamma=0.2).loss.sum(), *full)
    for number in range(3):
        mine = [leaf.clone().requires_grad_(i == number) for i, leaf in enumerate(leaves)]
        stream(*mine, gamma=0.2).loss.sum().backward()
        torch.testing.assert_close(mine[number].grad, wanted[number])
        assert all(leaf.grad is None for i, leaf in enumerate(mine) if i != number)


# ---- fp32


def spread_pairs(count: int, seed: int, width: int = 64) -> tuple[Tensor, Tensor]:
    """fp32 pairs of which some are learnt beyond fp32's resolution and some lose to a near duplicate."""
    draw = generator(seed)
    text = rows(count, width, draw)
    third = count // 3
    text[-third:] = F.normalize(text[:third] + 0.4 * rows(third, width, draw), dim=1)  # neighbours, cosine about .93
    learnt = torch.linspace(-0.1, 1.0, count, dtype=torch.float64)[torch.randperm(count, generator=draw), None]
    image = F.normalize(learnt * text + (1.02 - learnt) * rows(count, width, draw), dim=1)
    return image.float(), text.float()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gamma", [0.0, 0.3])
def test_fp32_gradients_from_losses_of_1e_20_to_40(form, gamma, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 96)
    image, text = spread_pairs(260, seed=3)
    exact = [leaf.double().requires_grad_() for leaf in (image, text, torch.tensor(100.0))]
    loss = HN(gamma=gamma).exact_loss(HN(gamma=gamma).scores(*exact))
    leaves = [leaf.float().requires_grad_() for leaf in (image, text, torch.tensor(100.0))]
    found = stream(*leaves, gamma=gamma, backend=form)
    if gamma == 0:
        assert loss.min() < 1e-20
    assert loss.max() > 40
    each = torch.stack([torch.sigmoid(x) for x in found.anchors.log_odds.values()])
    true = HN(gamma=gamma).scores(*exact).logits.detach()
    torch.testing.assert_close(each, torch.stack([torch.sigmoid(log_odds(m)) for m in (true, true.T)]), rtol=1e-4, atol=0)
    for got, want in zip(gradients(found.loss.mean(), *leaves), gradients(loss.mean(), *exact), strict=True):
        assert relative(got, want) < 2e-5
    learnt = loss < 1e-6  # also where only the learnt pairs speak, the direction is right
    for got, want in zip(
        gradients(stream(*leaves, gamma=gamma, backend=form).loss[learnt].mean(), *leaves[:2]),
        gradients(HN(gamma=gamma).exact_loss(HN(gamma=gamma).scores(*exact))[learnt].mean(), *exact[:2]),
        strict=True,
    ):
        assert relative(got, want) < 2e-5


@pytest.mark.parametrize("form", FORMS)
def test_residuals_are_right_to_1e_6_where_the_products_are_exact(form):
    """Rows of signs and eighths multiply exactly in fp32, and the scale is short in base 2: all that is left is the reduction."""
    draw = generator()
    text = torch.randint(0, 2, (1300, 16), generator=draw).float() * 2 - 1  # over one whole block
    image = text * torch.randint(-2, 9, (1300, 1), generator=draw) / 8
    scale = torch.tensor(15.53125 * math.log(2.0), dtype=torch.float64)
    logits = scale * (image.double() @ text.double().T)
    found = stream(image, text, scale, backend=form)
    for direction, matrix in (("i2t", logits), ("t2i", logits.T)):
        expected = torch.sigmoid(log_odds(matrix))
        assert expected.min() < 1e-16
        torch.testing.assert_close(torch.sigmoid(found.anchors.log_odds[direction]), expected, rtol=1e-6, atol=0)


def test_a_column_far_below_its_rows_falls_back_and_stays_right(monkeypatch):
    """Scale 200: every cell of column 0 lies far under the maximum of its row, of its block, and under e^-87 beside either."""
    monkeypatch.setattr(blocks, "BLOCK", 16)
    draw = generator()
    direction = F.normalize(torch.ones(1, 16, dtype=torch.float64), dim=1)
    image, text = (F.normalize(direction + 0.3 * rows(50, 16, draw), dim=1) for _ in range(2))
    text[0] = F.normalize(-direction[0] + 0.3 * rows(1, 16, draw)[0], dim=0)
    leaves = [leaf.float().requires_grad_() for leaf in (image, text, torch.tensor(200.0))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = HN(gamma=0.0).exact_loss(HN(gamma=0.0).scores(*exact))
    found = {form: stream(*leaves, backend=form) for form in FORMS}
    wanted = gradients(expected.mean(), *exact)
    for form, one in found.items():
        torch.testing.assert_close(one.loss.double(), expected, rtol=1e-4, atol=0, msg=form)
        for got, want in zip(gradients(one.loss.mean(), *leaves), wanted, strict=True):
            assert relative(got, want) < 2e-5
    assert found["shared"].shared_share() < 1


def test_ordinary_batches_share_every_exp():
    draw = generator()
    text = rows(300, 64, draw)
    image = F.normalize(text + 1.5 * rows(300, 64, draw), dim=1).float().requires_grad_()
    found = stream(image, text.float(), torch.tensor(50.0), gamma=0.3)
    found.loss.mean().backward()
    assert found.shared_share() == 1
    assert len(found.shares) == 2


def test_weights_too_small_for_the_shared_form_are_not_lost():
    image, text = spread_pairs(60, seed=1)
    leaves = [image.requires_grad_(), text.requires_grad_()]
    upstream = torch.logspace(0, -25, 60)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    scale = torch.tensor(20.0)
    loss = HN(gamma=0.3).exact_loss(HN(gamma=0.3).scores(*exact, scale.double()))
    found = stream(*leaves, scale, gamma=0.3)
    (got,), (want,) = gradients((found.loss * upstream).sum(), leaves[0]), gradients((loss * upstream.double()).sum(), exact[0])
    assert relative(got, want) < 2e-5
    last = slice(50, 60)
    mine = stream(*leaves, scale, gamma=0.3)
    (got,) = gradients((mine.loss[last] * upstream[last]).sum(), leaves[0])
    again = HN(gamma=0.3).exact_loss(HN(gamma=0.3).scores(*exact, scale.double()))
    (want,) = gradients((again[last] * upstream.double()[last]).sum(), exact[0])
    assert relative(got, want) < 2e-5


@pytest.mark.parametrize("form", FORMS)
def test_zero_cells_are_those_of_the_dense_fp32_gradient(form, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 32)
    draw = generator()
    image, text = (rows(70, 4, draw, torch.float32).requires_grad_() for _ in range(2))
    scale = torch.tensor(90.0)
    with torch.no_grad():
        logits = scale * (image @ text.T)
        lses = [log_odds(m).double() for m in (logits, logits.T)]
        rows_, columns = (F.softplus(x) + logits.diagonal().double() for x in lses)
        p = (logits.double() - rows_[:, None]).exp() + (logits.double() - columns).exp()
        cells = p / (2 * 70)
    smallest = 2.0**-150  # half of the smallest denormal rounds to 0
    sure = [int((cells < smallest * f).sum() - (cells < smallest * f).diagonal().sum()) for f in (0.5, 2.0)]
    found = stream(image, text, scale, backend=form)
    found.loss.mean().backward()
    assert sure[0] > 0
    assert sure[0] <= int(found.zero_cells) <= sure[1]


def test_equal_captions_excluded_have_no_push():
    draw = generator()
    image, text = (rows(20, 6, draw).requires_grad_() for _ in range(2))
    groups = torch.zeros(20, dtype=torch.int64)
    found = stream(image, text, torch.tensor(10.0, dtype=torch.float64), gamma=0.3, groups=groups, top=2)
    assert (found.loss == 0).all()
    assert all((g == 0).all() for g in gradients(found.loss.sum(), image, text))
    assert all((x == -math.inf).all() for x in (*found.anchors.log_odds.values(), *found.anchors.hardest.values()))
    assert found.anchors.top_share["i2t"].isnan().all()
    assert int(found.zero_cells) == 0
    one = stream(image[:1].detach(), text[:1].detach(), torch.tensor(10.0, dtype=torch.float64))
    assert float(one.loss) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [0, 1])
def test_nan_rows_stay_nan(form, side, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 8)
    draw = generator()
    leaves = [rows(20, 6, draw, torch.float32) for _ in range(2)]
    leaves[side][3] = math.nan
    found = stream(*leaves, torch.tensor(30.0), gamma=0.2, backend=form)
    logits = dense(*leaves, torch.tensor(30.0), 0.2, "live", leaves[0], None).logits
    for direction, matrix in (("i2t", logits), ("t2i", logits.T)):
        assert torch.equal(found.anchors.log_odds[direction].isnan(), log_odds(matrix).isnan())
    assert found.loss[3].isnan()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_zeros_of_a_broken_gradient_are_not_negative(form, value):
    image, text = (rows(20, 6, generator(), torch.float32) for _ in range(2))
    image[3, 2] = value
    found = stream(image.requires_grad_(), text, torch.tensor(30.0), backend=form)
    found.loss.mean().backward()
    assert int(found.zero_cells) == 0


@pytest.mark.parametrize("side", [0, 1])
def test_rows_changed_in_place_before_the_backward_are_refused(side):
    leaves = [rows(20, 6, generator()).requires_grad_() for _ in range(2)]
    moved = [leaf * 1 for leaf in leaves]
    loss = stream(*moved, torch.tensor(30.0)).loss.mean()
    with torch.no_grad():
        moved[side].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused():
    image, text = (rows(20, 6, generator()).requires_grad_() for _ in range(2))
    loss = stream(image, text, torch.tensor(30.0)).loss.mean()
    with pytest.raises(RuntimeError, match="take the dense kernel where create_graph=True"):
        torch.autograd.grad(loss, image, create_graph=True)


def test_rows_of_a_frozen_tower_may_come_from_inference_mode():
    text, scale = rows(20, 6, generator()).requires_grad_(), torch.tensor(30.0)
    with torch.inference_mode():
        image = rows(20, 6, generator())
    found = gradients(stream(image, text, scale).loss.mean(), text)[0]
    assert torch.equal(found, gradients(stream(image.clone(), text, scale).loss.mean(), text)[0])


@pytest.mark.parametrize("form", FORMS)
def test_compiled_code_leaves_the_blocks_alone(form, monkeypatch):
    """Unrolled, each of the 64 blocks would be dozens of nodes."""
    monkeypatch.setattr(blocks, "BLOCK", 8)
    leaves = [rows(64, 6, generator()).requires_grad_() for _ in range(2)]
    nodes = []

    def backend(graph, _):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return stream(image * 1, text, torch.tensor(30.0), gamma=0.3, backend=form).loss.mean() * 2

    torch.compiler.reset()
    compiled = torch.compile(loss, backend=backend)(*leaves)
    assert 0 < sum(nodes) < 100
    assert torch.equal(compiled, loss(*leaves))
    for got, want in zip(gradients(compiled, *leaves), gradients(loss(*leaves), *leaves), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpoints(reentrant):
    leaves = [rows(20, 6, generator()).requires_grad_() for _ in range(2)]

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return stream(image, text, torch.tensor(30.0), gamma=0.3).loss.mean()

    kept = checkpoint(loss, *leaves, use_reentrant=reentrant)
    kept.backward()
    for leaf, want in zip(leaves, gradients(loss(*leaves), *leaves), strict=True):
        assert torch.equal(leaf.grad, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    draw = generator()
    leaves = [rows(64, 16, draw, torch.float32).requires_grad_() for _ in range(2)]
    plain = stream(*leaves, torch.tensor(30.0), gamma=0.2).loss
    with torch.autocast("cpu", dtype=dtype):
        cast = stream(*leaves, torch.tensor(30.0), gamma=0.2).loss
    assert torch.equal(plain, cast)
    for a, b in zip(gradients(plain.mean(), *leaves), gradients(cast.mean(), *leaves), strict=True):
        assert torch.equal(a, b)


def test_the_same_call_gives_the_same_bits():
    image, text = spread_pairs(200, seed=5)
    image.requires_grad_()
    runs = [stream(image, text, torch.tensor(60.0), gamma=0.3) for _ in range(2)]
    assert torch.equal(runs[0].loss, runs[1].loss)
    assert torch.equal(*(gradients(run.loss.mean(), image)[0] for run in runs))


# ---- parts


def test_a_constant_margin_is_a_closed_form():
    draw = generator()
    text = rows(90, 12, draw)
    groups = torch.randint(0, 30, (90,), generator=draw)
    excluded = (groups[:, None] == groups).fill_diagonal_(False)
    cosines = caption_cosines(text)
    torch.testing.assert_close(caption_mean(text), off_diagonal_mean(cosines))
    inside = off_diagonal_mean(cosines.masked_fill(excluded, 0.0), excluded)
    torch.testing.assert_close(caption_mean(text, group_numbers(groups)), inside)
    assert caption_mean(text, torch.zeros(90, dtype=torch.int64)) == 0


def test_positive_pairs_are_all_cells_of_equal_group():
    for count in (1, 5, 40):
        groups = torch.randint(0, 6, (count,), generator=generator())
        found = set(zip(*(side.tolist() for side in positive_pairs(count, group_numbers(groups), groups.device)), strict=True))
        assert found == {(i, j) for i in range(count) for j in range(count) if groups[i] == groups[j]}
        assert torch.equal(group_numbers(groups), groups.unique(return_inverse=True)[1])


@pytest.mark.parametrize("widths", [(1,), (9,), (160,), (1024,), (1000,), (320, 320, 7), (5, 512, 512)])
@pytest.mark.parametrize("count", [1, 10])
def test_largest_is_topk(widths, count):
    x = torch.randn(23, sum(widths), generator=generator())
    x[:, : len(x[0]) // 2] = x[:, : len(x[0]) // 2].round()  # ties
    x[0] = -math.inf
    x[1, len(x[0]) // 3] = math.nan
    x[2], x[3] = math.nan, 1.0
    found = Largest(count)
    for part in x.split(widths, dim=1):
        np.testing.assert_array_equal(found.add(part.contiguous()).numpy(), part.amax(dim=1).numpy())
    expected = x.topk(min(count, sum(widths)), dim=1).values
    np.testing.assert_array_equal(found.found().numpy(), expected.numpy())
    places = places_of_largest(x, expected.shape[1])
    np.testing.assert_array_equal(x.gather(1, places).numpy(), expected.numpy())
    assert all(len(set(row)) == len(row) for row in places.tolist())


def test_strips_add_up_to_the_whole(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 16)
    draw = generator()
    image, text = rows(45, 6, draw), rows(45, 6, draw)
    cells, scale = Cells(image=image, text=text, keys=text, gamma=0.3), torch.tensor(20.0)
    whole = forward_strip(cells, scale, slice(0, 45))
    parts = [forward_strip(cells, scale, slice(start, start + 15)) for start in (0, 15, 30)]
    torch.testing.assert_close(torch.cat([part.rows for part in parts]), whole.rows)
    torch.testing.assert_close(torch.stack([part.columns for part in parts]).logsumexp(0), whole.columns)


# ---- the choice, the refusals, the memory


def test_kernels_are_chosen_by_width():
    limit = dense_limit("cpu")
    assert kernel_for(limit) == "dense"
    assert kernel_for(limit + 1) == "streaming"
    assert kernel_for(4, "streaming") == "streaming"
    assert kernel_for(10 * limit, "dense") == "dense"
    assert kernel_words(8192) == f"streaming: width 8192 is over {limit}"
    assert kernel_words(8, "streaming") == "streaming: as asked"
    with pytest.raises(ValueError, match="auto, dense, streaming"):
        kernel_for(4, "fast")


def _bad(**settings: object) -> Callable[[], object]:
    image = torch.zeros(4, 3)
    return lambda: stream(image, image, torch.tensor(1.0), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_bad(margin="hot"), "live, frozen"),
        (_bad(several="twice"), "exclude, positives"),
        (_bad(backend="magic"), "auto, shared, safe"),
        (_bad(margin="frozen", gamma=0.1), "needs margin_text"),
        (_bad(top=-1), "top is -1"),
        (_bad(groups=torch.zeros(3, dtype=torch.int64)), "groups has the shape .3,.; give 1 dimensions, the first of the 4 pairs"),
        (_bad(groups=torch.zeros(4, dtype=torch.int32)), "groups are torch.int32; give whole numbers, int64"),
        (_bad(margin="frozen", gamma=0.1, margin_text=torch.zeros(5, 2)), "margin_text has the shape .5, 2.; give 2 dimensions"),
        (_bad(margin="frozen", gamma=0.1, margin_text=torch.zeros(4)), "margin_text has the shape"),
        (lambda: stream(torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(1)), "scale has the shape .1,."),
        (lambda: stream(torch.zeros(4), torch.zeros(4), torch.tensor(1.0)), "one shape .N, D."),
        (lambda: stream(torch.zeros(4, 3), torch.zeros(4, 2), torch.tensor(1.0)), "one shape"),
        (lambda: stream(torch.zeros(4, 3).half(), torch.zeros(4, 3).half(), torch.tensor(1.0)), "float32 or float64"),
        (lambda: stream(torch.zeros(0, 3), torch.zeros(0, 3), torch.tensor(1.0)), "at least one row"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


MEMORY = """
import json, re, torch
from torch.nn import functional as F
from gradscope.kernels.stream import stream
torch.set_num_threads(1)
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
def run(n):
    v, t = (F.normalize(torch.randn(n, 32), dim=1).requires_grad_() for _ in range(2))
    found = stream(v, t, torch.tensor(50.0), gamma=0.3, top=10)
    found.loss.mean().backward()
run(512)
before = peak()
run(8192)
print(json.dumps(peak() - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_rows_not_with_cells():
    out = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True, timeout=120).stdout
    assert json.loads(out) < 60, "MB; one matrix of cells is 268"
