"""Faster steps that must not change a run: fused updates, compiled blocks, channels last, the image cache; alone and together."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file
from torch import Tensor, nn

from gradscope import checkpoint, optim
from gradscope.encoders import speed
from gradscope.encoders.freeze import freeze
from gradscope.encoders.load import load_encoder
from gradscope.recipe import Train, resolve
from gradscope.run_tables import comparable
from gradscope.runlog import Run
from gradscope.train import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


@pytest.fixture
def settings(scenes_folder: Path, small_encoder: Path) -> dict[str, object]:
    return {
        "data.name": str(scenes_folder),
        "encoder.name": str(small_encoder),
        "train.device": "cpu",
        "train.batch_size": 8,
        "train.max_steps": STEPS,
        "train.lr": 1e-3,
        "train.eps": 1e-3,  # a key's bias has no gradient but rounding, which a small eps would make updates of
        "probe.log_grads": True,
        "probe.every": 1,
    }


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs that the compiler sees, without the C++ that takes it half a minute."""
    original = speed.compile_towers
    monkeypatch.setattr(speed, "compile_towers", lambda encoder: original(encoder, "aot_eager"))


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(Run(run).checkpoints()[-1] / "encoder" / "open_clip_model.safetensors")


def readings(run: Path) -> dict[tuple, object]:
    frame = comparable(Run(run).readings)
    frame = frame[~frame["quantity"].isin(["cost", "probe"])]
    return {(row.step, row.quantity, row.term, row.key): row.value for row in frame.itertuples()}


def assert_same_to_rounding(a: Path, b: Path, tolerance: float = 1e-3) -> None:
    """The first step's readings; and the weights, by the size of the three updates of 1e-3 that they went through."""
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor - second[name]).norm() <= 20 * tolerance * STEPS * 1e-3 * tensor.numel() ** 0.5, name
    one, two = readings(a), readings(b)
    assert one.keys() == two.keys()
    assert len(one) > 100
    for key in one:
        if key[0] == 1 and key[1] in ("loss", "gap", "residual") and isinstance(one[key], float):
            assert two[key] == pytest.approx(one[key], rel=tolerance, abs=tolerance / 100), key


def assert_only_the_first_step_compiled(run: Path) -> None:
    """Or none did, where an earlier test of this process had the same shapes."""
    said = [line for line in (run / "console.log").read_text().splitlines() if " compiled " in line and "took" in line]
    assert all(line.startswith("step 1 compiled ") for line in said)
    assert len(said) <= 1


@pytest.mark.parametrize("shape", [(7,), (33, 17), (4, 3, 2, 2), (130, 1000)])
def test_fused_update_equals_the_plain_one(shape):
    """Twin: AdamW by its formulas, in float64."""
    settings = Train(lr=1e-2, weight_decay=0.1)
    module = nn.ParameterDict({"w": nn.Parameter(torch.randn(shape))})
    optimizer = optim.make_optimizer(module, settings)
    assert optimizer.defaults["fused"]
    w = module["w"].detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    decay = settings.weight_decay if w.ndim >= 2 else 0.0
    for k in range(1, 6):
        g = torch.randn(shape)
        module["w"].grad = g
        optimizer.step()
        m, v = settings.beta1 * m + (1 - settings.beta1) * g.double(), settings.beta2 * v + (1 - settings.beta2) * g.double() ** 2
        first, second = m / (1 - settings.beta1**k), v / (1 - settings.beta2**k)
        w = w * (1 - settings.lr * decay) - settings.lr * first / (second.sqrt() + settings.eps)
    assert (module["w"].double() - w).abs().max() <= 1e-6 * max(1.0, float(w.abs().max()))


def test_the_fused_update_does_not_depend_on_threads():
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        module = nn.ParameterDict({"w": nn.Parameter(torch.linspace(-1, 1, 300_007))})
        optimizer = optim.make_optimizer(module, Train(lr=1e-2))
        for k in range(3):
            module["w"].grad = torch.linspace(-1, 1, 300_007).roll(k) * 0.1
            optimizer.step()
        found.append(module["w"].detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_state_from_before_the_fused_update_goes_on_without_it(scaled):
    """The twin is the optimizer that made the state, going on; with a gradient scaler as under fp16."""
    module, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(module.state_dict())
    plain = torch.optim.AdamW([{"params": [twin.weight], "weight_decay": 0.2}, {"params": [twin.bias], "weight_decay": 0.0}])
    taken = optim.make_optimizer(module, Train(weight_decay=0.2))
    for k in range(4):
        if k == 2:
            module.load_state_dict(twin.state_dict())
            checkpoint._load_optimizer(taken, copy.deepcopy(plain.state_dict()))
        pictures = torch.randn(2, 5)
        for model, optimizer in ((module, taken), (twin, plain)):
            optimizer.zero_grad()
            scaler = torch.amp.GradScaler("cpu", enabled=scaled)
            scaler.scale(model(pictures).square().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
    assert not any(group["fused"] for group in taken.param_groups)
    assert torch.equal(module.weight, twin.weight)
    assert torch.equal(module.bias, twin.bias)


def test_a_run_through_the_image_cache_is_the_same_run(settings, tmp_path, monkeypatch):
    """Bit for bit, validation included; the second time from what is kept, by two worker processes."""
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    changes = {"plain": {}, "filling": {"data.cache": "images"}, "kept": {"data.cache": "images", "train.workers": 2}}
    for name, more in changes.items():
        train(resolve({}, {**settings, **more}), tmp_path / name, quiet=True)
    for name in ("filling", "kept"):
        a, b = weights(tmp_path / "plain"), weights(tmp_path / name)
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert Run(tmp_path / "plain").evals["value"].equals(Run(tmp_path / name).evals["value"])
        rows = Run(tmp_path / name).steps
        assert (rows["wait_seconds"] >= 0).all()
        assert (rows["images_per_s"] * (rows["seconds"] + rows["wait_seconds"])).to_numpy() == pytest.approx(8.0)
    assert "200 to decode now" in (tmp_path / "filling" / "console.log").read_text()
    assert "all decoded before" in (tmp_path / "kept" / "console.log").read_text()


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("arm", ["plain", "token", "cached", "checkpointed", "bf16"])
def test_compiled_towers_are_the_same_to_rounding(settings, tmp_path, arm):
    """The probe's second backward goes through compiled graphs, too; names in the checkpoint are those of the plain model."""
    changes = {
        "plain": {"objective.name": "hn"},
        "token": {"objective.framework": "hn_clip"},
        "cached": {"train.accumulate": 2, "train.accumulate_mode": "cached"},
        "checkpointed": {"encoder.checkpoint_activations": True},
        "bf16": {"train.precision": "bf16"},
    }[arm]
    for name, compiled in (("eager", False), ("compiled", True)):
        train(resolve({}, {**settings, **changes, "train.compile": compiled}), tmp_path / name, quiet=True)
    assert "1 of the image tower" in (tmp_path / "compiled" / "console.log").read_text()
    assert "compiled" in Run(tmp_path / "compiled").provenance["faster"]
    assert_only_the_first_step_compiled(tmp_path / "compiled")
    assert_same_to_rounding(tmp_path / "eager", tmp_path / "compiled", 2e-2 if arm == "bf16" else 1e-3)


@pytest.mark.usefixtures("quick_compiler")
def test_blocks_of_one_shape_are_compiled_once(make_encoder):
    config = json.loads(json.dumps(SMALL))
    for tower in ("vision_cfg", "text_cfg"):
        config["model_cfg"][tower]["layers"] = 5
    encoder = load_encoder(str(make_encoder(config=config)))
    before = set(encoder.state_dict())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    speed.speed_up(encoder, compiled=True, channels=False)
    encoder.train()
    pixels, ids = torch.randn(4, 3, 16, 16), torch.randint(1, 2000, (4, 128))
    for _ in range(2):
        (encoder.embed_image(pixels) @ encoder.embed_text(ids).T).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one of each tower"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert set(encoder.state_dict()) == before
    encoder.eval()
    with torch.no_grad():
        plain = load_encoder(str(make_encoder(config=config)))
        plain.load_state_dict(encoder.state_dict())
        assert torch.equal(encoder.embed_image(pixels), plain.eval().embed_image(pixels)), "evaluation is uncompiled"


@pytest.mark.usefixtures("quick_compiler")
def test_a_step_that_compiles_again_is_noticed(make_encoder):
    encoder = load_encoder(str(make_encoder()))
    speed.speed_up(encoder, compiled=True, channels=False)
    encoder.train()
    torch._dynamo.reset()
    watch = speed.Compilations()
    found = []
    for step, width in enumerate((4, 4, 3, 3), start=1):
        encoder.embed_image(torch.randn(width, 3, 16, 16))
        found.append(watch.words(step, 1.25, first=step == 1))
    assert found[0] == "step 1 compiled 1 graph and took 1.2 s; a later run of the same shapes finds them in torch's cache"
    assert found[2].startswith("note: step 3 compiled 1 graph and took 1.2 s: a shape or a mode changed since the first step")
    assert found[1] == found[3] == ""


@pytest.mark.usefixtures("quick_compiler")
def test_what_is_frozen_and_rests_is_not_compiled(make_encoder):
    encoder = load_encoder(str(make_encoder()))
    freeze(encoder, "image")
    assert speed.speed_up(encoder, compiled=True, channels=False) == [
        "blocks that are compiled at the first step, which can take minutes: 1 of the text tower"
    ]


@pytest.mark.slow
def test_the_real_compiler(settings, tmp_path):
    """One tower: its C++ takes the compiler ten seconds."""
    for name, compiled in (("eager", False), ("compiled", True)):
        changes = {"objective.name": "hn", "encoder.freeze": "image", "train.compile": compiled}
        train(resolve({}, {**settings, **changes}), tmp_path / name, quiet=True)
    assert_same_to_rounding(tmp_path / "eager", tmp_path / "compiled")


def test_without_a_compiler_it_is_refused(settings, tmp_path, monkeypatch):
    def none() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    with pytest.raises(ValueError, match=r"train\.compile needs a C\+\+ compiler"):
        train(resolve({}, {**settings, "train.compile": True}), tmp_path / "run", quiet=True)


def test_on_a_gpu_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(ValueError, match=r"train\.compile needs Triton on cuda and found none"):
        speed._check_compiler(torch.device("cuda"))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    speed._check_compiler(torch.device("cuda"))


def test_channels_last_is_the_same_to_rounding(settings, tmp_path):
    for name, last in (("plain", False), ("last", True)):
        train(resolve({}, {**settings, "train.channels_last": last}), tmp_path / name, quiet=True)
    assert "channels last: 1" in Run(tmp_path / "last").provenance["faster"]
    assert_same_to_rounding(tmp_path / "plain", tmp_path / "last")


@pytest.mark.usefixtures("quick_compiler")
def test_resume_with_everything_on_is_bit_for_bit(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    everything = {
        "data.cache": "images", "train.compile": True, "train.channels_last": True, "train.precision": "bf16",
        "encoder.checkpoint_activations": True, "objective.name": "hn", "train.checkpoint_every": 2, "train.max_steps": 5,
    }  # fmt: skip
    recipe = resolve({}, {**settings, **everything})
    train(recipe, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        patch.setattr("gradscope.runlog.RunLog.finish", _killed)
        patch.setattr("gradscope.train._prune", lambda log, keep: None)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "again", quiet=True)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-000005")
    train(recipe, tmp_path / "again", resume=True, quiet=True)
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert readings(tmp_path / "whole") == readings(tmp_path / "again")


def _killed(self: object) -> None:
    raise KeyboardInterrupt
