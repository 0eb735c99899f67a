"""Cached accumulation: the gradient of one wide batch, whatever the objective, the precision and the random layers."""

from __future__ import annotations

import dataclasses
import secrets
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from families import hf_family
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor, nn

from gradscope import cached
from gradscope.data.batching import Batches
from gradscope.data.source import open_data
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.freeze import freeze
from gradscope.encoders.load import load_encoder
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.optim import trainable
from gradscope.parallel import Replica
from gradscope.recipe import resolve
from gradscope.runlog import Run
from gradscope.step_pass import Embed
from gradscope.train import train
from gradscope.types import Batch, Embeddings

pytestmark = pytest.mark.usefixtures("one_thread")


def micro_batches(encoder: DualEncoder, data: object, count: int, size: int, seed: int) -> list[Batch]:
    records = open_data(str(data)).records("train")
    return next(Batches(records=records, encoder=encoder, batch_size=size, accumulate=count, seed=seed).steps(1, 1))


def one_batch(batches: list[Batch]) -> Batch:
    return dataclasses.replace(cached.joined(batches), images={"full": torch.cat([b.images["full"] for b in batches])})


def gradients(encoder: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.double() for name, p in trainable(encoder).items() if p.grad is not None}


def wide_gradient(encoder: DualEncoder, framework: Clip, embeddings: Embeddings) -> tuple[float, dict[str, Tensor]]:
    encoder.zero_grad(set_to_none=True)
    total = total_loss(framework(embeddings))
    total.backward()
    return float(total.detach()), gradients(encoder)


def cached_gradient(encoder, framework, batches, embed=None, factor=1.0, quiet=None, resting=()):
    """As the loop does it; also how far the replay drifted."""
    encoder.zero_grad(set_to_none=True)
    token_scale = encoder.token_log_scale.exp() if framework.needs_tokens else None
    embed = embed or Embed(towers=Replica(encoder=encoder), precision="fp32", tokens=framework.needs_tokens)
    passed = cached.first_pass(embed, batches, encoder.scale(), token_scale, **({"quiet": quiet} if quiet else {}), resting=resting)
    total = total_loss(framework(passed.embeddings))
    (total * factor).backward()
    drift = passed.replay()
    return float(total.detach()), gradients(encoder), float(drift)


def held_together(embed, batches: list[Batch]) -> Embeddings:
    """The slow twin: every graph is kept, so that nothing is replayed; the random numbers are drawn in the same order."""
    parts = [embed(batch) for batch in batches]
    rows = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("image", "text", "image_tokens", "text_tokens", "text_valid")
        if getattr(parts[0], name) is not None
    }
    return dataclasses.replace(parts[0], **rows)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], note: object, rel: float = 1e-5) -> None:
    assert expected.keys() == found.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= rel * wanted.norm() + 1e-2 * rel * largest, (name, note)


# ---- one wide batch


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("token_weight", [0.0, 1.0])
@pytest.mark.parametrize("objective", [InfoNCE(), HN(gamma=0.5)], ids=["infonce", "hn"])
def test_equals_one_wide_batch(scenes_folder, small_encoder, objective, token_weight, count):
    encoder = load_encoder(str(small_encoder))
    framework = Clip(objective=objective, token_weight=token_weight)
    if token_weight:
        encoder.add_token_scale()
    seed = secrets.randbits(32)
    batches = micro_batches(encoder, scenes_folder, count, 8, seed)
    if token_weight:  # fp32 towers differ in the last bit between batch sizes, which at times changes the nearest token of a token
        encoder.double()
        batches = [dataclasses.replace(batch, images={"full": batch.images["full"].double()}) for batch in batches]
    wide_loss, wide = wide_gradient(encoder, framework, encoder.embed(one_batch(batches), tokens=framework.needs_tokens))
    scales = [encoder.model.logit_scale, *([encoder.token_log_scale] if token_weight else [])]
    taken: list[int] = []
    handles = [p.register_post_accumulate_grad_hook(lambda _, i=i: taken.append(i)) for i, p in enumerate(scales)]
    loss, replayed, drift = cached_gradient(encoder, framework, batches)
    for handle in handles:
        handle.remove()
    assert sorted(taken) == list(range(len(scales))), "each scale receives its gradient once"
    assert loss == pytest.approx(wide_loss, rel=1e-6)
    assert drift < 1e-6
    assert_same(replayed, wide, seed)


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_frozen_tower_keeps_its_rows_and_tokens(scenes_folder, small_encoder, tower):
    """In float64, as above; the token term's gradient reaches the other tower through the kept tokens."""
    encoder = load_encoder(str(small_encoder))
    encoder.add_token_scale()
    freeze(encoder.train().double(), tower)
    resting = cached.resting_towers(encoder)
    assert resting == (tower,)
    batches = micro_batches(encoder, scenes_folder, 3, 4, secrets.randbits(32))
    batches = [dataclasses.replace(batch, images={"full": batch.images["full"].double()}) for batch in batches]
    framework = Clip(objective=HN(gamma=0.5), token_weight=1.0)
    _, wide = wide_gradient(encoder, framework, encoder.embed(one_batch(batches), tokens=True))
    _, replayed, drift = cached_gradient(encoder, framework, batches, resting=resting)
    assert drift < 1e-6
    assert_same(replayed, wide, tower)


@pytest.mark.parametrize("sizes", [(3, 5, 1, 7), (9, 2), (1, 1, 1)])
def test_uneven_micro_batches(scenes_folder, small_encoder, sizes):
    encoder = load_encoder(str(small_encoder))
    (whole,) = micro_batches(encoder, scenes_folder, 1, sum(sizes), secrets.randbits(32))
    batches = _pieces(whole, sizes)
    _, wide = wide_gradient(encoder, Clip(), encoder.embed(whole))
    assert_same(cached_gradient(encoder, Clip(), batches)[1], wide, sizes)


def _pieces(whole: Batch, sizes: tuple[int, ...]) -> list[Batch]:
    found, start = [], 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        found.append(
            Batch(
                ids=whole.ids[rows],
                images={"full": whole.images["full"][rows]},
                texts={"full": whole.texts["full"][rows]},
                lengths=whole.lengths[rows],
                captions=whole.captions[rows],
            )
        )
    return found


# ---- random layers


def _with_units(encoder: DualEncoder) -> None:
    encoder.model.visual.conv1 = nn.Sequential(encoder.model.visual.conv1, nn.Dropout(0.3))
    encoder.model.transformer.resblocks[0].attn.dropout = 0.2


class DropPath(nn.Module):
    """Whole rows left out, as timm does it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(x.shape[0], 1, 1, device=x.device).bernoulli_(0.7) / 0.7 if self.training else x


def _with_paths(encoder: DualEncoder) -> None:
    block = encoder.model.visual.transformer.resblocks[0]
    block.mlp = nn.Sequential(block.mlp, DropPath())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("change", [_with_units, _with_paths], ids=["units and attention", "paths"])
def test_random_layers_draw_the_same_in_both_passes(scenes_folder, small_encoder, change, count):
    encoder = load_encoder(str(small_encoder))
    change(encoder)
    _check_random(encoder, scenes_folder, count)


def test_patches_left_out_are_the_same_in_both_passes(scenes_folder, make_encoder):
    vision = {**SMALL["model_cfg"]["vision_cfg"], "patch_dropout": 0.5}
    encoder = load_encoder(str(make_encoder(config={**SMALL, "model_cfg": {**SMALL["model_cfg"], "vision_cfg": vision}})))
    _check_random(encoder, scenes_folder, 3)


def test_dropout_of_a_hugging_face_tower(tmp_path):
    """roberta has dropout of units and of attention weights."""
    encoder, whole = _roberta(tmp_path)
    _check_masks(encoder, _pieces(whole, (5, 7)))


def test_a_hugging_face_tower_equals_one_wide_batch(tmp_path):
    encoder, whole = _roberta(tmp_path)
    encoder.eval().double()  # fp32 towers differ in the last bit between batch sizes
    whole.images["full"] = whole.images["full"].double()
    _, wide = wide_gradient(encoder, Clip(), encoder.embed(whole))
    _, replayed, _ = cached_gradient(encoder, Clip(), _pieces(whole, (5, 4, 3)))
    apart = [(replayed[name] - wide[name]).norm() for name in wide]
    assert torch.stack(apart).norm() < 1e-6 * torch.stack([gradient.norm() for gradient in wide.values()]).norm()


def _roberta(folder: Path) -> tuple[DualEncoder, Batch]:
    model = hf_family("roberta", secrets.randbits(16), folder)
    ids = torch.randint(3, 50, (12, 12))
    ids[:, 7], ids[:, 8:] = 59, 0
    whole = Batch(
        ids=tuple(map(str, range(12))),
        images={"full": torch.randn(12, 3, 32, 32)},
        texts={"full": ids},
        lengths=torch.full((12,), 8),
        captions=("",) * 12,
    )
    return DualEncoder(model, SimpleTokenizer(context_length=12), {}, "roberta"), whole


def _check_random(encoder: DualEncoder, data: object, count: int) -> None:
    _check_masks(encoder, micro_batches(encoder, data, count, 6, secrets.randbits(32)))


def _check_masks(encoder: DualEncoder, batches: list[Batch]) -> None:
    encoder.train()
    cached.check_replayable(encoder)
    seed = secrets.randbits(32)
    torch.manual_seed(seed)
    wide_loss, wide = wide_gradient(encoder, Clip(), held_together(encoder.embed, batches))
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    loss, replayed, drift = cached_gradient(encoder, Clip(), batches)
    assert torch.equal(torch.get_rng_state(), after), "the stream moves on by one pass, not by two"
    assert loss == pytest.approx(wide_loss, rel=1e-6)
    assert drift < 1e-6
    assert_same(replayed, wide, seed)
    assert any(_differs(encoder, batches, seed + more, wide) for more in range(1, 30)), "other masks, another gradient"


def _differs(encoder: DualEncoder, batches: list[Batch], seed: int, gradient: dict[str, Tensor]) -> bool:
    torch.manual_seed(seed)
    _, other = wide_gradient(encoder, Clip(), held_together(encoder.embed, batches))
    return any((other[name] - gradient[name]).norm() > 0.01 * gradient[name].norm() for name in gradient)


def test_masks_are_those_of_one_wide_batch(scenes_folder, small_encoder):
    """The masks that the micro-batches drew, written down and used by one wide batch: that batch's gradient."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks: list[Tensor] = []
            self.given: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.given is not None:
                return x * self.given
            mask = (torch.rand_like(x) < 0.6) / 0.6
            self.masks.append(mask)
            return x * mask

    encoder = load_encoder(str(small_encoder)).train()
    layer = Written()
    block = encoder.model.visual.transformer.resblocks[0]
    block.mlp = nn.Sequential(block.mlp, layer)
    seed = secrets.randbits(32)
    batches = micro_batches(encoder, scenes_folder, 3, 5, seed)
    loss, replayed, _ = cached_gradient(encoder, Clip(), batches)
    first, again = layer.masks[:3], layer.masks[3:]
    assert len(again) == 2, "the last micro-batch keeps its graph"
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=False))
    assert not torch.equal(first[0], first[1])
    layer.given = torch.cat(first)
    wide_loss, wide = wide_gradient(encoder, Clip(), encoder.embed(one_batch(batches)))
    assert loss == pytest.approx(wide_loss, rel=1e-6)
    assert_same(replayed, wide, seed)


# ---- what is refused


def test_batch_norm_is_refused(small_encoder):
    encoder = load_encoder(str(small_encoder))
    encoder.model.visual.conv1 = nn.Sequential(encoder.model.visual.conv1, nn.BatchNorm2d(32))
    with pytest.raises(ValueError, match=r"BatchNorm.*narrow"):
        cached.check_replayable(encoder)


def test_an_encoder_that_draws_elsewhere_is_noticed(scenes_folder, small_encoder):
    """As from Python's own generator, which is not put back: the replay drifts, and training refuses at its first step."""

    class Foreign(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * (5 - 2 * self.calls)  # 3, 1, -1

    encoder = load_encoder(str(small_encoder)).train()
    encoder.model.visual.conv1 = nn.Sequential(encoder.model.visual.conv1, Foreign())
    _, _, drift = cached_gradient(encoder, Clip(), micro_batches(encoder, scenes_folder, 2, 6, 0))
    for precision in cached.DRIFT:
        with pytest.raises(ValueError, match=r"differently the second time.*narrow"):
            cached.check_drift(encoder, torch.tensor(drift), precision)
        cached.check_drift(encoder, torch.tensor(0.5 * cached.DRIFT[precision]), precision)


# ---- precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_equals_its_own_pieces(scenes_folder, small_encoder, precision):
    """The same rounded towers with every graph held; a loss scale multiplies the gradient and nothing else."""
    encoder = load_encoder(str(small_encoder)).train()
    seed = secrets.randbits(32)
    batches = micro_batches(encoder, scenes_folder, 3, 6, seed)
    embed = Embed(towers=Replica(encoder=encoder), precision=precision)
    factor = 1024.0 if precision == "fp16" else 1.0
    encoder.zero_grad(set_to_none=True)
    (total_loss(Clip()(held_together(embed, batches))) * factor).backward()
    wide = gradients(encoder)
    _, replayed, drift = cached_gradient(encoder, Clip(), batches, embed, factor)
    assert drift == 0
    assert_same(replayed, wide, seed, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loop_in_each_precision(scenes_folder, small_encoder, tmp_path, precision):
    """Losses with the probe are those without; the norms it reads are fp32's up to the precision, once the loss scale has settled."""
    base = {"data.name": str(scenes_folder), "encoder.name": str(small_encoder), "train.device": "cpu", "train.batch_size": 8}
    wanted = {
        **base,
        "train.max_steps": 4,
        "train.lr": 0.0,
        "train.accumulate": 3,
        "train.accumulate_mode": "cached",
        "train.precision": precision,
    }
    probed = {"probe.log_grads": True, "probe.every": 1, "probe.set": "full", "probe.second_backward": True}
    train(resolve({}, wanted), tmp_path / "off", quiet=True)
    train(resolve({}, {**wanted, **probed}), tmp_path / "on", quiet=True)
    off, on = Run(tmp_path / "off"), Run(tmp_path / "on")
    assert off.steps["loss"].tolist() == on.steps["loss"].tolist()
    assert off.steps["skipped"].iloc[-1] == 0
    assert on.readings[on.readings["key"] == "failed"].empty
    train(resolve({}, {**wanted, **probed, "train.precision": "fp32"}), tmp_path / "plain", quiet=True)
    for term in ("infonce", "hn"):
        assert norms(on, term) == pytest.approx(norms(Run(tmp_path / "plain"), term), rel=0.05), term


def norms(run: Run, term: str) -> list[float]:
    """Of the gradient over all parameters, by objective: the one that is not trained takes the second backward."""
    rows = run.readings[(run.readings["quantity"] == "gradient") & (run.readings["term"] == term) & (run.readings["key"] == "norm")]
    assert len(rows)
    return [float(value) for value in rows[rows["step"] == rows["step"].max()]["value"]]


# ---- order and memory


def test_quiet_is_left_out_for_the_final_backward_only(scenes_folder, small_encoder):
    """What a reducer over ranks needs: one forward and backward outside ``quiet``, and no backward after it."""
    encoder = load_encoder(str(small_encoder))
    for count in (1, 2, 4):
        events: list[str] = []
        inside = False

        @contextmanager
        def quiet():
            nonlocal inside
            inside = True
            yield
            inside = False

        def embed(batch: Batch) -> Embeddings:
            events.append(f"{'quiet' if inside else 'open'} {'graph' if torch.is_grad_enabled() else 'plain'}")  # noqa: B023
            return encoder.embed(batch)

        cached_gradient(encoder, Clip(), micro_batches(encoder, scenes_folder, count, 4, 0), embed, quiet=quiet)
        assert events[: count - 1] == ["open plain"] * (count - 1)
        again = ["quiet graph"] * (count - 1) + ["open graph"]
        assert events[count - 1 :] == again


def test_one_graph_at_a_time(scenes_folder, small_encoder):
    """When a micro-batch is embedded again, no earlier one's graph is alive."""
    encoder = load_encoder(str(small_encoder))
    graphs: list[weakref.ref] = []
    alive: list[int] = []

    class Saved:
        """Stands for one saved activation."""

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: Tensor) -> Saved:
        kept = Saved(tensor)
        if tensor.numel() > 1:  # the scale's own graph is not passed
            graphs.append(weakref.ref(kept))
        return kept

    def embed(batch: Batch) -> Embeddings:
        alive.append(sum(ref() is not None for ref in graphs))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            return encoder.embed(batch)

    cached_gradient(encoder, Clip(), micro_batches(encoder, scenes_folder, 4, 4, 0), embed)
    assert len(alive) == 4 + 3
    assert alive == [0] * 7
    assert len(graphs) > 4 * 10
