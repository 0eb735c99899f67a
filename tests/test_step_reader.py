"""The probe sees the truth, changes nothing, leaves nothing behind, and waits for the device once."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from host_waits import Waits
from toy import Toy, readings, toy_batch, toy_reader

from gradscope.assembly import make_framework, make_reader
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.metrics import counting, signed_log
from gradscope.objectives.hn import HN
from gradscope.optim import make_optimizer
from gradscope.recipe import resolve
from gradscope.types import Reading, Scores, Step


def train(steps: int, *, probed: bool, trained: str, every: int = 1) -> Toy:
    encoder = Toy(scale=100.0)
    reader = toy_reader(encoder, trained)
    reader.every = every
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
    reader.optimizer = optimizer
    framework = Clip(objective=reader.heads.objectives[trained])
    for index in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        reader.begin(index, 0)
        losses = []
        for micro in range(2):
            batch = toy_batch(6, 10 * index + micro)
            embeddings = encoder.embed(batch)
            terms = framework(embeddings)
            total = total_loss(terms)
            if probed:
                with reader.watching(batch, embeddings, terms, initial_text=embeddings.text.detach()):
                    total.backward()
            else:
                total.backward()
            losses.append(total.detach())
        if probed:
            reader.accumulated(losses)
        optimizer.step()
        if probed:
            reader.updated()
            assert bool(reader.flush()) == ((index - 1) % every == 0)
    return encoder


@pytest.mark.parametrize("trained", ["infonce", "hn"])
@pytest.mark.parametrize("every", [1, 3])
def test_weights_are_bit_identical_with_and_without_the_probe(trained: str, every: int) -> None:
    state = torch.get_rng_state()
    plain, watched = train(20, probed=False, trained=trained), train(20, probed=True, trained=trained, every=every)
    for (name, a), b in zip(plain.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("trained", ["infonce", "hn"])
def test_both_heads_equal_float64_autograd(trained: str) -> None:
    encoder = Toy(scale=20.0)
    batch = toy_batch(7, 2)
    reader = toy_reader(encoder, trained)
    framework = Clip(objective=reader.heads.objectives[trained])
    reader.begin(1, 0)
    embeddings = encoder.embed(batch)
    terms = framework(embeddings)
    with reader.watching(batch, embeddings, terms):
        total_loss(terms).backward()
    step = reader._step
    assert step is not None
    exact = copy.deepcopy(encoder).double()
    wide = copy.copy(batch)
    object.__setattr__(wide, "images", {"full": batch.images["full"].double()})
    for name, objective in reader.heads.objectives.items():
        e = exact.embed(wide)
        scores = objective.scores(e.image, e.text, e.scale)
        target = torch.arange(7)
        loss = (
            torch.nn.functional.cross_entropy(scores.logits, target) + torch.nn.functional.cross_entropy(scores.logits.T, target)
        ) / 2
        grads = torch.autograd.grad(loss, [scores.logits, e.image, e.text, *exact.parameters()])
        head = step.heads[name]
        assert head.param_grads is not None
        mine = [head.logit_grad, head.image_grad, head.text_grad, *head.param_grads]
        for g, h in zip(mine, grads, strict=True):
            assert g is not None
            assert torch.allclose(g.double(), h, rtol=1e-4, atol=1e-6 * float(h.abs().max()))
        halves = head.direction_grads["i2t"] + head.direction_grads["t2i"].T
        assert torch.allclose(halves, head.logit_grad, atol=1e-7)


def test_the_measured_batch_is_the_first_micro_batch() -> None:
    encoder = Toy()
    reader = toy_reader(encoder)
    reader.begin(1, 0)
    first = None
    for micro in range(3):
        batch = toy_batch(5, micro)
        embeddings = encoder.embed(batch)
        terms = Clip()(embeddings)
        first = embeddings.image.detach().clone() if first is None else first
        with reader.watching(batch, embeddings, terms):
            total_loss(terms).backward()
    assert reader._step is not None
    assert torch.equal(reader._step.embeddings.image, first)


def test_hooks_are_gone_and_nothing_is_kept() -> None:
    encoder = Toy()
    reader = toy_reader(encoder)
    reader.begin(1, 0)
    batch = toy_batch(5, 0)
    embeddings = encoder.embed(batch)
    terms = Clip()(embeddings)
    with reader.watching(batch, embeddings, terms):
        total_loss(terms).backward()
    assert not embeddings.image._backward_hooks
    assert terms[0].scores is not None
    assert not terms[0].scores.logits._backward_hooks
    alive = weakref.ref(terms[0].scores.logits)
    reader.flush()
    del terms, embeddings
    gc.collect()
    assert alive() is None


def test_hooks_are_gone_when_the_backward_fails() -> None:
    encoder = Toy()
    reader = toy_reader(encoder)
    reader.begin(1, 0)
    embeddings = encoder.embed(toy_batch(4, 0))
    terms = Clip()(embeddings)
    with pytest.raises(RuntimeError, match="on purpose"), reader.watching(toy_batch(4, 0), embeddings, terms):
        raise RuntimeError("on purpose")
    assert not embeddings.image._backward_hooks


def test_quantities_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (counting, signed_log):  # they take a shorter way on a CPU: here they must take the GPU's
        monkeypatch.setattr(module, "waits_for_nothing", lambda tensor: False)
    encoder = Toy()
    reader = toy_reader(encoder)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
    reader.optimizer = optimizer
    for index in (1, 2):
        optimizer.zero_grad(set_to_none=True)
        reader.begin(index, 0)
        batch = toy_batch(5, index)
        embeddings = encoder.embed(batch)
        terms = Clip()(embeddings)
        with Waits() as syncs:
            with reader.watching(batch, embeddings, terms, initial_text=embeddings.text.detach()):
                total_loss(terms).backward()
            reader.accumulated([total_loss(terms)])
        optimizer.step()
        with syncs:
            reader.updated()
        assert syncs.seen == []
        assert not reader.failures
        reader.flush()


@dataclass(frozen=True, kw_only=True)
class Broken:
    phase: ClassVar[str] = "batch"

    def __call__(self, step: Step) -> list[Reading]:
        raise ZeroDivisionError("broken on purpose")


def test_a_failing_quantity_is_recorded_and_training_goes_on() -> None:
    encoder = Toy()
    reader = toy_reader(encoder)
    reader.quantities = {"broken": Broken(), **reader.quantities}
    reader.begin(1, 0)
    embeddings = encoder.embed(toy_batch(4, 0))
    terms = Clip()(embeddings)
    with reader.watching(toy_batch(4, 0), embeddings, terms):
        total_loss(terms).backward()
    values = readings(reader)
    assert values["broken", "", "failed"] == 1
    assert ("loss", "infonce", "true") in values
    assert "broken on purpose" in reader.failures[0]


def test_without_the_second_backward_the_pair_is_not_measured_and_nothing_else_changes() -> None:
    encoder = Toy()
    full, cheap = toy_reader(encoder), toy_reader(encoder, second_backward=False)
    results = []
    for reader in (full, cheap):
        encoder.zero_grad(set_to_none=True)
        reader.begin(1, 0)
        embeddings = encoder.embed(toy_batch(6, 1))
        terms = Clip()(embeddings)
        with reader.watching(toy_batch(6, 1), embeddings, terms):
            total_loss(terms).backward()
        results.append(readings(reader))
    a, b = results
    assert ("gradient", "pair", "ratio") in a
    assert ("gradient", "pair", "ratio") not in b
    shared = [k for k in b if k[0] != "probe"]
    assert all(a[k] == b[k] or a[k] != a[k] for k in shared)


def test_loss_scale_is_taken_out() -> None:
    encoder = Toy()
    norms = []
    for loss_scale in (1.0, 65536.0):
        encoder.zero_grad(set_to_none=True)
        reader = toy_reader(encoder)
        reader.begin(1, 0)
        embeddings = encoder.embed(toy_batch(6, 1))
        terms = Clip()(embeddings)
        with reader.watching(toy_batch(6, 1), embeddings, terms, loss_scale=loss_scale):
            (total_loss(terms) * loss_scale).backward()
        norms.append(readings(reader)["gradient", "infonce", "norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize(("scale", "limit"), [("learn", 100.0), ("fixed", None)])
def test_a_fixed_scale_is_not_read_against_the_clamp(scale: str, limit: float | None) -> None:
    recipe = resolve({"train": {"scale": scale}, "probe": {"log_grads": True}}, {})
    encoder = Toy()
    reader = make_reader(recipe, encoder, make_framework(recipe), make_optimizer(encoder, recipe.train))  # type: ignore[arg-type]
    assert reader is not None
    assert reader.scale_max == limit


@dataclass(frozen=True, kw_only=True)
class BrokenHN(HN):
    def scores(self, *args: object) -> Scores:  # type: ignore[override]
        raise MemoryError("broken on purpose")


@pytest.mark.parametrize("part", ["before", "after"])
def test_training_goes_on_when_the_probe_itself_fails(part: str) -> None:
    encoder, twin = Toy(), Toy()
    reader = toy_reader(encoder)
    if part == "before":
        reader.heads.objectives["hn"] = BrokenHN()
    else:
        reader.structural = lambda ids: {}[0]
    reader.begin(1, 0)
    for seed in (0, 1):  # the second micro-batch must not be taken for the measured one
        embeddings = encoder.embed(toy_batch(4, seed))
        terms = Clip()(embeddings)
        with reader.watching(toy_batch(4, seed), embeddings, terms):
            total_loss(terms).backward()
        assert not embeddings.image._backward_hooks
        total_loss(Clip()(twin.embed(toy_batch(4, seed)))).backward()
    reader.accumulated([torch.zeros(())])
    reader.updated()
    assert [p.grad.tolist() for p in encoder.parameters()] == [p.grad.tolist() for p in twin.parameters()]  # type: ignore[union-attr]
    assert len(reader.failures) == 1
    rows = {(quantity, key): value for (quantity, _, key), value in readings(reader).items() if quantity != "probe"}
    assert rows == {("heads", "failed"): 1}


def test_a_replay_that_fails_leaves_the_gradient_unmeasured() -> None:
    encoder = Toy()
    reader = toy_reader(encoder)
    reader.begin(1, 0)
    batch = toy_batch(4, 0)
    live = encoder.embed(batch)
    leaves = replace(live, image=live.image.detach().requires_grad_(), text=live.text.detach().requires_grad_())
    terms = Clip()(leaves)
    with reader.watching(batch, leaves, terms, replayed=True):
        total_loss(terms).backward()
        reader.replaying(replace(live, image=live.image.detach(), text=live.text.detach()), slice(0, 4))  # no graph: raises
    assert len(reader.failures) == 1
    values = readings(reader)
    assert values["second backward", "", "failed"] == 1
    assert ("gradient", "hn", "norm") not in values
    assert ("loss", "hn", "true") in values
