"""Freezing and activation checkpointing: what trains, what it costs, and that neither changes a gradient or a reading."""

from __future__ import annotations

import copy
import secrets
import warnings
from typing import Any

import pytest
import torch
from conftest import SMALL
from families import HF, IMAGE, TEXTS, TIMM, hf_family, image_family, text_family
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor, nn
from toy import readings, toy_reader

from gradscope.cached import check_replayable, first_pass, joined, resting_towers
from gradscope.encoders.dual import DualEncoder, evaluating
from gradscope.encoders.freeze import checkpoint_activations, freeze, image_tower, text_tower_parts
from gradscope.encoders.load import load_encoder
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.types import Batch, Embeddings

SEED = secrets.randbits(31)
CHOICES = ["image", "text", "all-but-last-0", "all-but-last-1", "all-but-last-2", "image,all-but-last-1", "text, all-but-last-2"]


def encoder_of(model: Any) -> DualEncoder:
    return DualEncoder(model, SimpleTokenizer(context_length=12), {}, "mine").eval()


def encoder(kind: str = "class token") -> DualEncoder:
    return encoder_of(image_family(kind, SEED))


def batch_of(size: int, image_size: int = 32) -> Batch:
    random = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, 50, (size, 12), generator=random)
    ids[:, 7], ids[:, 8:] = 59, 0
    return Batch(
        ids=tuple(map(str, range(size))),
        images={"full": torch.randn(size, 3, image_size, image_size, generator=random)},
        texts={"full": ids},
        lengths=torch.full((size,), 8),
        captions=("",) * size,
    )


def gradients(model: nn.Module, found: Embeddings) -> dict[str, Tensor | None]:
    """Of a loss that is no constant in any output."""
    model.zero_grad(set_to_none=True)
    weights = torch.randn(2, *found.image.shape, generator=torch.Generator().manual_seed(SEED))
    (
        ((found.image @ found.text.T) * found.scale).logsumexp(1).sum() + (found.image * weights[0] + found.text * weights[1]).sum()
    ).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trains(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# ---- what trains


def expected_names(what: str) -> set[str]:
    """Of the class-token CLIP with three blocks in each tower, by their names."""
    names = dict(encoder().named_parameters())
    parts = [part.strip() for part in what.split(",")]
    last = next((int(part.rsplit("-", 1)[1]) for part in parts if part.startswith("all")), None)
    found = set()
    for name in names:
        tower = "image" if ".visual." in name else "scale" if "logit" in name else "text"
        block = int(name.split("resblocks.")[1].split(".")[0]) if "resblocks." in name else None
        behind = any(word in name for word in ("ln_post", "visual.proj", "ln_final", "text_projection"))
        late = block is not None and last is not None and block >= 3 - last
        if tower == "scale" or (tower not in parts and (last is None or behind or late)):
            found.add(name)
    return found


@pytest.mark.parametrize("what", CHOICES)
def test_exactly_the_named_parts_train(what):
    model = encoder()
    everything = {name: parameter.numel() for name, parameter in model.named_parameters()}
    summary = freeze(model, what)
    assert trains(model) == expected_names(what)
    left = sum(everything[name] for name in trains(model))
    assert sum(summary.trainable.values()) == left
    assert sum(summary.frozen.values()) == sum(everything.values()) - left
    assert summary.trainable["rest"] == 1
    assert summary.frozen["image"] + summary.trainable["image"] == sum(n for name, n in everything.items() if "visual" in name)
    assert what in str(summary)
    assert f"{summary.trainable['image']:,}" in str(summary)


def same_gradients(found: Any, expected: Any, names: Any) -> None:
    """Per tensor, by the norm of the difference: in fp32 a single entry that nearly cancels may be off by more of itself."""
    largest = max(float(expected[name].norm()) for name in names)
    for name in names:
        error = float((found[name] - expected[name]).norm())
        assert error <= 1e-5 * float(expected[name].norm()) + 1e-6 * largest, (name, error, SEED)


@pytest.mark.parametrize("what", CHOICES)
def test_what_trains_gets_the_gradient_it_had_and_the_rest_gets_none(what):
    whole, part = encoder(), encoder()
    freeze(part, what)
    batch = batch_of(4)
    expected, found = gradients(whole, whole.embed(batch)), gradients(part, part.embed(batch))
    same_gradients(found, expected, trains(part))
    assert all(gradient is None for name, gradient in found.items() if name not in trains(part))


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_frozen_tower_costs_no_backward(tower):
    model = encoder()
    freeze(model, tower)
    found = model.train().embed(batch_of(3))
    other = {"image": "text", "text": "image"}[tower]
    assert getattr(found, tower).grad_fn is None
    assert getattr(found, other).grad_fn is not None
    assert getattr(found, tower).requires_grad, "the gradient at the embeddings can still be read"
    with torch.no_grad():
        assert not getattr(model.embed(batch_of(3)), tower).requires_grad
    module = model.model.visual.transformer.resblocks[0] if tower == "image" else model.model.transformer.resblocks[0]
    inputs = []
    module.register_forward_hook(lambda _, given, out: inputs.append((given[0].requires_grad, out.requires_grad)))
    model.embed(batch_of(3))
    assert inputs == [(False, False)]


def test_a_frozen_first_part_stores_nothing():
    model = encoder()
    freeze(model, "all-but-last-1")
    graph: list[bool] = []
    for block in (*model.model.visual.transformer.resblocks, *model.model.transformer.resblocks):
        block.register_forward_hook(lambda _, given, out: graph.append(out.requires_grad))
    model.embed(batch_of(3))
    assert graph == [False, False, True] * 2


def test_refusals():
    model = encoder()
    before = trains(model)
    for what, message in {
        "all-but-last-4": r"asks for more blocks than the image tower of encoder 'mine' has; N is at most 3",
        "image,all-but-last-9": r"the text tower .* N is at most 3",
        "image,text": r"leaves nothing of encoder 'mine' to train",
        "picture": r"knows image, text and all-but-last-N .* got 'picture'",
        "all-but-last-": r"got 'all-but-last-'",
        "all-but-last--1": r"got 'all-but-last--1'",
        "": r"got ''",
        "all-but-last-1,all-but-last-2": r"more than once",
    }.items():
        with pytest.raises(ValueError, match=message):
            freeze(model, what)
        assert trains(model) == before, what
    freeze(model, "image")
    with pytest.raises(ValueError, match="leaves nothing"):
        freeze(model, "text")
    assert trains(model) == {name for name in before if "visual" not in name}
    with pytest.raises(ValueError, match=r"the image tower timm ConvNeXt of encoder 'mine' has none .* freeze 'image' as a whole"):
        freeze(encoder("timm convolutional"), "all-but-last-1")


@pytest.mark.parametrize("kind", [*IMAGE, *TIMM, "resnet"])
def test_all_but_the_last_block_of_every_image_family(kind):
    model = encoder(kind)
    tower = image_tower(model.model)
    freeze(model, "text,all-but-last-1")
    image_size = 160 if kind.startswith("timm") else 32
    found = gradients(model, model.embed(batch_of(3, image_size)))
    reached = {name for name, gradient in found.items() if gradient is not None}
    assert reached == trains(model), "everything that trains gets a gradient"
    last = {id(p) for p in tower.blocks[-1].parameters()}
    before = {id(p) for block in tower.blocks[:-1] for p in block.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in last:
            assert name in reached
        if id(parameter) in before:
            assert name not in reached
    assert len(tower.blocks) == {"timm token": 6, "timm average": 8, "resnet": 4}.get(kind, 9 if kind.startswith("timm") else 3)


@pytest.mark.parametrize("kind", [*TEXTS, *HF])
def test_all_but_the_last_block_of_every_text_family(kind, tmp_path):
    model = encoder_of(hf_family(kind, SEED, tmp_path) if kind in HF else text_family(kind, SEED))
    assert len(text_tower_parts(model.model).blocks) == 3
    freeze(model, "image,all-but-last-1")
    found = gradients(model, model.embed(batch_of(3)))
    reached = {name for name, gradient in found.items() if gradient is not None}
    assert reached == trains(model)
    freed = {name.split(".")[-3] if "bias" in name else name for name in reached}
    assert any("2" in name.split(".") for name in reached), freed
    assert not any("0" in name.split("resblocks.")[-1].split(".")[:1] for name in reached if "resblocks" in name)


# ---- modes of frozen parts


def test_frozen_parts_rest_in_evaluation_mode():
    model = encoder("resnet")
    assert model.has_batch_norm()
    freeze(model, "image")
    model.train()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = model.embed(batch_of(4))
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
    assert torch.equal(found.image, model.eval().embed(batch_of(4)).image)
    assert not model.has_batch_norm(), "batch statistics of a frozen tower cannot differ between micro-batches"
    check_replayable(model)
    model.train()
    with evaluating(model):
        assert not model.model.transformer.training
    assert model.model.transformer.training
    assert not any(module.training for module in model.model.visual.modules())


def test_dropout_of_the_last_blocks_stays(tmp_path):
    model = encoder_of(hf_family("roberta", SEED, tmp_path))
    freeze(model, "image,all-but-last-1")
    model.train()
    layers = model.model.text.transformer.encoder.layer
    assert [layer.output.dropout.training for layer in layers] == [False, False, True]
    assert not model.model.text.transformer.embeddings.dropout.training
    whole = encoder_of(hf_family("roberta", SEED, tmp_path))
    freeze(whole, "text")
    whole.train()
    batch = batch_of(3)
    assert torch.equal(whole.embed(batch).text, whole.embed(batch).text)


def test_a_copy_keeps_its_own_frozen_parts():
    model = encoder()
    freeze(model, "image")
    again = copy.deepcopy(model).train()
    assert not again.model.visual.training
    assert again.resting[0] is again.model.visual is not model.model.visual


# ---- checkpointing


@pytest.mark.parametrize("what", [None, *CHOICES])
def test_checkpointing_changes_no_gradient(what):
    """A reentrant checkpoint behind a frozen part would leave its blocks without any."""
    plain, less = encoder(), encoder()
    if what:
        freeze(plain, what)
        freeze(less, what)
    assert checkpoint_activations(less) == 6
    batch = batch_of(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = gradients(plain.train(), plain.train().embed(batch)), gradients(less.train(), less.train().embed(batch))
    assert {name for name, g in found.items() if g is not None} == trains(less)
    same_gradients(found, expected, trains(less))


@pytest.mark.parametrize("kind", ["custom blocks", "attention", *TIMM])
def test_checkpointing_of_image_families(kind):
    plain, less = encoder(kind), encoder(kind)
    checkpoint_activations(less)
    batch = batch_of(2, 160 if kind in TIMM else 32)
    expected, found = gradients(plain, plain.embed(batch)), gradients(less, less.embed(batch))
    same_gradients(found, expected, expected)


@pytest.mark.parametrize("kind", [*TEXTS, *HF])
def test_checkpointing_of_text_families(kind, tmp_path):
    plain = encoder_of(hf_family(kind, SEED, tmp_path) if kind in HF else text_family(kind, SEED))
    less = copy.deepcopy(plain)
    checkpoint_activations(less)
    batch = batch_of(3)
    expected, found = gradients(plain, plain.embed(batch)), gradients(less, less.embed(batch))
    same_gradients(found, expected, expected)


def test_blocks_run_again_in_the_backward_pass_and_keep_less():
    plain, less = encoder(), encoder()
    checkpoint_activations(less)
    assert checkpoint_activations(less) == 6, "asked for twice, wrapped once"
    for model, runs in ((plain, 1), (less, 2)):
        calls: list[int] = []
        model.model.visual.transformer.resblocks[0].ln_1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        gradients(model, model.embed(batch_of(3)))
        assert len(calls) == runs
        with torch.no_grad():
            model.embed(batch_of(3))
        assert len(calls) == runs + 1

    def kept(model: DualEncoder) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            model.embed(batch_of(3))
        return sum(sizes)

    assert kept(less) < 0.5 * kept(plain)


def test_a_checkpointed_copy_has_its_own_blocks():
    model = encoder()
    checkpoint_activations(model)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch = batch_of(2)
    assert torch.equal(again.embed(batch).text, encoder().embed(batch).text)
    assert again.state_dict().keys() == encoder().state_dict().keys()


def test_checkpointing_is_refused_where_it_would_be_wrong():
    with pytest.raises(ValueError, match="image tower ModifiedResNet has batch statistics"):
        checkpoint_activations(encoder("resnet"))
    with pytest.raises(ValueError, match="image tower timm ConvNeXt has no blocks"):
        checkpoint_activations(encoder("timm convolutional"))


# ---- the probe and cached accumulation


def probed(model: DualEncoder, trained: str = "hn") -> dict[Any, Any]:
    batch = batch_of(5)
    reader = toy_reader(model, trained)
    framework = Clip(objective=reader.heads.objectives[trained])
    reader.begin(1, 0)
    model.zero_grad(set_to_none=True)
    embeddings = model.embed(batch)
    terms = framework(embeddings)
    total = total_loss(terms)
    with reader.watching(batch, embeddings, terms, initial_text=embeddings.text.detach()):
        total.backward()
    reader.accumulated([total])
    reader.optimizer.step()
    reader.updated()
    assert not reader.failures
    found = readings(reader)
    return {key: value for key, value in found.items() if key[0] != "probe"}


@pytest.mark.parametrize("what", [None, "image", "text", "all-but-last-1"])
def test_readings_agree_with_and_without_checkpointing(what):
    plain, less = encoder(), encoder()
    for model in (plain, less):
        if what:
            freeze(model, what)
    checkpoint_activations(less)
    expected, found = probed(plain.train()), probed(less.train())
    assert expected.keys() == found.keys()
    assert len(found) > 20
    for key, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[key]), torch.tensor(value), atol=1e-6, rtol=1e-3, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("what", ["image", "text", "all-but-last-1"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_cached_accumulation_with_frozen_parts(what, checkpointed):
    model = encoder()
    freeze(model, what)
    if checkpointed:
        checkpoint_activations(model)
    whole = batch_of(6)
    parts = [
        Batch(
            ids=whole.ids[rows],
            images={"full": whole.images["full"][rows]},
            texts={"full": whole.texts["full"][rows]},
            lengths=whole.lengths[rows],
            captions=whole.captions[rows],
        )
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6))
    ]
    assert torch.equal(joined(parts).texts["full"], whole.texts["full"])
    resting = resting_towers(model.train())
    assert resting == (() if what == "all-but-last-1" else (what,))
    expected = gradients(model, model.embed(whole))
    runs: list[str] = []
    handles = [_counted_runs(model, tower, runs) for tower in ("image", "text")]
    passed = first_pass(model.embed, parts, model.scale(), resting=resting)
    gradients(model, passed.embeddings)
    assert float(passed.replay()) < 1e-5
    for handle in handles:
        handle.remove()
    assert {tower: runs.count(tower) for tower in ("image", "text")} == {t: 3 if t in resting else 5 for t in ("image", "text")}
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, g in found.items() if g is not None} == {name for name, g in expected.items() if g is not None}
    same_gradients(found, expected, trains(model))


def _counted_runs(model: DualEncoder, tower: str, runs: list[str]) -> Any:
    first = model.model.visual.conv1 if tower == "image" else model.model.token_embedding
    return first.register_forward_hook(lambda *_: runs.append(tower))


def test_a_frozen_tower_that_draws_is_passed_again():
    model = encoder()
    for parameter in model.model.visual.parameters():
        parameter.requires_grad_(False)
    assert resting_towers(model.train()) == ()  # not told to rest: there may be dropout in it
    assert resting_towers(model.eval()) == ("image",)


def test_token_outputs_of_a_frozen_tower_have_no_graph_either():
    model = encoder()
    model.add_token_scale()
    summary = freeze(model, "image")
    assert summary.trainable["rest"] == 2, "both scales still train"
    found = model.train().embed(batch_of(3), tokens=True)
    for rows in (found.image, found.image_tokens):
        assert rows.grad_fn is None
        assert rows.requires_grad
    assert found.text_tokens.grad_fn is not None
    (found.image_tokens.sum(1) * found.text[:, None].sum(1)).sum().backward()
    assert found.image_tokens.grad is not None
    assert all(parameter.grad is None for parameter in model.model.visual.parameters())


def test_a_stretched_table_with_frozen_beginning_is_part_of_the_text_tower(make_encoder):
    """Its other rows are a parameter behind a parametrization, which must be frozen, and counted as reached, like any other."""
    config = copy.deepcopy(SMALL)
    config["model_cfg"]["text_cfg"]["context_length"] = 77
    encoder = load_encoder(f"{make_encoder(config=config)}@248frozen20")
    table = encoder.model.parametrizations.positional_embedding.original
    assert len(table) == 228
    ids = encoder.tokenize(["a red chair beside a blue table " * 5]).ids
    batch = Batch(ids=("a",), images={}, texts={"full": ids}, lengths=torch.tensor([40]), captions=("",))
    unreached = next(rows for name, rows in encoder.structural_rows(batch.texts["full"]).items() if "positional" in name)
    assert torch.equal(unreached, torch.arange(20, 248) > ids[0].argmax())
    freeze(encoder, "text")
    assert not table.requires_grad
