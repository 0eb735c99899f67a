"""``gradscope.Probe`` in loops that are not ours: it sees the truth, changes nothing, and leaves nothing behind.

G1-G24 name facts about hooks and precision; each test says which it holds.
"""

from __future__ import annotations

import copy
import gc
import secrets
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import mebibytes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.scores import symmetric_loss
from gradscope.probe import Probe
from gradscope.runlog import Run

WORDS, LENGTH, WIDTH, DEPTH = 40, 9, 16, 8


class Towers(nn.Module):
    """Two small towers of any two kinds: a matrix of features, and token ids. Returns what ``form`` says."""

    def __init__(self, form: str = "tuple", checkpointed: str = "", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Sequential(nn.Linear(12, WIDTH), nn.GELU(), nn.Linear(WIDTH, DEPTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, DEPTH))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))
        self.form, self.checkpointed = form, checkpointed

    def tower(self, which: nn.Module, inputs: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(which, inputs, use_reentrant=self.checkpointed == "reentrant")  # type: ignore[no-any-return]
        return which(inputs)  # type: ignore[no-any-return]

    def forward(self, features: Tensor, ids: Tensor) -> Any:
        image = F.normalize(self.tower(self.first, features), dim=1)
        text = F.normalize(self.tower(self.second, self.words(ids).mean(dim=1)), dim=1)
        if self.form == "dict":
            return {"image_features": image, "text_features": text, "logit_scale": self.logit_scale.exp()}
        return image, text, self.logit_scale.exp()


def batch(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=generator), torch.randint(0, WORDS // 2, (size, LENGTH), generator=generator)


def info_nce(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * image.float() @ text.float().T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 1,
    micro: int = 1,
    clip: float = 0.0,
    context: Callable[[], Any] = nullcontext,
    call: Any = None,
) -> None:
    """A loop as anybody writes it."""
    for step in range(steps):
        for k in range(micro):
            with context():
                output = (model if call is None else call)(*batch(100 * step + k))
            if isinstance(output, dict):
                output = tuple(output.values())
            (info_nce(*output) / micro).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def true_gradient(model: Towers, seed: int = 0) -> list[Tensor]:
    """Of the batch's loss, by float64 autograd."""
    wide = copy.deepcopy(model).double()
    wide.form = "tuple"
    features, ids = batch(seed)
    loss = info_nce_wide(*wide(features.double(), ids))
    return list(torch.autograd.grad(loss, list(wide.parameters())))


def info_nce_wide(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return symmetric_loss(InfoNCE().scores(image, text, scale)).mean()


def norm(gradient: list[Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradient]).norm())


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_one_line_in_a_plain_loop_reads_the_true_numbers(form: str) -> None:
    """Everything found: embeddings, scale, parameters, optimizer (G8: dict outputs are seen too)."""
    model = Towers(form, seed=secrets.randbelow(1000))
    exact = true_gradient(model)
    features, ids = batch(0)
    output = model(features, ids)
    rows = output.values() if isinstance(output, dict) else output
    loss = info_nce_wide(*(t.detach().double() for t in rows))
    with gradscope.Probe(model, probe_set="full", every=1) as probe:
        run(model, sgd(model))
    assert probe.last["loss", "infonce", "trained"] == pytest.approx(float(loss), rel=1e-5)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(norm(exact), rel=1e-5)
    assert probe.last["accumulation", "total", "norm"] == pytest.approx(norm(exact), rel=1e-5)
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    assert probe.last["hooks", "infonce", "factor"] == pytest.approx(1.0, rel=1e-5)
    unseen = WORDS - len(ids.unique())
    entries = sum(p.numel() for p in model.parameters())
    assert probe.last["zeros", "infonce", "structural.parameters"] == pytest.approx(unseen * WIDTH / entries)


@pytest.mark.parametrize("probe_set", ["loss", "default", "full"])
def test_weights_are_bit_identical_with_and_without_it(probe_set: str) -> None:
    plain, watched = Towers(), Towers()
    state = torch.get_rng_state()
    run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps=20, micro=2, clip=0.5)
    with Probe(watched, probe_set=probe_set, every=3, second_backward=probe_set == "full"):
        run(watched, torch.optim.AdamW(watched.parameters(), lr=1e-2), steps=20, micro=2, clip=0.5)
    for (name, a), b in zip(plain.named_parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(state, torch.get_rng_state())


def test_before_and_after_clipping_have_different_names_and_accumulation_is_seen_as_a_factor() -> None:
    """G9, G10, G14: the sum over micro-batches is read, not one contribution; clipping happens before the optimizer's hook."""
    model = Towers()
    exact = norm(true_gradient(model, 0))
    both = [a + b for a, b in zip(true_gradient(model, 0), true_gradient(model, 1), strict=True)]
    with Probe(model, probe_set="full", every=1) as probe:
        run(model, sgd(model), micro=2, clip=0.01)
    assert probe.last["accumulation", "total", "norm"] == pytest.approx(norm(both) / 2, rel=1e-5)
    assert probe.last["accumulation", "total", "norm_clipped"] == pytest.approx(0.01, rel=1e-4)
    assert probe.last["hooks", "infonce", "factor"] == pytest.approx(0.5, rel=1e-5)
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scale_is_taken_out_and_a_skipped_step_is_recorded(tmp_path: Any, fused: bool) -> None:
    """G11, G12, G13: readings under a GradScaler are unscaled, fused or not, and nothing calls ``unscale_`` for the user."""
    model = Towers()
    exact = norm(true_gradient(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    with Probe(model, optimizer=optimizer, scaler=scaler, output=tmp_path / "run", probe_set="full", every=1) as probe:
        for step in range(3):
            scaler.scale(info_nce(*model(*batch(step))) * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 0:
                assert probe.last["accumulation", "total", "norm"] == pytest.approx(exact, rel=1e-4)
                assert probe.last["accumulation", "total", "norm_clipped"] == pytest.approx(exact, rel=1e-4)
                assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-4)
                assert probe.last["hooks", "infonce", "factor"] == pytest.approx(1.0, rel=1e-4)
    from gradscope.runlog import Run

    steps = Run(tmp_path / "run").steps
    assert steps["skipped"].tolist() == [0, 1, 0]
    assert steps["loss_scale"].tolist() == [1024.0, 2048.0, 1024.0]
    assert scaler.step.__func__ is torch.amp.GradScaler.step  # type: ignore[attr-defined]


def test_a_loss_scale_that_nobody_told_shows_as_the_factor() -> None:
    model = Towers()
    with Probe(model, probe_set="default", every=1) as probe:
        (info_nce(*model(*batch(0))) * 4096).backward()
        sgd(model).step()
    assert probe.last["hooks", "infonce", "factor"] == pytest.approx(4096.0, rel=1e-4)


def test_another_loss_lowers_the_agreement() -> None:
    model = Towers()
    with Probe(model, every=1) as probe:
        image, text, scale = model(*batch(0))
        (info_nce(image, text, scale) + 10 * (image * text.roll(1, 0)).sum()).backward()
        sgd(model).step()
    assert probe.last["hooks", "infonce", "agreement"] < 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """G4: half-precision towers; the readings are of the loss in fp32 and say so."""
    model = Towers()
    with Probe(model, probe_set="full", every=1, second_backward=True) as probe:
        run(model, sgd(model), context=lambda: torch.autocast("cpu", dtype))
    assert probe.last["hooks", "infonce", "agreement"] > 0.999
    assert probe.last["gradient", "infonce", "norm"] == pytest.approx(norm(true_gradient(Towers())), rel=2e-2)
    assert ("gradient", "pair", "ratio") in probe.last


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_checkpointing_is_seen_once(kind: str) -> None:
    """G18: recomputation runs forward hooks again; the step has one measured batch and the same numbers."""
    plain, other = Towers(), Towers(checkpointed=kind)
    found = []
    for model in (plain, other):
        with Probe(model, probe_set="full", every=1) as probe:
            features, ids = batch(0)
            info_nce(*model(features.requires_grad_(), ids)).backward()
            assert probe._micro == 1
            sgd(model).step()
        found.append(probe.last)
    # What reentrant checkpointing hides from the graph belongs to a tower by its name only.
    same = [key for key in found[0] if key[0] not in ("probe", "sketch") and not key[2].startswith(("norm.", "update_ratio."))]
    assert {key: found[0][key] for key in same} == {key: pytest.approx(found[1][key], rel=1e-6, abs=1e-12, nan_ok=True) for key in same}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_module_has_no_graph_break_and_the_same_readings(fullgraph: bool) -> None:
    """G15-G17: the hook sits outside the compiled region."""
    torch._dynamo.reset()
    plain, model = Towers(), Towers()
    with Probe(plain, probe_set="full", every=1) as expected:
        run(plain, sgd(plain), steps=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    counters = torch._dynamo.utils.counters
    counters.clear()
    with Probe(compiled, probe_set="full", every=1) as probe:
        run(model, sgd(model), steps=2, call=compiled)
    assert not counters["graph_break"]
    for key in (("loss", "infonce", "trained"), ("gradient", "infonce", "norm"), ("zeros", "infonce", "structural.parameters")):
        assert probe.last[key] == pytest.approx(expected.last[key], rel=1e-5), key
    assert probe.reader.names == expected.reader.names  # no prefix of the wrapper


class OnePass(torch.autograd.Function):
    """Lets no second backward through, as graphs do whose compiler reuses what they saved."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("compiled with donated buffers")
        return gradient


def test_a_graph_that_lets_no_second_backward_through_costs_that_reading_only(capsys: pytest.CaptureFixture[str]) -> None:
    plain, model = Towers(), Towers()
    once = model.register_forward_hook(lambda module, inputs, output: (OnePass.apply(output[0]), *output[1:]))
    last = []
    for towers in (plain, model):
        with Probe(towers, probe_set="full", every=1, second_backward=True) as probe:
            run(towers, sgd(towers), steps=2)
        last.append(probe.last)
    once.remove()
    lost = {key for key in last[0] if key not in last[1]}
    assert ("gradient", "hn", "norm") in lost
    assert {key[1] for key in lost} <= {"hn", "pair"}
    assert last[1]["second backward", "", "failed"] == 1
    for key in (("gradient", "infonce", "norm"), ("loss", "hn", "true"), ("zeros", "infonce", "entries.parameters")):
        assert last[1][key] == last[0][key], key
    said = capsys.readouterr().err.replace("\n", " ")
    assert "step 1: 'second backward' of the probe failed: RuntimeError: compiled with donated buffers" in said
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_hook_that_the_compiler_made_a_no_op_is_said_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    model = Towers()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with Probe(model, every=1) as probe:
        run(model, sgd(model), steps=2, call=torch.compile(model, backend="aot_eager"))
    assert not counters["graph_break"]
    assert not probe.last
    assert "no embeddings were seen" in capsys.readouterr().err.replace("\n", " ")


def test_forwards_without_gradient_are_not_counted() -> None:
    """G23: accumulation with cached features embeds everything once without gradient."""
    model = Towers()
    with Probe(model, every=1) as probe:
        with torch.no_grad():
            for seed in range(3):
                model(*batch(seed))
        info_nce(*model(*batch(0))).backward()
        assert probe._micro == 1
        sgd(model).step()


def test_a_frozen_tower_leaves_half_of_the_gradient_to_see() -> None:
    model = Towers()
    for parameter in [*model.second.parameters(), *model.words.parameters()]:
        parameter.requires_grad_(False)
    with Probe(model, probe_set="full", every=1, second_backward=True) as probe:
        run(model, sgd(model))
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    assert probe.last["gradient", "infonce", "norm"] > 0


def test_a_batch_that_was_found_and_is_then_told_is_one_batch(tmp_path: Path) -> None:
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Probe(model, every=1, probe_set="loss", output=tmp_path / "run") as probe:
        for step in range(2):
            image, text, scale = model(*batch(step))  # these three are found in the forward pass
            probe.watch(image, text, scale)
            info_nce(image, text, scale).backward()
            optimizer.step()
            optimizer.zero_grad()
    stamps = {words for words in Run(tmp_path / "run").readings["stamps"] if words}
    assert stamps
    assert all("micro-batch 1/1; width 6" in words for words in stamps), stamps


def test_told_rows_that_are_not_normalised_yet() -> None:
    model = Towers()
    features, ids = batch(3)
    with Probe(model, probe_set="default", every=1) as probe:
        for _ in range(1):
            image, text = 3 * model.first(features), 0.5 * model.second(model.words(ids).mean(1))
            probe.watch(image, text, 20.0, captions=[f"c{i}" for i in range(6)])
            info_nce(F.normalize(image), F.normalize(text), torch.tensor(20.0)).backward()
            sgd(model).step()
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-9)
    assert probe.last["hooks", "infonce", "factor"] == pytest.approx(1.0, rel=1e-5)
    assert probe.last["captions", "", "exact_duplicates"] == 0


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    from torch.optim import optimizer as module

    per_module = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
    per_parameter = sum(len(p._backward_hooks or {}) + len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return per_module + per_parameter + own + len(module._global_optimizer_pre_hooks)


def test_fifty_cycles_with_exceptions_leave_no_hook_behind() -> None:
    model = Towers()
    optimizer = sgd(model)
    before = hooks_of(model, optimizer)
    for cycle in range(50):
        with pytest.raises(RuntimeError, match="on purpose") if cycle % 2 else nullcontext(), Probe(model, every=1):
            image, text, scale = model(*batch(cycle))
            if cycle % 4 == 1:
                raise RuntimeError("on purpose")
            info_nce(image, text, scale).backward()
            if cycle % 4 == 3:
                raise RuntimeError("on purpose")
            optimizer.step()
    assert hooks_of(model, optimizer) == before == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_over_two_hundred_steps() -> None:
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Probe(model, probe_set="full", every=1, second_backward=True):
        run(model, optimizer, steps=20)
        gc.collect()
        tensors = sum(isinstance(o, Tensor) for o in gc.get_objects())
        before = mebibytes("VmRSS")
        run(model, optimizer, steps=200)
        gc.collect()
        assert sum(isinstance(o, Tensor) for o in gc.get_objects()) <= tensors + 2
        assert mebibytes("VmRSS") - before < 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "count from 1"),
        ({"trained": "siglip"}, "'siglip'"),
        ({"margin": "frozen"}, "live, fixed or centred"),
        ({"directions": ("both",)}, "'i2t', 't2i' or both"),
        ({"second_backward": True}, "only 'full'"),
        ({"probe_set": "ful"}, "Did you mean 'full'"),
    ],
)
def test_bad_settings_are_one_clear_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Probe(Towers(), **settings)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        Probe(Towers().requires_grad_(False))


def test_a_folder_that_holds_something_is_refused_before_training(tmp_path: Any) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        Probe(Towers(), output=tmp_path)


def test_a_run_is_continued(tmp_path: Any) -> None:
    from gradscope.runlog import Run

    model = Towers()
    with Probe(model, output=tmp_path / "run", every=1):
        run(model, sgd(model), steps=3)
    with Probe(model, output=tmp_path / "run", every=1, first_step=3):
        run(model, sgd(model), steps=2)
    assert Run(tmp_path / "run").steps["step"].tolist() == [1, 2, 3, 4]
    assert Run(tmp_path / "run").done


class Methods(Towers):
    """Towers that the loop calls one by one, as with open_clip's ``encode_image`` and ``encode_text``; forward returns logits."""

    def encode_image(self, features: Tensor) -> Tensor:
        return self.first(features)  # type: ignore[no-any-return]

    def encode_text(self, ids: Tensor) -> Tensor:
        return self.second(self.words(ids).mean(dim=1))  # type: ignore[no-any-return]

    def forward(self, features: Tensor, ids: Tensor) -> Any:
        image, text = F.normalize(self.encode_image(features), dim=1), F.normalize(self.encode_text(ids), dim=1)
        logits = self.logit_scale.exp() * image @ text.T
        return logits, logits.T


@pytest.mark.parametrize("how", ["methods", "logits"])
@pytest.mark.parametrize("size", [6, DEPTH])
def test_towers_that_are_called_one_by_one_and_logits_that_are_no_embeddings(how: str, size: int) -> None:
    model, seed = Methods(), secrets.randbelow(1000)
    exact = norm(true_gradient(Towers(), seed)) if size == 6 else None
    with Probe(model, probe_set="full", every=1) as probe:
        for _ in range(2):
            features, ids = batch(seed, size)
            if how == "methods":
                image, text = model.encode_image(features), model.encode_text(ids)
                info_nce(F.normalize(image, dim=1), F.normalize(text, dim=1), model.logit_scale.exp()).backward()
            else:
                logits, _ = model(features, ids)
                target = torch.arange(size)
                ((F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2).backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()
            model.zero_grad()
    assert probe._index == 2
    assert probe._micro == 0
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-6)
    assert probe.last["hooks", "infonce", "factor"] == pytest.approx(1.0, rel=1e-5)
    if exact is not None:
        assert probe.last["gradient", "infonce", "norm"] == pytest.approx(exact, rel=1e-5)
    assert not any(name.startswith("encode") for name in model.__dict__)


def test_a_locked_tower_that_is_called_without_gradient() -> None:
    """Locked-image tuning, with an evaluation in between, which is no step."""
    model = Methods()
    with Probe(model, every=1) as probe:
        for seed in range(2):
            features, ids = batch(seed)
            with torch.no_grad():
                model.encode_image(features[:3]), model.encode_text(ids[:3])
                image = F.normalize(model.encode_image(features), dim=1)
            info_nce(image, F.normalize(model.encode_text(ids), dim=1), model.logit_scale.exp()).backward()
            sgd(model).step()
    assert probe._index == 2
    assert probe.last["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-6)


def test_logits_without_any_embeddings_are_said_to_be_logits(capsys: pytest.CaptureFixture[str]) -> None:
    class Logits(Towers):
        def forward(self, features: Tensor, ids: Tensor) -> Any:
            image, text, scale = super().forward(features, ids)
            logits = scale * image @ text.T
            return logits, logits.T

    model = Logits()
    with Probe(model, every=1) as probe:
        model(*batch(0))[0].sum().backward()
        sgd(model).step()
    assert not probe.last
    assert "returned logits, not embeddings" in " ".join(capsys.readouterr().err.split())


def test_towers_are_told_by_the_graph_and_not_by_their_names() -> None:
    model = Towers()
    exact = dict(zip([name for name, _ in model.named_parameters()], true_gradient(model), strict=True))
    with Probe(model, probe_set="full", every=1) as probe:
        run(model, sgd(model))
    for tower, parts in {"image": ("first",), "text": ("second", "words"), "scale": ("logit_scale",)}.items():
        expected = norm([gradient for name, gradient in exact.items() if name.startswith(parts)])
        assert probe.last["gradient", "infonce", f"norm.{tower}"] == pytest.approx(expected, rel=1e-5), tower


def test_recall_of_the_loop_goes_into_the_log(tmp_path: Any) -> None:
    from gradscope.runlog import Run

    model = Towers()
    with Probe(model, output=tmp_path / "run", every=1) as probe:
        run(model, sgd(model), steps=2)
        probe.log_recall(i2t=0.25, t2i=0.5)
        with pytest.raises(ValueError, match="fraction"):
            probe.log_recall(i2t=25, t2i=50)
    evals = Run(tmp_path / "run").evals
    assert evals[["step", "direction", "metric", "value"]].to_numpy().tolist() == [[2, "i2t", "R@1", 0.25], [2, "t2i", "R@1", 0.5]]


def test_a_loop_that_never_steps_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    model = Towers()
    with Probe(model, every=1):
        info_nce(*model(*batch(0))).backward()
    assert "no optimizer stepped" in " ".join(capsys.readouterr().err.split())


def test_readings_reach_a_sink(tmp_path: Any) -> None:
    model = Towers()
    with Probe(model, output=tmp_path / "run", every=1, sinks="tensorboard"):
        run(model, sgd(model), steps=2)
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
    with pytest.raises(ValueError, match="give output"):
        Probe(model, sinks="tensorboard")
    with pytest.raises(ValueError, match="unknown sink"):
        Probe(model, sinks="tensorbord", output=tmp_path / "other")
