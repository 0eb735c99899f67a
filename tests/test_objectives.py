"""Objectives against closed forms, float64 autograd and explicit loops."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from gradscope.objectives import objectives
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.margin import MARGINS, caption_cosines, margin_matrix, off_diagonal_mean
from gradscope.objectives.scores import dense_scores, plain_rows, residual_rows, symmetric_loss
from gradscope.objectives.token_interaction import token_loss, token_scores


def rows(n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1).to(dtype)


def slow_loss(image: torch.Tensor, text: torch.Tensor, scale: float, margin: torch.Tensor) -> float:
    """Two loops over anchors, one softmax each."""
    n = len(image)
    logits = [[scale * (float(image[i] @ text[j]) + float(margin[i, j])) for j in range(n)] for i in range(n)]
    total = 0.0
    for i in range(n):
        for line in (logits[i], [logits[k][i] for k in range(n)]):
            total -= float(torch.log_softmax(torch.tensor(line, dtype=torch.float64), 0)[i])
    return total / (2 * n)


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("n", [2, 5])
def test_hn_loss_equals_the_loops(n: int, gamma: float) -> None:
    image, text = rows(n, 8, 1), rows(n, 8, 2)
    margin = gamma * (text @ text.T - torch.diag((text @ text.T).diagonal()))
    scores = HN(gamma=gamma).scores(image, text, torch.tensor(30.0, dtype=torch.float64))
    assert float(symmetric_loss(scores).mean()) == pytest.approx(slow_loss(image, text, 30.0, margin), rel=1e-10)


def test_hn_gradient_is_the_papers_closed_form() -> None:
    n, s = 6, 20.0
    image, text = rows(n, 8, 3), rows(n, 8, 4)
    scores = HN(gamma=0.5).scores(image, text, torch.tensor(s, dtype=torch.float64))
    cosine = scores.cosine.detach().requires_grad_()
    assert scores.margin is not None
    logits = s * (cosine + scores.margin)
    loss = (plain_rows(logits) + plain_rows(logits.T)).mean() / 2
    (grad,) = torch.autograd.grad(loss, cosine)
    p = torch.softmax(logits, 1) + torch.softmax(logits, 0) - 2 * torch.eye(n, dtype=torch.float64)
    assert torch.allclose(grad, s / (2 * n) * p, atol=1e-13)


def test_no_gradient_flows_through_the_margin() -> None:
    text = rows(5, 8, 5).requires_grad_()
    scores = HN(gamma=0.5).scores(rows(5, 8, 6), text, torch.tensor(10.0, dtype=torch.float64))
    assert scores.margin is not None
    assert not scores.margin.requires_grad


def test_gamma_zero_is_infonce_bit_for_bit() -> None:
    image, text, scale = rows(9, 8, 7, torch.float32), rows(9, 8, 8, torch.float32), torch.tensor(100.0)
    a, b = InfoNCE().scores(image, text, scale), HN(gamma=0.0).scores(image, text, scale)
    assert torch.equal(symmetric_loss(a), symmetric_loss(b))


def test_margins() -> None:
    text, start = rows(7, 8, 9), rows(7, 8, 10)
    by_kind = {kind: margin_matrix(kind, 0.5, text, start) for kind in MARGINS}
    g, g0 = text @ text.T, start @ start.T
    for i, j in itertools.product(range(7), repeat=2):
        if i == j:
            assert all(float(m[i, i]) == 0 for m in by_kind.values())
            continue
        mean = sum(float(g[a, b]) for a in range(7) for b in range(7) if a != b) / 42
        assert float(by_kind["live"][i, j]) == pytest.approx(0.5 * float(g[i, j]))
        assert float(by_kind["frozen"][i, j]) == pytest.approx(0.5 * float(g0[i, j]))
        assert float(by_kind["fixed"][i, j]) == pytest.approx(0.5 * mean)
        assert float(by_kind["centred"][i, j]) == pytest.approx(0.5 * (float(g[i, j]) - mean))
    assert torch.allclose(by_kind["live"], by_kind["fixed"] + by_kind["centred"], atol=1e-15)
    assert float(off_diagonal_mean(caption_cosines(text))) == pytest.approx(mean)


@pytest.mark.parametrize("gap", [0.001, 0.1, 0.3, 0.9, 1.2])
@pytest.mark.parametrize("n", [2, 16, 128])
def test_residual_form_keeps_the_pull(n: int, gap: float) -> None:
    logits = (100 * (0.02 * torch.rand(n, n, generator=torch.Generator().manual_seed(n)) + gap * torch.eye(n))).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(residual_rows(logits).mean(), logits)
    negatives = exact.masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf)
    (true,) = torch.autograd.grad(F.softplus(negatives.logsumexp(1) - exact.diagonal(), threshold=700).mean(), exact)
    # 1e-5 relative while fp32 holds the numbers in full, one denormal below that.
    assert torch.allclose(grad.double(), true, rtol=2e-5, atol=2e-45 if gap > 0.8 else 0)
    pulled = true.diagonal().abs() > 1e-43
    assert bool((grad.diagonal()[pulled] != 0).all())


def test_plain_form_loses_the_pull_where_the_residual_form_does_not() -> None:
    logits = torch.tensor([[25.0, 0.0], [0.0, 25.0]], requires_grad=True)
    (plain,) = torch.autograd.grad(plain_rows(logits).sum(), logits)
    (kept,) = torch.autograd.grad(residual_rows(logits).sum(), logits)
    assert float(plain[0, 0]) == 0
    assert float(plain[0, 1]) > 0
    assert float(kept[0, 0]) == pytest.approx(-float(kept[0, 1]), rel=1e-6)


def slow_token_scores(x: torch.Tensor, y: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.zeros(len(x), len(y), dtype=x.dtype), torch.zeros(len(x), len(y), dtype=x.dtype)
    for i, j in itertools.product(range(len(x)), range(len(y))):
        words = y[j][valid[j]]
        cosines = x[i] @ words.T
        a[i, j], b[i, j] = cosines.max(dim=1).values.mean(), cosines.max(dim=0).values.mean()
    return a, b


@pytest.mark.parametrize("max_cells", [1, 40, 200, 10**6])
def test_token_scores_equal_the_loops_for_any_block(max_cells: int) -> None:
    n, p, length, d = 5, 4, 6, 8
    x = F.normalize(torch.randn(n, p, d, dtype=torch.float64), dim=2).requires_grad_()
    y = F.normalize(torch.randn(n, length, d, dtype=torch.float64), dim=2).requires_grad_()
    valid = torch.arange(length)[None] < torch.tensor([1, 6, 3, 2, 5])[:, None]
    a, b = token_scores(x, y, valid, max_cells)
    a2, b2 = slow_token_scores(x, y, valid)
    assert torch.allclose(a, a2, atol=1e-14)
    assert torch.allclose(b, b2, atol=1e-14)
    scale = torch.tensor(14.0, dtype=torch.float64, requires_grad=True)
    mine = torch.autograd.grad(token_loss(a, b, scale).mean(), [x, y, scale])
    target = torch.arange(n)
    slow = (F.cross_entropy(scale * a2, target) + F.cross_entropy(scale * b2.T, target)) / 2
    for g, h in zip(mine, torch.autograd.grad(slow, [x, y, scale]), strict=True):
        assert torch.allclose(g, h, atol=1e-13)


def test_token_scores_hold_no_more_than_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope.objectives import token_interaction

    sizes = []
    real = token_interaction._block

    def spy(x: torch.Tensor, y: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(x) * len(y) * x.shape[1] * y.shape[1])
        return real(x, y, valid)

    monkeypatch.setattr(token_interaction, "_block", spy)
    token_scores(torch.randn(9, 4, 2), torch.randn(9, 5, 2), torch.ones(9, 5, dtype=torch.bool), max_cells=100)
    assert max(sizes) <= 100
    assert sum(sizes) == 9 * 9 * 20


def test_every_registered_objective_is_symmetric_under_a_swap_of_pairs() -> None:
    """Contract: renumbering the pairs renumbers the losses."""
    image, text, order = rows(6, 8, 11), rows(6, 8, 12), torch.tensor([3, 1, 5, 0, 2, 4])
    scale = torch.tensor(20.0, dtype=torch.float64)
    for _, component in objectives:
        objective = component()
        before = objective.loss(objective.scores(image, text, scale))
        after = objective.loss(objective.scores(image[order], text[order], scale))
        assert torch.allclose(before[order], after, atol=1e-12)


def test_dense_scores_without_margin() -> None:
    image, text = rows(3, 8, 13), rows(3, 8, 14)
    scores = dense_scores(image, text, torch.tensor(7.0, dtype=torch.float64))
    assert scores.margin is None
    assert torch.equal(scores.logits, 7.0 * (image @ text.T))
