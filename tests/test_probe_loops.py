"""Loops as people write them, each with the probe and without: the weights are the same to the bit, the training goes on, and what
cannot be read is said."""

from __future__ import annotations

import copy
import io
import math
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from open_clip.loss import ClipLoss, SigLipLoss
from test_probe import Towers, batch, hooks_of, info_nce, norm, sgd, true_gradient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import ModelOutput

import gradscope
from gradscope.attach.local_norm import LocalNorm
from gradscope.probe import Probe
from gradscope.runlog import Run

pytestmark = pytest.mark.usefixtures("one_thread")

Loop = Callable[[Any, Probe | None], None]
LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {}
STEPS = 4


def loop(**settings: Any) -> Callable[[Loop], Loop]:
    def add(function: Loop) -> Loop:
        LOOPS[function.__name__] = (function, settings)
        return function

    return add


def step_of(model: Any, optimizer: Any, seed: int, size: int = 6) -> None:
    optimizer.zero_grad()
    info_nce(*model(*batch(seed, size))[:3]).backward()
    optimizer.step()


def both_ways(name: str, make: Callable[[], nn.Module] = Towers, **more: Any) -> tuple[Probe, nn.Module]:
    """Trains a model without the probe and one with it; every weight must be the same."""
    function, settings = LOOPS[name]
    plain, watched = make(), make()
    function(plain, None)
    with Probe(watched, **{"probe_set": "full", "every": 1, **settings, **more}) as probe:
        function(watched, probe)
    for (key, a), b in zip(plain.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), key
    return probe, watched


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


# ---- optimizers


@loop()
def two_optimizers(model: Towers, probe: Probe | None) -> None:
    first = torch.optim.AdamW([*model.first.parameters(), model.logit_scale], lr=1e-2)
    second = torch.optim.AdamW([*model.second.parameters(), *model.words.parameters()], lr=1e-3)
    for step in range(STEPS):
        info_nce(*model(*batch(step))).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert probe is None or (probe._index, probe._open_step) == (step + 1, False)


@loop()
def scale_left_out_of_both(model: Towers, probe: Probe | None) -> None:
    first = torch.optim.SGD(model.first.parameters(), lr=1e-2)
    second = torch.optim.SGD([*model.second.parameters(), *model.words.parameters()], lr=1e-3)
    for step in range(STEPS):
        model.zero_grad()
        info_nce(*model(*batch(step))).backward()
        first.step()
        second.step()


@loop()
def second_optimizer_every_second_step(model: Towers, probe: Probe | None) -> None:
    first = torch.optim.SGD([*model.first.parameters(), model.logit_scale], lr=1e-2)
    second = torch.optim.SGD([*model.second.parameters(), *model.words.parameters()], lr=1e-3)
    for step in range(STEPS):
        info_nce(*model(*batch(step))).backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()


@loop()
def parameter_groups_and_a_new_optimizer(model: Towers, probe: Probe | None) -> None:
    groups = [
        {"params": list(model.first.parameters()), "lr": 1e-2},
        {"params": [*model.second.parameters(), *model.words.parameters()]},
    ]
    optimizer: Any = torch.optim.AdamW(groups, lr=1e-3)
    for step in range(STEPS):
        if step == 2:
            optimizer = sgd(model)
        step_of(model, optimizer, step)


class Lookahead(torch.optim.Optimizer):
    """Calls another optimizer, and is one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@loop()
def optimizer_around_another(model: Towers, probe: Probe | None) -> None:
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(STEPS):
        step_of(model, optimizer, step)


@loop()
def lbfgs(model: Towers, probe: Probe | None) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    for step in range(STEPS):

        def closure(seed: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = info_nce(*model(*batch(seed)))
            loss.backward()
            return loss

        optimizer.step(closure)


@loop()
def optimizer_in_backward(model: Towers, probe: Probe | None) -> None:
    optimizers: dict[Tensor, Any] = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    for step in range(STEPS):
        info_nce(*model(*batch(step))).backward()
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", ["two_optimizers", "second_optimizer_every_second_step", "scale_left_out_of_both"])
def test_several_optimizers_make_one_step(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both_ways(name, output=tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.steps["step"].tolist() == [1, 2, 3, 4]
    rows = run.readings
    moved = rows[(rows["quantity"] == "optimizer") & (rows["key"] == "update_ratio.image")]["value"]
    assert len(moved) == STEPS
    assert (moved > 0).all()
    assert not (rows["key"] == "failed").any()
    assert "no embeddings" not in said(capsys)


def test_the_moments_of_two_adams_are_read_together() -> None:
    probe, _ = both_ways("two_optimizers")
    one = Towers()
    with Probe(one, probe_set="full", every=1) as expected:
        optimizer = torch.optim.AdamW(
            [
                {"params": [*one.first.parameters(), one.logit_scale], "lr": 1e-2},
                {"params": [*one.second.parameters(), *one.words.parameters()], "lr": 1e-3},
            ]
        )
        for step in range(STEPS):
            step_of(one, optimizer, step)
    keys = [key for key in expected.last if key[0] == "optimizer"]
    assert len(keys) > 5
    assert {k: probe.last[k] for k in keys} == {k: pytest.approx(expected.last[k], rel=1e-6) for k in keys}


def test_a_new_optimizer_in_the_middle_is_found() -> None:
    probe, model = both_ways("parameter_groups_and_a_new_optimizer")
    assert probe._index == STEPS
    assert probe.last["optimizer", "total", "update_ratio.text"] > 0
    assert hooks_of(model, torch.optim.SGD(model.parameters(), lr=1.0)) == 0


def test_an_optimizer_inside_another_is_one_step() -> None:
    probe, _ = both_ways("optimizer_around_another")
    assert probe._index == STEPS
    assert probe.last["optimizer", "total", "update_ratio.text"] > 0


def test_the_first_evaluation_of_a_closure_is_the_step() -> None:
    probe, _ = both_ways("lbfgs")
    assert probe._index == STEPS
    assert probe._samples == STEPS * 6
    exact = norm(true_gradient(Towers()))
    model = Towers()
    with Probe(model, probe_set="full", every=1) as probe:
        LOOPS["lbfgs"][0](model, None)
        assert probe.reader.stamps.startswith("micro-batch 1/1")
    model = Towers()
    with Probe(model, probe_set="full", every=STEPS) as probe:
        LOOPS["lbfgs"][0](model, None)
    assert probe.last["accumulation", "total", "norm"] == pytest.approx(exact, rel=1e-5)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)


def test_an_optimizer_inside_the_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """G14: there is never a whole gradient; what the embeddings know is read, the rest is named."""
    probe, _ = both_ways("optimizer_in_backward", output=tmp_path / "run")
    assert Run(tmp_path / "run").steps["step"].tolist() == [1, 2, 3, 4]
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    assert not {"gradient", "accumulation", "optimizer"} & {quantity for quantity, _, _ in probe.last}
    assert said(capsys).count("steps inside the backward") == 1


# ---- gradients and their zeroing


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["after the step", "before the forward", "before the backward"])
def test_gradients_may_be_zeroed_anywhere_and_anyhow(when: str, set_to_none: bool) -> None:
    """The trained objective's gradient is what the backward leaves in ``.grad``, if that was empty when the backward set out."""
    model = Towers(seed=secrets.randbelow(1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Probe(model, probe_set="full", every=1) as probe:
        for step in range(3):
            exact = norm(true_gradient(model, step))
            if when == "before the forward":
                optimizer.zero_grad(set_to_none)
            loss = info_nce(*model(*batch(step)))
            if when == "before the backward":
                optimizer.zero_grad(set_to_none)
            loss.backward()
            optimizer.step()
            if when == "after the step":
                optimizer.zero_grad(set_to_none)
            assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5), step


def test_a_gradient_that_was_not_zeroed_is_not_taken_for_the_batch_s_own() -> None:
    model = Towers()
    with Probe(model, probe_set="full", every=1) as probe:
        for step in range(2):
            info_nce(*model(*batch(step))).backward()
            sgd(model).step()
    assert ("gradient", "infonce", "norm") not in probe.last
    assert probe.last["accumulation", "total", "norm"] > 0


@loop()
def two_views_one_backward(model: Towers, probe: Probe | None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (info_nce(*model(*batch(step))) + info_nce(*model(*batch(step + 50)))).backward()
        optimizer.step()


def test_two_forwards_in_one_backward_share_their_gradient() -> None:
    """Each softmax is whole, the gradient over the parameters is of both and belongs to neither."""
    probe, _ = both_ways("two_views_one_backward")
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    assert ("gradient", "infonce", "norm") not in probe.last
    assert probe.last["accumulation", "total", "norm"] > 0


@loop()
def validation_with_gradient(model: Towers, probe: Probe | None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        model.eval()
        info_nce(*model(*batch(step + 70))).item()  # forgotten no_grad
        with torch.no_grad():
            model(*batch(step + 80))
        with torch.inference_mode():
            model(*batch(step + 90))
        model.train()
        step_of(model, optimizer, step)


def test_an_evaluation_that_forgot_no_grad_is_not_measured() -> None:
    probe, _ = both_ways("validation_with_gradient")
    twin = Towers()
    with Probe(twin, probe_set="full", every=1) as expected:
        optimizer = sgd(twin)
        for step in range(STEPS):
            step_of(twin, optimizer, step)
    for key in (("loss", "infonce", "trained"), ("gradient", "infonce", "norm"), ("accumulation", "total", "norm")):
        assert probe.last[key] == pytest.approx(expected.last[key], rel=1e-6), key


@loop()
def uneven_last_micro_batch(model: Towers, probe: Probe | None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        for size in (6, 6, 3):
            (info_nce(*model(*batch(step + size, size))) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_samples_are_counted_in_rows() -> None:
    probe, _ = both_ways("uneven_last_micro_batch", every=3)
    assert probe._samples == STEPS * 15
    assert "micro-batch 1/3; width 6" in probe.reader.stamps


@loop(every=2)
def accumulated_without_gradient_of_its_own(model: Towers, probe: Probe | None) -> None:
    """A gradient of the parameters is asked for beside the backward (GradNorm, PCGrad)."""
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = info_nce(*model(*batch(step)))
        torch.autograd.grad(loss, list(model.first.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- what is trained


@loop()
def siglip(model: Towers, probe: Probe | None) -> None:
    loss, optimizer = SigLipLoss(), sgd(model)
    bias = torch.tensor(-3.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(*model(*batch(step)), bias).backward()
        optimizer.step()


def test_siglip_is_not_taken_for_infonce(capsys: pytest.CaptureFixture[str]) -> None:
    probe, _ = both_ways("siglip")
    assert probe.last["hooks", "infonce", "agreement"] < 0.99
    words = said(capsys)
    assert words.count("is not that of 'infonce'") == 2  # once in full, and how often at the end
    assert "4 times" in words
    assert "trained=''" in words


class OneTower(nn.Module):
    """Text and text, one tower; each call makes one side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.head(self.words(ids).mean(1)), dim=1)


@loop()
def shared_tower(model: Any, probe: Probe | None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        first, second = model(batch(step)[1]), model(batch(step + 30)[1])
        if probe is not None:
            probe.watch(first, second, 20.0, token_ids=batch(step + 30)[1])
        optimizer.zero_grad()
        info_nce(first, second, torch.tensor(20.0)).backward()
        optimizer.step()


def test_one_tower_for_both_sides() -> None:
    probe, _ = both_ways("shared_tower", OneTower)
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    twin = OneTower()
    loss = info_nce(twin(batch(0)[1]).double(), twin(batch(30)[1]).double(), torch.tensor(20.0))
    exact = norm(list(torch.autograd.grad(loss, list(twin.parameters()))))
    with Probe(twin, probe_set="full", every=STEPS) as probe:
        LOOPS["shared_tower"][0](twin, probe)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)


class LossOnly(Towers):
    def forward(self, features: Tensor, ids: Tensor) -> Any:
        return info_nce(*super().forward(features, ids))


def test_a_model_that_returns_its_loss_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = LossOnly()
    with Probe(model, every=1) as probe:
        for step in range(5):
            model(*batch(step)).backward()
            sgd(model).step()
    assert not probe.last
    words = said(capsys)
    assert words.count("Give the module that the loop calls, loss=, or use probe.watch") == 2
    assert "5 times" in words


class Low(nn.Module):
    """A trained addition to a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = Towers().requires_grad_(False)
    model.first[0], model.second[0] = Low(model.first[0]), Low(model.second[0])  # type: ignore[arg-type]
    return model


def in_double() -> nn.Module:
    return Towers().double()


def in_bfloat16() -> nn.Module:
    return Towers().bfloat16()


@loop()
def plain(model: Any, probe: Probe | None) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    dtype = next(p.dtype for p in model.parameters())
    for step in range(STEPS):
        features, ids = batch(step)
        optimizer.zero_grad()
        info_nce(*model(features.to(dtype), ids)).backward()
        optimizer.step()


@loop()
def in_evaluation_mode(model: Any, probe: Probe | None) -> None:
    model.eval()
    LOOPS["plain"][0](model, probe)


@pytest.mark.parametrize("make", [adapted, in_double, in_bfloat16, Towers])
@pytest.mark.parametrize("name", ["plain", "in_evaluation_mode"])
def test_kinds_of_parameters(name: str, make: Callable[[], nn.Module]) -> None:
    probe, model = both_ways(name, make, second_backward=True)
    half = make is in_bfloat16
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-3 if half else 1e-9)
    whole = probe.last["accumulation", "total", "norm"]
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(whole, rel=2e-2 if half else 1e-5)
    assert not [key for key in probe.last if key[2] == "failed"]
    if make is adapted:
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        assert probe.reader.frozen_entries == frozen > 0


@loop()
def batches_of_one(model: Any, probe: Probe | None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        step_of(model, optimizer, step, size=1)


@loop()
def nan_embeddings(model: Any, probe: Probe | None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        features, ids = batch(step)
        features[0, 0] = math.nan if step == 1 else math.inf
        optimizer.zero_grad()
        info_nce(*model(features, ids)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["batches_of_one", "nan_embeddings"])
def test_degenerate_batches_are_read_without_a_failure(name: str) -> None:
    probe, _ = both_ways(name, second_backward=True)
    assert not [key for key in probe.last if key[2] == "failed"]
    loss = probe.last["loss", "infonce", "trained"]
    assert math.isnan(loss) if name == "nan_embeddings" else loss == 0.0


# ---- mixed precision


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_skipped_first_step_is_recorded_though_no_optimizer_was_ever_seen(tmp_path: Path, told: bool, optimizers: int) -> None:
    """G12: the scaler skips the very first steps, before any hook of an optimizer could fire."""
    model = Towers()
    parts = [list(model.parameters())] if optimizers == 1 else [list(model.first.parameters()), [*model.words.parameters()]]
    all_of_them = [torch.optim.SGD(part, lr=0.1) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    given = all_of_them[0] if told else None
    with Probe(model, optimizer=given, scaler=scaler, output=tmp_path / "run", every=1) as probe:
        for step in range(3):
            scaler.scale(info_nce(*model(*batch(step))) * (float("inf") if step == 0 else 1.0)).backward()
            for optimizer in all_of_them:
                scaler.step(optimizer)
                if not told:
                    optimizer.zero_grad()
            scaler.update()
            model.zero_grad()
    steps = Run(tmp_path / "run").steps
    assert steps["skipped"].tolist() == [1, 0, 0]
    assert probe._index == 3


@pytest.mark.parametrize("fused", [False, True])
def test_unscaled_and_clipped_by_the_loop(fused: bool) -> None:
    """G13, G14: the loop calls ``unscale_`` and clips; both norms are of the gradient itself."""
    model = Towers(seed=secrets.randbelow(1000))
    exact = norm(true_gradient(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with Probe(model, scaler=scaler, probe_set="full", every=1) as probe:
        scaler.scale(info_nce(*model(*batch(0)))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    assert probe.last["accumulation", "total", "norm"] == pytest.approx(exact, rel=1e-5)
    assert probe.last["accumulation", "total", "norm_clipped"] == pytest.approx(0.01, rel=1e-3)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("kind", ["disabled", "unused"])
def test_a_scaler_that_does_nothing(tmp_path: Path, kind: str) -> None:
    model = Towers()
    exact = norm(true_gradient(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "unused")
    with Probe(model, scaler=scaler, probe_set="full", output=tmp_path / "run", every=1) as probe:
        loss = info_nce(*model(*batch(0)))
        optimizer = sgd(model)
        if kind == "unused":
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert probe.last["accumulation", "total", "norm"] == pytest.approx(exact, rel=1e-5)
    assert Run(tmp_path / "run").steps["loss_scale"].isna().all()


# ---- what a forward pass may look like (G8)


@dataclass
class Rows:
    image_embeds: Tensor
    text_embeds: Tensor
    logit_scale: Tensor


class Shaped(Towers):
    """Returns a form, is called by keywords."""

    def forward(self, features: Tensor, ids: Tensor) -> Any:
        image, text, scale = super().forward(features, ids)
        if self.form == "dataclass":
            return Rows(image, text, scale)
        if self.form == "without scale":
            return {"image_embeds": image, "text_embeds": text}
        return Output(image_embeds=image, text_embeds=text, logit_scale=scale) if self.form == "model output" else (image, text, scale)


@dataclass
class Output(ModelOutput):  # type: ignore[misc]
    image_embeds: Tensor | None = None
    text_embeds: Tensor | None = None
    logit_scale: Tensor | None = None


@pytest.mark.parametrize("form", ["dataclass", "model output", "without scale", "tuple"])
def test_outputs_of_every_form_and_inputs_by_keyword(form: str) -> None:
    """G8: a module's full backward hook would not fire on these; tensor hooks do."""
    model = Shaped(form, seed=secrets.randbelow(1000))
    exact = norm(true_gradient(cast(Towers, twin_of(model))))
    with Probe(model, probe_set="full", every=1) as probe:
        features, ids = batch(0)
        output = model(features=features, ids=ids)
        named = output if isinstance(output, dict) else vars(output) if form == "dataclass" else {}
        image, text = (named["image_embeds"], named["text_embeds"]) if named else output[:2]
        info_nce(image, text, model.logit_scale.exp()).backward()
        sgd(model).step()
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)
    assert probe.last["zeros", "infonce", "structural.parameters"] > 0  # the ids were found among the keywords


def twin_of(model: nn.Module) -> nn.Module:
    twin = Towers()
    twin.load_state_dict(model.state_dict())
    return twin


@loop()
def rows_changed_in_place(model: Any, probe: Probe | None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        image, text, scale = model(*batch(step))
        image.mul_(2.0)
        text += 0.0
        image.div_(image.detach().norm(dim=1, keepdim=True))
        optimizer.zero_grad()
        info_nce(image, text, scale).backward()
        optimizer.step()


def test_rows_may_be_changed_in_place_afterwards() -> None:
    """G8: a module's full backward hook would raise here, since it hands out views."""
    probe, _ = both_ways("rows_changed_in_place")
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-6)
    assert not [key for key in probe.last if key[2] == "failed"]


def test_attached_after_the_first_compiled_call() -> None:
    """G16, G17: hooks that come later are seen as well, and break no graph."""
    torch._dynamo.reset()
    model, counters = Towers(), torch._dynamo.utils.counters
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    counters.clear()
    compiled(*batch(9))
    frames = counters["stats"]["unique_graphs"]
    with Probe(cast(nn.Module, compiled), probe_set="full", every=1) as probe:
        step_of(compiled, sgd(model), 0)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(norm(true_gradient(Towers())), rel=1e-5)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == frames  # nothing was compiled again


def test_hooks_on_the_parameters_of_a_compiled_module_fire() -> None:
    """G15: tensor hooks for the norm before averaging, also when they come after the first call."""
    torch._dynamo.reset()
    model = Towers()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(*batch(9))
    local = LocalNorm(list(model.parameters()))
    info_nce(*compiled(*batch(0))).backward()
    local.remove()
    assert float(local.by_rank(1.0, torch.device("cpu"))[0]) == pytest.approx(norm(true_gradient(Towers())), rel=1e-5)
    assert not any(p._backward_hooks for p in model.parameters())


# ---- the cost of a step that is not probed


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_step_that_is_not_probed_runs_no_operation_of_its_own() -> None:
    """No kernel, no copy, and so no wait for a device: the same operations in the same order as without the probe."""
    found = []
    for probed in (False, True):
        model = Towers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with Probe(model, probe_set="full", every=100) if probed else nullcontext():
            step_of(model, optimizer, 0)
            with Operations() as operations:
                for step in range(1, 4):
                    step_of(model, optimizer, step)
        found.append(operations.names)
    assert [(a, b) for a, b in zip(*found, strict=False) if a != b] == []
    assert len(found[0]) == len(found[1]) > 50


# ---- attaching


def test_two_probes_at_once_in_any_order_of_leaving() -> None:
    model, scaler = Towers(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = sgd(model)
    first, second = (Probe(model, scaler=scaler, probe_set=kind, every=1).attach() for kind in ("full", "default"))

    def one_step(seed: int, factor: float = 1.0) -> None:
        scaler.scale(info_nce(*model(*batch(seed))) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    one_step(0)
    assert first.last["loss", "infonce", "trained"] == second.last["loss", "infonce", "trained"]
    assert first.last["accumulation", "total", "norm"] == second.last["accumulation", "total", "norm"]
    first.detach()
    one_step(1, math.inf)
    assert (first._index, second._index) == (1, 2)
    assert not second._open_step  # the second still sees that the scaler skipped
    second.detach()
    assert "step" not in scaler.__dict__
    assert hooks_of(model, optimizer) == 0


def interrupted(model: nn.Module, optimizer: Any, probe: Probe, part: int) -> None:
    with probe:
        for step in range(2):
            step_of(model, optimizer, 2 * part + step)
        info_nce(*model(*batch(0))).backward()
        raise KeyboardInterrupt


def test_attached_again_the_run_goes_on(tmp_path: Path) -> None:
    model = Towers()
    probe = Probe(model, output=tmp_path / "run", every=1)
    for part in range(3):
        optimizer = sgd(model)
        with pytest.raises(KeyboardInterrupt):
            interrupted(model, optimizer, probe, part)
    run = Run(tmp_path / "run")
    assert not run.done
    assert len(run.steps) == 6
    assert hooks_of(model, optimizer) == 0


def test_training_goes_on_after_an_exception_in_the_middle_of_a_step() -> None:
    model, optimizer = Towers(), None
    with Probe(model, probe_set="full", every=1) as probe:
        optimizer = sgd(model)
        rows = model(*batch(0))  # and the batch is given up
        rows[0].register_hook(_refuse)
        with pytest.raises(RuntimeError, match="on purpose"):
            info_nce(*rows).backward()
        exact = norm(true_gradient(model, 1))
        step_of(model, optimizer, 1)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)
    assert hooks_of(model, optimizer) == 0


def _refuse(gradient: Tensor) -> None:
    raise RuntimeError("on purpose")


def test_a_backward_that_never_comes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = Towers()
    with Probe(model, every=1):
        model(*batch(0))
        model.logit_scale.exp().backward()
        sgd(model).step()
    assert "no backward passed the embeddings" in said(capsys)


def test_copies_and_files_of_a_watched_model_carry_no_probe(tmp_path: Path) -> None:
    """Averages of weights, checkpoints, whole pickled models."""
    model = Towers()
    with Probe(model, output=tmp_path / "run", probe_set="full", every=1) as probe:
        optimizer = sgd(model)
        step_of(model, optimizer, 0)
        keys = set(model.state_dict())
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (twin, torch.load(file, weights_only=False)):
            assert set(other.state_dict()) == keys
            before = probe._micro
            step_of(other, torch.optim.SGD(other.parameters(), lr=0.1), 5)
            assert (probe._micro, probe._index) == (before, 1)
        step_of(model, optimizer, 1)
        average.update_parameters(model)
        copy.deepcopy(optimizer)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
    assert probe._index == 2
    assert b"gradscope" not in file.getvalue()


def test_an_output_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Probe(Towers(), output=tmp_path / "file" / "run")
    with pytest.raises(ValueError, match="cannot be written"):
        Probe(Towers(), output=tmp_path / "file")
    with pytest.raises(ValueError, match="no run to continue"):
        Probe(Towers(), output=tmp_path / "none", first_step=5)


def test_an_output_that_fails_later_does_not_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Towers()
    with Probe(model, output=tmp_path / "run", every=1) as probe:
        (tmp_path / "run").write_text("in the way")
        optimizer = sgd(model)
        for step in range(3):
            step_of(model, optimizer, step)
    assert probe.last["loss", "infonce", "trained"] > 0
    assert said(capsys).count("could not be written") == 2


# ---- compiled, wrapped, checkpointed


def test_compiled_towers_inside_an_eager_model() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    found = []
    for compiled in (False, True):
        model = Towers()
        if compiled:
            model.first = torch.compile(model.first, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
            model.second = torch.compile(model.second, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
        counters.clear()
        with Probe(model, probe_set="full", every=1) as probe:
            step_of(model, sgd(model), 0)
            step_of(model, sgd(model), 1)
        found.append(probe.last)
        assert not counters["graph_break"]
    for key in (("loss", "infonce", "trained"), ("gradient", "infonce", "norm"), ("accumulation", "total", "norm")):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-5), key


def test_a_module_compiled_in_place_is_named_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    model = Towers()
    model.compile(backend="aot_eager")
    with Probe(model, every=1) as probe:
        step_of(model, sgd(model), 0)
    assert not probe.last
    assert "compiled after attaching, or in place" in said(capsys)
    with Probe(model, every=1) as probe:
        image, text, scale = model(*batch(1))
        probe.watch(image, text, scale)
        info_nce(image, text, scale).backward()
        sgd(model).step()
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)


def test_a_loss_module_is_seen_though_the_model_was_compiled_in_place() -> None:
    torch._dynamo.reset()
    model, loss = Towers(), ClipLoss()
    exact = norm(true_gradient(model))
    model.compile(backend="aot_eager")
    with Probe(model, loss=loss, probe_set="full", every=1) as probe:
        loss(*model(*batch(0))).backward()
        sgd(model).step()
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)


def wrapped_for_checkpointing() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Towers()
    model.first, model.second = checkpoint_wrapper(model.first), checkpoint_wrapper(model.second)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("make", [wrapped_for_checkpointing, lambda: nn.DataParallel(Towers())])
def test_wrapped_modules(make: Callable[[], nn.Module]) -> None:
    probe, _ = both_ways("plain", make)
    expected, _ = both_ways("plain")
    for key in (("loss", "infonce", "trained"), ("gradient", "infonce", "norm"), ("zeros", "infonce", "structural.parameters")):
        assert probe.last[key] == pytest.approx(expected.last[key], rel=1e-6), key
    assert {key for key in probe.last if key[0] == "gradient"} == {key for key in expected.last if key[0] == "gradient"}


@pytest.mark.parametrize("probe_set", ["loss", "default", "full"])
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_every_loop_trains_the_same_weights(name: str, probe_set: str) -> None:
    make = OneTower if name == "shared_tower" else Towers
    for every in (1, 3):
        both_ways(name, make, probe_set=probe_set, every=every, second_backward=probe_set == "full")


def test_the_public_name() -> None:
    assert gradscope.Probe is Probe
