"""Objectives that are there to be read, against explicit loops, the published forms and the real library."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gradscope.metrics.loss_path import pair_loss
from gradscope.objectives import objectives
from gradscope.objectives.dcl import DCL
from gradscope.objectives.hardness_weighted import HardnessWeighted
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.scores import dense_scores
from gradscope.objectives.siglip import SigLIP, best_bias
from gradscope.recipe import READ_ONLY_OBJECTIVES, resolve
from gradscope.types import Scores

NAMES = objectives.names()


def pairs(n: int = 7, dim: int = 5, near: float = 0.5) -> tuple[Tensor, Tensor]:
    """Fresh random unit rows of n pairs that resemble each other, float64."""
    image = F.normalize(torch.randn(n, dim, dtype=torch.float64), dim=1)
    return image, F.normalize(image + near * torch.randn(n, dim, dtype=torch.float64), dim=1)


def scored(scale: float = 12.0, **shape: int) -> Scores:
    image, text = pairs(**shape)
    return dense_scores(image, text, torch.tensor(scale, dtype=torch.float64))


def of_logits(logits: Tensor) -> Scores:
    return Scores(cosine=logits, margin=None, logits=logits, scale=torch.ones(()))


def sides(logits: Tensor) -> list[list[float]]:
    """All 2N lines, the positive first."""
    lines = []
    for m in (logits, logits.T):
        lines += [[float(m[i, i]), *(float(m[i, j]) for j in range(len(m)) if j != i)] for i in range(len(m))]
    return lines


def test_siglip_is_the_double_loop() -> None:
    scores = scored()
    n, bias = len(scores.logits), -4.5
    total = 0.0
    for i in range(n):
        for j in range(n):
            z = 1 if i == j else -1
            total += math.log1p(math.exp(-z * (float(scores.logits[i, j]) + bias)))
    objective = SigLIP(bias=bias)
    assert float(objective.loss(scores).mean()) == pytest.approx(total / n, rel=1e-12)
    assert 10 ** float(objective.log10_loss(scores.logits)) == pytest.approx(total / n, rel=1e-12)


def test_siglip_is_open_clips() -> None:
    from open_clip.loss import SigLipLoss

    image, text = (rows.float().requires_grad_() for rows in pairs(9, 6))
    scale, bias = torch.tensor(10.0), torch.tensor(-10.0)
    theirs = SigLipLoss()(image, text, scale, bias)
    expected = torch.autograd.grad(theirs, [image, text])
    objective = SigLIP(bias=-10.0)
    mine = objective.loss(objective.scores(image, text, scale)).mean()
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.autograd.grad(mine, [image, text]), expected)


def test_dcl_leaves_the_positive_out_and_has_no_floor() -> None:
    for scale in (1.0, 60.0):
        scores = scored(scale)
        slow = [math.log(sum(math.exp(x) for x in line[1:])) - line[0] for line in sides(scores.logits)]
        assert float(DCL().loss(scores).mean()) == pytest.approx(sum(slow) / len(slow), rel=1e-12)
    far = of_logits(200 * torch.eye(4, dtype=torch.float64))
    assert float(DCL().loss(far).mean()) == pytest.approx(math.log(3) - 200)
    assert math.isnan(DCL().log10_loss(far.logits))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 4.0])
def test_hardness_weighted_is_the_published_form(beta: float) -> None:
    """In exponentials, where they fit: weights of mean 1, through which the gradient flows."""
    image, text = (rows.requires_grad_() for rows in pairs())
    scale = torch.tensor(3.0, dtype=torch.float64)
    objective = HardnessWeighted(beta=beta)
    mine = objective.loss(objective.scores(image, text, scale)).mean()
    n, logits = len(image), scale * image @ text.T
    off = ~torch.eye(n, dtype=torch.bool)
    lines = []
    for m in (logits, logits.T):
        push = m[off].view(n, n - 1).exp()
        weights = push**beta / (push**beta).mean(dim=1, keepdim=True)
        assert torch.allclose(weights.mean(dim=1), torch.ones(n, dtype=torch.float64))
        pull = m.diagonal().exp()
        lines.append(-(pull / (pull + (weights * push).sum(dim=1))).log())
    slow = torch.stack(lines).mean()
    torch.testing.assert_close(mine, slow)
    torch.testing.assert_close(torch.autograd.grad(mine, [image, text]), torch.autograd.grad(slow, [image, text]))


def test_hardness_weighted_with_beta_0_is_infonce() -> None:
    scores = scored()
    torch.testing.assert_close(HardnessWeighted(beta=0.0).loss(scores), InfoNCE().loss(scores))


def test_hardness_weights_lift_a_row_by_log_of_its_negatives_at_most() -> None:
    logits = torch.tensor([[30.0, 9.0, 0.0, 0.0], [0, 30, 9, 0], [0, 0, 30, 9], [9, 0, 0, 30]], dtype=torch.float64)
    plain, weighted = (10 ** float(o.log10_loss(logits)) for o in (InfoNCE(), HardnessWeighted(beta=50.0)))
    assert plain < weighted < 3.001 * plain


def exact_log10(name: str, logits: Tensor) -> float:
    """With 400 digits."""
    getcontext().prec = 400
    beta, bias = Decimal("0.5"), Decimal(-10)
    total = Decimal(0)
    for line in sides(logits):
        positive, negatives = Decimal(line[0]), [Decimal(x) for x in line[1:]]
        if name == "siglip":
            total += (1 + (-positive - bias).exp()).ln() + sum(((1 + (x + bias).exp()).ln() for x in negatives), Decimal(0))
            continue
        push = sum((x.exp() for x in negatives), Decimal(0))
        if name == "hardness_weighted":
            weight = sum(((beta * x).exp() for x in negatives), Decimal(0))
            push = len(negatives) * sum((((1 + beta) * x).exp() for x in negatives), Decimal(0)) / weight
        total += (1 + push / positive.exp()).ln()
    return float((total / (2 * len(logits))).log10())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"dcl", "hn"}))
@pytest.mark.parametrize("gap", [1.0, 30.0, 100.0, 600.0])
def test_log10_loss_meets_no_floor(name: str, gap: float) -> None:
    logits = torch.randn(4, 4, dtype=torch.float64) - gap * (1 - torch.eye(4, dtype=torch.float64))
    if name == "siglip":
        logits = logits + 10 + gap / 2
    assert float(objectives[name]().log10_loss(logits)) == pytest.approx(exact_log10(name, logits), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [0.0, 8.0, 60.0, 300.0])
def test_residual_is_the_pull_that_the_exact_form_leaves(name: str, gap: float) -> None:
    """Contract of every objective: |dL / d own cell| is the mean of the two residuals of a pair, over N."""
    n = 5
    logits = torch.randn(n, n, dtype=torch.float64) + gap * torch.eye(n, dtype=torch.float64)
    if name == "siglip":
        logits = logits + 10 - gap / 2
    logits.requires_grad_()
    objective = objectives[name]()
    (grad,) = torch.autograd.grad(objective.exact_loss(of_logits(logits)).mean(), logits)
    pull = objective.residual(logits.detach()).view(2, n).mean(dim=0) / n
    torch.testing.assert_close(-grad.diagonal(), pull, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_exact_form_is_the_same_loss(name: str) -> None:
    scores, objective = scored(20.0), objectives[name]()
    torch.testing.assert_close(objective.exact_loss(scores), objective.loss(scores), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stays_so(name: str) -> None:
    logits = torch.randn(4, 4)
    logits[1, 2] = torch.nan
    objective = objectives[name]()
    assert objective.loss(of_logits(logits)).mean().isnan()
    assert objective.log10_loss(logits).isnan()
    assert objective.residual(logits).mean().isnan() or name == "siglip"  # whose residual knows its own cell only


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_has_a_loss_path(name: str) -> None:
    image, text = (rows.float() for rows in pairs())
    objective = objectives[name]()
    path = pair_loss(objective)
    scores = path.scores(image, text, torch.tensor(5.0))
    torch.testing.assert_close(path.loss(scores), objective.loss(scores))


def test_best_bias_is_the_minimum() -> None:
    logits = [20 * (a @ b.T) for a, b in (pairs(6) for _ in range(3))]
    found = best_bias(logits)

    def loss(bias: float) -> float:
        return float(torch.stack([SigLIP(bias=bias).loss(of_logits(m)).mean() for m in logits]).mean())

    assert all(loss(found) <= loss(found + off) for off in (-3.0, -0.1, -1e-3, 1e-3, 0.1, 3.0))
    pushes = sum(float(torch.sigmoid(m + found).sum() - torch.sigmoid(m.diagonal() + found).sum()) for m in logits)
    pulls = sum(float(torch.sigmoid(-m.diagonal() - found).sum()) for m in logits)
    assert pushes == pytest.approx(pulls, rel=1e-9)


def test_best_bias_far_out_and_undefined() -> None:
    apart = 900 * torch.eye(4, dtype=torch.float64) + 50
    # 12 pushes of e^(50 + b) against 4 pulls of e^(-950 - b)
    assert best_bias([apart]) == pytest.approx(-500 - math.log(3) / 2, abs=1e-6)
    apart[0, 1] = torch.nan
    assert math.isnan(best_bias([apart]))


@pytest.mark.parametrize("name", READ_ONLY_OBJECTIVES)
def test_training_refuses_what_is_to_be_read(name: str) -> None:
    with pytest.raises(ValueError, match=f"--objective {name} can be read, not trained.*what-if.*infonce, hn"):
        resolve({}, {"objective.name": name})
