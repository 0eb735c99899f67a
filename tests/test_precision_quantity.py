"""The quantity ``precision`` against autograd in float64 and plain counting."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from toy import Toy, measured, toy_batch

from gradscope.objectives.scores import LOSS_FORMS
from gradscope.quantities.precision import Precision, exact_logit_grad
from gradscope.types import DIRECTIONS, Scores, Step

KEYS = {"loss_error", "loss_relative_error", "gradient_error", "gradient_cosine", "moved_bf16", "moved_fp16"}


def directed_loss(scores, directions, form="plain"):
    """The mean of the given directions per anchor: [N]."""
    rows = LOSS_FORMS[form]
    return torch.stack([rows(scores.logits if direction == "i2t" else scores.logits.T) for direction in directions]).mean(dim=0)


def read(step: Step) -> dict[tuple[str, str], float]:
    return {(r.term, r.key): float(r.value) for r in Precision()(step)}  # type: ignore[arg-type]


def truth(step: Step, term: str) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient at the rows, by autograd in float64, in residual form."""
    head, at = step.heads[term], step.embeddings
    image, text = (t.double().clone().requires_grad_() for t in (at.image, at.text))
    margin = 0.0 if head.scores.margin is None else head.scores.margin.double()
    logits = at.scale.double() * (image @ text.T + margin)
    if head.scores.excluded is not None:
        logits = logits.masked_fill(head.scores.excluded, -math.inf)
    scores = Scores(cosine=logits, margin=None, logits=logits, scale=at.scale)
    loss = directed_loss(scores, head.directions, "residual").mean()
    return float(loss.detach()), list(torch.autograd.grad(loss, [image, text]))


@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.parametrize("scale", [5.0, 90.0])
def test_against_autograd_in_float64(size: int, scale: float) -> None:
    seed = secrets.randbits(20)
    step, values = measured(Toy(scale=scale, seed=seed), toy_batch(size, seed), "hn", 0.5)
    found = read(step)
    assert {key for _, key in found} == KEYS
    for term, head in step.heads.items():
        loss, exact = truth(step, term)
        assert values["precision", term, "loss_error"] == found[term, "loss_error"]
        assert found[term, "loss_error"] == pytest.approx(abs(float(head.loss.double()) - loss), rel=1e-4, abs=1e-15)
        assert found[term, "loss_relative_error"] == pytest.approx(abs(float(head.loss.double()) - loss) / loss, rel=1e-4, abs=1e-12)
        ours = torch.cat([head.image_grad.flatten(), head.text_grad.flatten()]).double()
        b = torch.cat([g.flatten() for g in exact])
        assert found[term, "gradient_error"] == pytest.approx(float((ours - b).norm() / b.norm()), abs=2e-6)
        assert found[term, "gradient_cosine"] == pytest.approx(float(ours @ b / (ours.norm() * b.norm())), abs=1e-7)
        logits = head.scores.logits.double()
        for name, dtype in (("moved_bf16", torch.bfloat16), ("moved_fp16", torch.float16)):
            off = [abs(float(x.to(dtype).double()) - float(x)) for x in logits.flatten()]
            near = sum(abs(o - 0.1) < 1e-4 for o in off)
            assert abs(found[term, name] * size**2 - sum(o > 0.1 for o in off)) <= near + 1e-9


@pytest.mark.parametrize("directions", [DIRECTIONS, ("i2t",), ("t2i",)])
def test_the_exact_logit_gradient(directions: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    logits = (torch.randn(7, 7, generator=generator, dtype=torch.float64) * 30).requires_grad_()
    loss = directed_loss(Scores(cosine=logits, margin=None, logits=logits, scale=torch.ones(())), directions, "residual").mean()
    (expected,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(exact_logit_grad(logits.detach(), directions), expected, rtol=1e-10, atol=0)


def test_a_lost_pull_is_a_gradient_error_and_a_printed_zero_is_a_relative_loss_error_of_one() -> None:
    step, _ = measured(Toy(scale=1.0), toy_batch(8, 0))
    rows = F.normalize(torch.eye(8) + 0.01, dim=1)
    head = step.heads["infonce"]
    logits = (30.0 * rows @ rows.T).requires_grad_()
    loss = directed_loss(Scores(cosine=logits, margin=None, logits=logits, scale=torch.tensor(30.0)), head.directions).mean()
    (grad,) = torch.autograd.grad(loss, logits)
    scores = replace(head.scores, logits=logits.detach(), scale=torch.tensor(30.0))
    made = replace(
        step,
        embeddings=replace(step.embeddings, image=rows, text=rows, scale=torch.tensor(30.0)),
        heads={"infonce": replace(head, scores=scores, loss=loss.detach(), logit_grad=grad)},
    )
    assert float(loss.detach()) == 0.0
    assert grad.diagonal().abs().max() == 0
    found = read(made)
    assert found["infonce", "loss_relative_error"] == pytest.approx(1.0)
    assert found["infonce", "gradient_error"] > 0.3
    assert found["infonce", "gradient_cosine"] < 0.95


def test_excluded_cells_count_nowhere() -> None:
    step, _ = measured(Toy(scale=40.0), toy_batch(6, 1))
    excluded = torch.zeros(6, 6, dtype=torch.bool)
    excluded[0, 1] = excluded[1, 0] = True
    head = step.heads["infonce"]
    logits = head.scores.logits.masked_fill(excluded, -math.inf).requires_grad_()
    loss = directed_loss(replace(head.scores, logits=logits), head.directions).mean()
    (grad,) = torch.autograd.grad(loss, logits)
    masked = replace(head, scores=replace(head.scores, logits=logits.detach(), excluded=excluded), loss=loss.detach(), logit_grad=grad)
    made = replace(step, heads={"infonce": masked})
    found, (true, _) = read(made), truth(made, "infonce")
    assert found["infonce", "loss_error"] == pytest.approx(abs(float(loss.detach().double()) - true), rel=1e-3, abs=1e-12)
    assert found["infonce", "gradient_error"] < 1e-3
    assert math.isfinite(found["infonce", "moved_bf16"])


def test_nan_stays_nan() -> None:
    step, _ = measured(Toy(), toy_batch(5, 2))
    image = step.embeddings.image.clone()
    image[0, 0] = math.nan
    found = read(replace(step, embeddings=replace(step.embeddings, image=image)))
    assert all(math.isnan(value) for value in found.values())
