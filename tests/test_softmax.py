"""True losses and residuals against 60-digit arithmetic, over the whole range of gaps."""

import math

import mpmath
import pytest
import torch

from gradscope.metrics import softmax
from gradscope.types import Scores

mpmath.mp.dps = 60


def gap_logits(size: int, gap: float, scale: float = 100.0, seed: int = 0) -> torch.Tensor:
    """fp32 logits of a batch whose positives lead their hardest negative by about ``gap`` in cosine."""
    generator = torch.Generator().manual_seed(seed)
    cosine = 0.02 * torch.rand(size, size, generator=generator)
    return scale * (cosine + gap * torch.eye(size))


def exact_rows(logits: torch.Tensor) -> tuple[list, list]:
    """Loss and residual per row, 60 digits, from the fp32 numbers as they are."""
    losses, residuals = [], []
    for i, row in enumerate(logits.tolist()):
        terms = [mpmath.exp(mpmath.mpf(value)) for value in row]
        negatives = mpmath.fsum(t for j, t in enumerate(terms) if j != i)
        residuals.append(negatives / (negatives + terms[i]))
        losses.append(mpmath.log1p(negatives / terms[i]))
    return losses, residuals


@pytest.mark.parametrize("size", [2, 16, 128])
@pytest.mark.parametrize("gap", [0.001, 0.3, 0.9, 1.0, 1.2])
def test_residual_and_loss_equal_sixty_digits(size: int, gap: float) -> None:
    logits = gap_logits(size, gap)
    losses, residuals = exact_rows(logits)
    for mine, exact in zip(softmax.residual(logits).tolist(), residuals, strict=True):
        assert abs(mine / exact - 1) < 1e-12
    columns, _ = exact_rows(logits.T)
    mean = (mpmath.fsum(losses) + mpmath.fsum(columns)) / (2 * size)
    assert float(softmax.log10_batch_loss(logits)) == pytest.approx(float(mpmath.log10(mean)), abs=1e-12)


def test_log_softplus_has_no_floor_and_no_ceiling() -> None:
    x = torch.tensor([-900.0, -300.0, -40.0, -39.9, -1.0, 0.0, 1.0, 25.0, 300.0], dtype=torch.float64)
    exact = [float(mpmath.log(mpmath.log1p(mpmath.exp(mpmath.mpf(v))))) for v in x.tolist()]
    assert softmax.log_softplus(x).tolist() == pytest.approx(exact, rel=1e-13)


def test_effective_number() -> None:
    w = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert float(softmax.effective_number(w)) == pytest.approx(float(w.sum() ** 2 / (w * w).sum()), rel=1e-12)
    assert float(softmax.effective_number(w * 1e-200)) == pytest.approx(float(softmax.effective_number(w)), rel=1e-12)
    assert float(softmax.effective_number(torch.ones(7))) == pytest.approx(7)
    assert math.isnan(float(softmax.effective_number(torch.zeros(3))))


def test_shares_of_the_residual_mass() -> None:
    logits = torch.randn(6, 6, generator=torch.Generator().manual_seed(2)) * 3
    shares = softmax.negative_log_shares(logits).exp()
    p = torch.softmax(logits.double(), dim=1)
    off = p - torch.diag(p.diagonal())
    expected = off / off.sum(dim=1, keepdim=True)
    assert torch.allclose(shares, expected, atol=1e-14)


def test_a_nan_stays_a_nan() -> None:
    logits = torch.randn(4, 4)
    logits[1, 2] = math.nan
    assert math.isnan(float(softmax.log10_batch_loss(logits)))
    assert softmax.residual(logits).isnan().tolist() == [False, True, False, False]


def test_an_infinite_negative_has_infinite_odds() -> None:
    cosine = torch.randn(4, 4)
    cosine[1, 2] = math.inf
    anchors = softmax.dense_anchors(Scores(cosine=cosine, margin=None, logits=5.0 * cosine, scale=torch.tensor(5.0)))
    for direction, logits in softmax.per_direction(5.0 * cosine).items():
        assert torch.allclose(anchors.log_odds[direction], softmax.log_odds(logits))
        assert anchors.log_odds[direction].isinf().sum() == 1
