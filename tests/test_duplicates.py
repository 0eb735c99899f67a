"""--duplicates exclude: losses, gradients, readings and runs against softmaxes from which the cells are really missing."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from host_waits import Waits
from repeats import generator, groups, mask, masked_step, repeated, seed, unit
from safetensors.torch import load_file
from test_kernels import several_by_hand
from test_resume import assert_equal_runs, train_until
from torch import Tensor
from toy import Toy, toy_batch, toy_reader

from gradscope import cached
from gradscope.data.batching import Batches
from gradscope.data.source import open_data
from gradscope.encoders.load import load_encoder
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.metrics import counting
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.margin import MARGINS
from gradscope.objectives.scores import LOSS_FORMS, symmetric_loss
from gradscope.objectives.token_interaction import token_loss
from gradscope.recipe import resolve
from gradscope.run_tables import comparable
from gradscope.runlog import Run
from gradscope.train import train

# ---- the option: losses and gradients


def slow_loss(image: Tensor, text: Tensor, scale: float, gamma: float, kind: str, start: Tensor, excluded: Tensor) -> Tensor:
    """A softmax for each anchor, over its positive and those negatives that are left; differentiable in image and text."""
    n = len(image)
    source = (start if kind in ("frozen", "external") else text).detach()
    g = source @ source.T
    left = [(i, j) for i in range(n) for j in range(n) if i != j and not excluded[i, j]]
    mean = sum(g[i, j] for i, j in left) / max(1, len(left))
    cell = {"live": lambda i, j: g[i, j], "fixed": lambda i, j: mean, "centred": lambda i, j: g[i, j] - mean}
    add = cell.get(kind, cell["live"])
    losses = []
    for i in range(n):
        others = [j for j in range(n) if (i, j) in left]
        for a, b in ((image, text), (text, image)):
            row = [a[i] @ b[i] * scale, *[scale * (a[i] @ b[j] + gamma * add(i, j)) for j in others]]
            losses.append(-torch.log_softmax(torch.stack(row), 0)[0])
    return torch.stack(losses).sum() / (2 * n)


@pytest.mark.parametrize("form", LOSS_FORMS)
@pytest.mark.parametrize("kind", ["infonce", *MARGINS])
def test_excluded_cells_are_missing_from_loss_gradient_and_margin(kind: str, form: str) -> None:
    n, scale = 7, 9.0
    excluded = mask(groups(n, 4))
    image, text, start = unit(n).requires_grad_(), unit(n).requires_grad_(), unit(n, 5)
    objective = InfoNCE() if kind == "infonce" else HN(gamma=0.5, margin=kind)
    scores = objective.scores(image, text, torch.tensor(scale, dtype=torch.float64), start, excluded)
    loss = symmetric_loss(scores, form).mean()
    wanted = slow_loss(image, text, scale, objective.gamma, kind, start, excluded)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    found = torch.autograd.grad(loss, [scores.logits, image, text])
    slow = torch.autograd.grad(wanted, [image, text])
    assert bool((found[0][excluded] == 0).all())
    assert bool((found[0][~excluded] != 0).all())
    for mine, theirs in zip(found[1:], slow, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-13)
    if scores.margin is not None:
        assert bool((scores.margin[excluded] == 0).all())
        assert bool((scores.margin.diagonal() == 0).all())


@pytest.mark.parametrize("form", LOSS_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_anchor_without_negatives_has_loss_0_and_no_gradient(form: str, dtype: torch.dtype) -> None:
    n = 4
    everyone = ~torch.eye(n, dtype=torch.bool)
    image, text, scale = unit(n, dtype=dtype).requires_grad_(), unit(n, dtype=dtype).requires_grad_(), torch.tensor(9.0, dtype=dtype)
    scale.requires_grad_()
    for objective in (InfoNCE(), *(HN(margin=kind) for kind in MARGINS)):
        scores = objective.scores(image, text, scale, text.detach(), everyone)
        loss = symmetric_loss(scores, form)
        assert loss.tolist() == [0.0] * n
        grads = torch.autograd.grad(loss.sum(), [scores.logits, image, text, scale])
        assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize("form", LOSS_FORMS)
def test_one_anchor_alone_leaves_the_others_untouched(form: str) -> None:
    """A mask that no token ids can make: one row without negatives beside rows with them."""
    logits = torch.randn(4, 4, generator=generator(), dtype=torch.float64)
    logits[1, [0, 2, 3]] = -math.inf
    leaf = logits.clone().requires_grad_()
    loss = LOSS_FORMS[form](leaf)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert float(loss[1].detach()) == 0
    assert bool((grad[1] == 0).all())
    others = torch.softmax(logits[[0, 2, 3]], 1) - torch.eye(4, dtype=torch.float64)[[0, 2, 3]]
    assert torch.allclose(grad[[0, 2, 3]], others, atol=1e-14)


@pytest.mark.parametrize("form", LOSS_FORMS)
@pytest.mark.parametrize("kind", ["infonce", *MARGINS])
def test_without_duplicates_every_bit_is_as_before(kind: str, form: str) -> None:
    """Forwards, margins and gradients in fp32, with the mask given and with none."""
    n = 16
    image, text, start = (unit(n, 32, torch.float32).requires_grad_() for _ in range(3))
    scale = torch.tensor(100.0, requires_grad=True)
    objective = InfoNCE() if kind == "infonce" else HN(gamma=0.5, margin=kind)
    outcomes = []
    for excluded in (None, torch.zeros(n, n, dtype=torch.bool)):
        scores = objective.scores(image, text, scale, start, excluded)
        loss = symmetric_loss(scores, form)
        outcomes.append([scores.logits, loss, *torch.autograd.grad(loss.mean(), [scores.logits, image, text, scale])])
        outcomes[-1] += [] if scores.margin is None else [scores.margin]
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_the_token_term_leaves_them_out_too() -> None:
    n = 6
    excluded = mask(groups(n, 3))
    a, b = (torch.randn(n, n, generator=generator(), dtype=torch.float64).requires_grad_() for _ in range(2))
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    slow = []
    for i in range(n):
        left = [i, *(j for j in range(n) if j != i and not excluded[i, j])]
        slow += [-torch.log_softmax(scale * a[i, left], 0)[0], -torch.log_softmax(scale * b[left, i], 0)[0]]
    loss = token_loss(a, b, scale, excluded).mean()
    wanted = torch.stack(slow).mean()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    mine, theirs = (torch.autograd.grad(value, [a, b, scale]) for value in (loss, wanted))
    assert all(torch.allclose(x, y, atol=1e-14) for x, y in zip(mine, theirs, strict=True))
    assert bool((mine[0][excluded] == 0).all())
    assert torch.equal(token_loss(a, b, scale), token_loss(a, b, scale, torch.zeros_like(excluded)))


def test_the_framework_decides_by_token_ids() -> None:
    encoder, batch = Toy(), repeated(6, [0, 1, 1, 2, 3, 0], [f"string {i}" for i in range(6)])
    terms = Clip(duplicates="exclude")(encoder.embed(batch), token_ids=batch.texts["full"])
    assert terms[0].scores is not None
    assert terms[0].scores.excluded is not None
    assert terms[0].scores.excluded.tolist() == mask([0, 1, 1, 2, 3, 0]).tolist()
    plain = Clip()(encoder.embed(batch), token_ids=batch.texts["full"])
    assert plain[0].scores is not None
    assert plain[0].scores.excluded is None


def test_a_duplicate_caption_is_no_longer_pushed_away() -> None:
    """Two pictures of one caption, nothing else: with "exclude" there is no gradient at all, with "keep" there is."""
    batch = repeated(2, [0, 0])
    for duplicates, still in (("exclude", True), ("keep", False)):
        encoder = Toy()
        total_loss(Clip(duplicates=duplicates)(encoder.embed(batch), token_ids=batch.texts["full"])).backward()
        assert all(bool((p.grad == 0).all()) for p in encoder.parameters()) == still  # type: ignore[union-attr]


# ---- the readings


@pytest.mark.parametrize("trained", ["infonce", "hn"])
def test_every_quantity_reads_masked_logits(trained: str) -> None:
    """No failure, and nan only where the same captions without any duplicate give nan too; or where all are hubs alike."""
    step, values, failures = masked_step(repeated(8, [0, 1, 1, 2, 3, 0, 4, 0]), trained)
    _, plain, _ = masked_step(toy_batch(8, 3), trained)
    assert failures == []
    assert all(head.scores.excluded is not None for head in step.heads.values())
    bad = {key for key, value in values.items() if np.isnan(np.atleast_1d(np.asarray(value, dtype=float))).any()}
    fine = {key for key, value in plain.items() if not np.isnan(np.atleast_1d(np.asarray(value, dtype=float))).any()}
    alike = {("geometry", "", f"hub_skewness.{d}") for d in ("i2t", "t2i") if values["geometry", "", f"hub_largest.{d}"] == 5 / 8}
    assert bad & fine == alike & fine  # each candidate among the 5 nearest of 5 anchors has no skewness: one draw in thirty
    assert values.keys() == plain.keys()


def test_loss_residual_gap_and_saturation_without_the_excluded() -> None:
    group = [0, 1, 1, 2, 3, 0, 4, 0]
    step, values, _ = masked_step(repeated(8, group))
    excluded = mask(group).numpy()
    captions = (step.embeddings.text.double() @ step.embeddings.text.double().T).numpy()
    for term, head in step.heads.items():
        scores = head.scores
        margin = 0.0 if scores.margin is None else scores.margin.double().numpy()
        raw = float(scores.scale) * (scores.cosine.double().numpy() + margin)
        losses = []
        for direction, logits in (("i2t", raw), ("t2i", raw.T)):
            cosine = scores.cosine.double().numpy() if direction == "i2t" else scores.cosine.double().numpy().T
            residuals, gaps, low, high, numbers, beaten = [], [], [], [], [], []
            for i in range(8):
                left = [j for j in range(8) if j != i and not excluded[i, j]]
                others = np.exp(logits[i, left] - logits[i, i])
                residuals.append(others.sum() / (1 + others.sum()))
                losses.append(np.log1p(others.sum()))
                gaps.append(cosine[i, i] - cosine[i, left].max())
                beaten.append(logits[i, i] < logits[i, left].max())
                tied = others[captions[i, left] > captions[i, left].max() - 1e-6] / others.sum()  # repeated captions are equally near
                low.append(tied.min())
                high.append(tied.max())
                p = others / others.sum()
                numbers.append(math.exp(-(p * np.log(p)).sum()))
            assert values["residual", term, f"mean.{direction}"] == pytest.approx(np.mean(residuals), rel=1e-4)
            share = values["residual", term, f"share_top1_by_caption.{direction}"]
            assert np.mean(low) * (1 - 1e-4) <= share <= np.mean(high) * (1 + 1e-4)
            assert values["residual", term, f"effective_negatives.{direction}"] == pytest.approx(np.mean(numbers), rel=1e-4)
            assert values["saturation", term, f"rows_below_1e-3.{direction}"] == np.mean(np.array(residuals) < 1e-3)
            assert values["gap", "", f"mean.{direction}"] == pytest.approx(np.mean(gaps), abs=1e-6)
            if term == "hn":
                assert values["gap", "hn", f"violated_with_margin.{direction}"] == np.mean(beaten)
        left = (~excluded).sum(axis=1) - 1
        assert values["residual", term, "uniform_top5"] == pytest.approx(np.mean(np.minimum(5, left) / left))
        assert values["loss", term, "true"] == pytest.approx(np.mean(losses), rel=1e-4)
        assert values["loss", term, "trained"] == pytest.approx(np.mean(losses), rel=1e-4)
        zero = (head.logit_grad.numpy() == 0)[~excluded]
        assert values["zeros", term, "entries.logits"] == pytest.approx(zero.mean(), abs=1e-15)
    off = ~excluded & ~np.eye(8, dtype=bool)
    assert values["captions", "", "margin_logits"] == pytest.approx(30.0 * 0.5 * captions[off].mean(), rel=1e-4)
    assert values["captions", "", "exact_duplicates"] == 3


@pytest.mark.parametrize("duplicates", ["keep", "exclude"])
def test_neither_the_mask_nor_the_meter_makes_a_gpu_wait(duplicates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "waits_for_nothing", lambda tensor: False)  # the path of a GPU
    encoder, batch = Toy(), repeated(6, [0, 1, 1, 2, 3, 0])
    reader = toy_reader(encoder)
    reader.quantities = {name: reader.quantities[name] for name in ("false_negatives", "captions", "residual", "gap", "zeros")}
    reader.begin(1, 0)
    with Waits() as syncs:
        embeddings = encoder.embed(batch)
        terms = Clip(duplicates=duplicates)(embeddings, token_ids=batch.texts["full"])
        with reader.watching(batch, embeddings, terms, initial_text=embeddings.text.detach()):
            total_loss(terms).backward()
    assert syncs.seen == []
    assert reader.failures == []


def test_a_batch_of_one_caption_reads_as_finished() -> None:
    step, values, failures = masked_step(repeated(4, [0, 0, 0, 0]))
    assert failures == []
    for term in step.heads:
        assert values["loss", term, "trained"] == values["loss", term, "true"] == 0
        assert values["residual", term, "mean.i2t"] == 0
        assert values["zeros", term, "all_zero.logits"] == 1


# ---- the option in the training loop


@pytest.fixture
def run(small_encoder: Path, tmp_path: Path):
    """``run(data, name, changes)``: a finished small CPU run."""

    def go(data: Path, name: str, changes: dict[str, object]) -> Run:
        base = {"data.name": str(data), "encoder.name": str(small_encoder), "train.device": "cpu", "train.batch_size": 8}
        train(resolve({}, {**base, "train.max_steps": 3, "train.lr": 1e-3, **changes}), tmp_path / name, quiet=True)
        return Run(tmp_path / name)

    return go


@pytest.fixture
def repeated_folder(scenes_folder: Path, tmp_path: Path) -> Path:
    """The scenes with 12 captions over 160 pictures, half of them in capitals: other strings, the same token ids."""
    folder = tmp_path / "repeated"
    shutil.copytree(scenes_folder, folder)
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        caption = lines[number % 12]["captions"][0].lower()
        line["captions"] = [caption.upper() if number // 12 % 2 else caption]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("changes", [{}, {"objective.name": "hn", "objective.margin": "centred", "objective.token_weight": 1.0}])
def test_without_duplicates_a_run_is_the_same_to_the_bit(run, scenes_folder: Path, changes: dict[str, object]) -> None:
    kept = run(scenes_folder, "kept", {**changes, "probe.log_grads": True})
    without = run(scenes_folder, "without", {**changes, "probe.log_grads": True, "objective.duplicates": "exclude"})
    a, b = (load_file(r.checkpoints()[-1] / "encoder" / "open_clip_model.safetensors") for r in (kept, without))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert set(without.steps) - set(kept.steps) == {"duplicates_excluded", "anchors_without_negatives"}
    assert without.steps["duplicates_excluded"].tolist() == [0, 0, 0]
    assert comparable(kept.steps).equals(comparable(without.steps)[list(comparable(kept.steps))])
    values = [comparable(r.readings).drop(columns="stamps") for r in (kept, without)]
    different = [a.to_dict() for (_, a), (_, b) in zip(values[0].iterrows(), values[1].iterrows(), strict=True) if not a.equals(b)]
    assert different == []
    assert without.readings["stamps"].str.contains("; duplicates excluded").any()
    said = (without.path / "console.log").read_text()
    assert "repeat" not in said
    assert "duplicates excluded: captions of identical token ids" in said


@pytest.mark.parametrize("mode", ["none", "narrow", "cached"])
def test_each_step_counts_what_it_left_out(run, repeated_folder: Path, small_encoder: Path, mode: str) -> None:
    accumulate = {"train.accumulate": 2, "train.accumulate_mode": mode} if mode != "none" else {}
    found = run(
        repeated_folder, mode, {**accumulate, "objective.duplicates": "exclude", "probe.log_grads": True, "train.batch_size": 6}
    )
    console = (found.path / "console.log").read_text()
    assert "136 captions repeat the words of another, 148 its tokens" in console
    assert "are no negatives of each other (--duplicates exclude)" in console
    assert "probe failed" not in console
    stream = Batches(
        records=open_data(str(repeated_folder)).records("train"),
        encoder=load_encoder(str(small_encoder)),
        batch_size=6,
        accumulate=2 if accumulate else 1,
        seed=42,
    )
    for step, batches in enumerate(stream.steps(1, 3), 1):
        softmaxes = (
            [[c.lower() for b in batches for c in b.captions]]
            if mode == "cached"
            else [[c.lower() for c in b.captions] for b in batches]
        )
        pairs = sum(s[i] == s[j] for s in softmaxes for i in range(len(s)) for j in range(i))
        row = found.steps.set_index("step").loc[step]
        assert row["duplicates_excluded"] == pairs
        assert row["anchors_without_negatives"] == 0
    assert found.steps["duplicates_excluded"].sum() > 0
    read = found.readings[found.readings["key"] == "push_identical"]["value"].astype(float)
    assert len(read) > 0
    assert (read == 0).all()


def test_kept_duplicates_are_said_and_cost_more_loss(run, repeated_folder: Path) -> None:
    kept, without = (run(repeated_folder, word, {"objective.duplicates": word, "train.max_steps": 1}) for word in ("keep", "exclude"))
    assert "are each other's negatives (--duplicates keep)" in (kept.path / "console.log").read_text()
    assert "duplicates_excluded" not in kept.steps
    assert kept.steps["loss"].iloc[0] > without.steps["loss"].iloc[0]


def test_a_run_on_one_caption_counts_anchors_without_negatives(run, repeated_folder: Path) -> None:
    lines = [json.loads(line) for line in (repeated_folder / "train.jsonl").read_text().splitlines()]
    (repeated_folder / "train.jsonl").write_text("".join(json.dumps({**line, "captions": ["one caption"]}) + "\n" for line in lines))
    row = run(repeated_folder, "one", {"objective.duplicates": "exclude", "probe.log_grads": True, "train.max_steps": 1}).steps.iloc[0]
    assert row["loss"] == row["grad_norm"] == 0
    assert (row["duplicates_excluded"], row["anchors_without_negatives"]) == (28, 8)


def test_cached_equals_one_wide_softmax_with_duplicates_excluded(repeated_folder: Path, small_encoder: Path) -> None:
    """Loss and gradient over all parameters, at float64 towers."""
    encoder = load_encoder(str(small_encoder)).double()
    records = open_data(str(repeated_folder)).records("train")
    # 15 pictures of 12 captions: some caption is there twice, whatever the order
    batches = next(Batches(records=records, encoder=encoder, batch_size=5, accumulate=3, seed=seed()).steps(1, 1))
    batches = [replace(b, images={"full": b.images["full"].double()}) for b in batches]
    framework = Clip(objective=HN(margin="centred"), duplicates="exclude", loss_form="residual")
    outcomes = []
    for cache in (False, True):
        encoder.zero_grad(set_to_none=True)
        whole = cached.joined(batches)
        passed = cached.first_pass(encoder.embed, batches, encoder.scale())
        full = passed.embeddings
        if not cache:
            full = encoder.embed(replace(whole, images={"full": torch.cat([b.images["full"] for b in batches])}))
        terms = framework(full, token_ids=whole.texts["full"])
        assert terms[0].scores is not None
        assert terms[0].scores.excluded is not None
        assert terms[0].scores.excluded.any()
        total_loss(terms).backward()
        if cache:
            passed.replay()
        outcomes.append([total_loss(terms).detach(), *(p.grad for p in encoder.parameters() if p.grad is not None)])
    for wide, replayed in zip(*outcomes, strict=True):
        assert torch.allclose(wide, replayed, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("one_thread")
def test_a_resumed_run_excludes_the_same(repeated_folder: Path, small_encoder: Path, tmp_path: Path) -> None:
    settings = {
        "data.name": str(repeated_folder), "encoder.name": str(small_encoder), "train.device": "cpu", "train.batch_size": 6,
        "train.accumulate": 2, "train.accumulate_mode": "cached", "train.max_steps": 4, "train.checkpoint_every": 2, "train.lr": 1e-3,
        "objective.name": "hn", "objective.margin": "frozen", "objective.token_weight": 1.0, "objective.loss_form": "residual",
        "objective.duplicates": "exclude", "probe.log_grads": True,
    }  # fmt: skip
    train(resolve({}, settings), tmp_path / "whole", quiet=True)
    train_until(resolve({}, settings), tmp_path / "killed", 4)
    train(resolve({}, settings), tmp_path / "killed", resume=True, quiet=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")
    assert (Run(tmp_path / "killed").steps["duplicates_excluded"] > 0).all()


@pytest.mark.parametrize("name", ["infonce", "hn"])
def test_a_run_takes_repeated_captions_as_positives(run, repeated_folder: Path, small_encoder: Path, name: str) -> None:
    """One cached softmax of 24 over 12 captions; both objectives of the probe, by brute force in float64 at the untrained weights."""
    wide = {"train.batch_size": 12, "train.accumulate": 2, "train.accumulate_mode": "cached", "train.max_steps": 2}
    changes = {**wide, "objective.duplicates": "positives", "objective.name": name, "probe.log_grads": True}
    found = run(repeated_folder, name, changes)
    assert found.recipe["objective"]["kernel"] == "streaming"
    assert "are each other's positives (--duplicates positives)" in (found.path / "console.log").read_text()
    encoder = load_encoder(str(small_encoder)).double()
    records = open_data(str(repeated_folder)).records("train")
    stream = Batches(records=records, encoder=encoder, batch_size=12, accumulate=2, seed=42)
    parts = [encoder.embed(replace(batch, images={"full": batch.images["full"].double()})) for batch in next(stream.steps(1, 1))]
    image, text = (torch.cat([getattr(part, side).detach().double() for part in parts]) for side in ("image", "text"))
    captions = [caption.lower() for batch in next(stream.steps(1, 1)) for caption in batch.captions]
    groups = torch.tensor([captions.index(caption) for caption in captions])
    first = found.readings[(found.readings["step"] == 1) & (found.readings["key"] == "true") & (found.readings["quantity"] == "loss")]
    read = dict(zip(first["term"], first["value"], strict=True))
    for term, gamma in (("infonce", 0.0), ("hn", 0.5)):
        expected = float(several_by_hand(image, text, encoder.scale().detach().double(), gamma, groups).mean())
        assert read[term] == pytest.approx(expected, rel=1e-5), term
        if term == name:
            assert found.steps["loss"].iloc[0] == pytest.approx(expected, rel=1e-5)
    assert found.readings[found.readings["key"] == "failed"].empty
    assert found.readings["stamps"].str.contains("; duplicates are positives").any()


@pytest.mark.parametrize(
    "changes", [{"objective.kernel": "dense"}, {"objective.token_weight": 1.0}, {"objective.framework": "hn_clip"}]
)
def test_positives_are_refused_where_the_loss_has_none(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="--duplicates positives is computed by the streamed loss"):
        resolve({}, {"objective.duplicates": "positives", **changes})


def test_a_framework_of_contradictions_is_refused() -> None:
    for settings in ({"kernel": "dense"}, {"objective": HN()}, {"token_weight": 1.0}):
        whole = {"duplicates": "positives", "kernel": "streaming", "objective": HN(several="positives")}
        with pytest.raises(ValueError, match="give all of them or none"):
            Clip(**{**whole, **settings})


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(ValueError, match="--duplicates"):
        resolve({}, {"objective.duplicates": "excluded"})
