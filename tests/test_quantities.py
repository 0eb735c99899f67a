"""Every quantity against a slow float64 twin, from the very fp32 tensors the probe saw."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy import CONTEXT, VOCABULARY, WIDTH, Toy, measured, readings, toy_batch, toy_reader

from gradscope.frameworks.clip import Clip, total_loss
from gradscope.metrics.gradients import PIECE
from gradscope.objectives.hn import HN
from gradscope.objectives.margin import MARGINS
from gradscope.quantities import quantities
from gradscope.quantities.captions import BINS, HIGH, LOW
from gradscope.types import Batch, Step

TERMS = ("infonce", "hn")
SIZES = (2, 7, 16)


def seen(size: int, seed: int = 3, scale: float = 20.0, gamma: float = 0.5, batch: Batch | None = None) -> tuple[Step, dict, Toy]:
    encoder = Toy(scale=scale, seed=seed)
    step, values = measured(encoder, batch or toy_batch(size, seed), "hn", gamma)
    return step, values, encoder


def sides(matrix: torch.Tensor) -> dict[str, np.ndarray]:
    wide = matrix.double().numpy()
    return {"i2t": wide, "t2i": wide.T}


def slow_rows(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Loss and residual per row, negatives summed."""
    losses, residuals = [], []
    for i, row in enumerate(logits):
        others = np.delete(row, i) - row[i]
        push = np.exp(others).sum()
        residuals.append(push / (1 + push))
        losses.append(np.log1p(push))
    return np.array(losses), np.array(residuals)


def test_all_batch_quantities_answer_for_both_objectives() -> None:
    _, values, _ = seen(8)
    for name, _ in quantities:
        if name not in ("optimizer", "accumulation", "sketch"):
            assert any(q == name for q, _, _ in values), name
    assert {term for q, term, _ in values if q == "loss"} == set(TERMS)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("term", TERMS)
def test_loss_saturation_residual(size: int, term: str) -> None:
    step, values, _ = seen(size, scale=60.0)
    head = step.heads[term]
    both = {d: slow_rows(m) for d, m in sides(head.scores.logits).items()}
    mean = np.mean([losses.mean() for losses, _ in both.values()])
    assert values["loss", term, "true"] == pytest.approx(mean, rel=1e-6)
    assert values["loss", term, "log10_true"] == pytest.approx(math.log10(mean), abs=1e-9)
    assert values["loss", term, "chance"] == pytest.approx(math.log(size))
    assert values["loss", term, "trained"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    assert values["saturation", term, "below_1e-3"] == float(mean < 1e-3)
    captions = step.embeddings.text.double().numpy() @ step.embeddings.text.double().numpy().T
    for direction, (_, r) in both.items():
        assert values["saturation", term, f"rows_below_1e-3.{direction}"] == pytest.approx((r < 1e-3).mean())
        assert values["saturation", term, f"effective_rows.{direction}"] == pytest.approx(r.sum() ** 2 / (r**2).sum(), rel=1e-9)
        assert values["residual", term, f"mean.{direction}"] == pytest.approx(r.mean(), rel=1e-6)
        assert values["residual", term, f"max.{direction}"] == pytest.approx(r.max(), rel=1e-6)
        assert values["residual", term, f"median.{direction}"] == pytest.approx(np.median(r), rel=1e-6)
        assert values["residual", term, f"log10_mean.{direction}"] == pytest.approx(math.log10(r.mean()), abs=1e-9)
        logits, cosines = sides(head.scores.logits)[direction], sides(head.scores.cosine)[direction]
        for ranking, hardness in (("caption", captions), ("logit", cosines)):
            for k in (1, 5, 10):
                shares, masses = [], []
                for i in range(size):
                    p = np.exp(logits[i] - logits[i].max())
                    p /= p.sum()
                    order = sorted((j for j in range(size) if j != i), key=lambda j: -hardness[i, j])[:k]
                    masses.append(p[order].sum())
                    shares.append(p[order].sum() / np.delete(p, i).sum())
                assert values["residual", term, f"share_top{k}_by_{ranking}.{direction}"] == pytest.approx(np.mean(shares), rel=1e-8)
                assert values["residual", term, f"mass_top{k}_by_{ranking}.{direction}"] == pytest.approx(np.mean(masses), rel=1e-6)
                assert values["residual", term, f"uniform_top{k}"] == pytest.approx(min(k, size - 1) / (size - 1))
        numbers = []
        for i in range(size):
            q = np.exp(np.delete(logits[i], i) - np.delete(logits[i], i).max())
            q /= q.sum()
            numbers.append(math.exp(-sum(x * math.log(x) for x in q if x > 0)))
        assert values["residual", term, f"effective_negatives.{direction}"] == pytest.approx(np.mean(numbers), rel=1e-9)


@pytest.mark.parametrize("size", [2, 16, 128])
@pytest.mark.parametrize("gap", [0.001, 0.3, 0.9, 1.0, 1.2])
def test_zeros_are_a_count_on_the_fp32_tensors(size: int, gap: float) -> None:
    """Embeddings made so that positives lead by ``gap`` at scale 100; the four cases told apart by plain counting."""
    step, values = _made(size, gap)
    for term in TERMS:
        head = step.heads[term]
        logit = head.logit_grad.numpy()
        assert logit.dtype == np.float32
        assert values["zeros", term, "entries.logits"] == pytest.approx((logit == 0).mean(), abs=1e-15)
        assert values["zeros", term, "rows.logits"] == pytest.approx((logit == 0).all(axis=1).mean(), abs=1e-15)
        assert values["zeros", term, "all_zero.logits"] == float((logit == 0).all())
        embedding = np.concatenate([head.image_grad.numpy(), head.text_grad.numpy()])
        assert values["zeros", term, "entries.embeddings"] == pytest.approx((embedding == 0).mean(), abs=1e-15)
        assert values["zeros", term, "all_zero.embeddings"] == float((embedding == 0).all())
        assert values["zeros", term, "loss_zero_gradient_not"] == float(float(head.loss) == 0 and bool((logit != 0).any()))
        for direction, matrix in (("i2t", head.scores.logits), ("t2i", head.scores.logits.T)):
            leaf = matrix.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(leaf, torch.arange(size)) / 2
            (grad,) = torch.autograd.grad(loss, leaf)
            g = grad.numpy()
            lost = np.mean([g[i, i] == 0 and (g[i] != 0).any() for i in range(size)])
            assert values["zeros", term, f"positive_zero.{direction}"] == pytest.approx(lost)
            sums = [
                abs(g[i].astype(np.float64).sum()) / s if (s := np.abs(g[i].astype(np.float64)).sum()) else 0.0 for i in range(size)
            ]
            assert values["zeros", term, f"row_sum.{direction}"] == pytest.approx(max(sums), rel=1e-9, abs=1e-15)


def _made(size: int, gap: float) -> tuple[Step, dict]:
    """A watched backward whose cosines are exactly designed: text j = e_j; image i = (c + gap) e_i + c elsewhere, scaled to fit."""
    from gradscope.types import Embeddings

    encoder = Toy(scale=100.0)
    reader = toy_reader(encoder, "infonce", gamma=0.0)
    generator = torch.Generator().manual_seed(size)
    # Rows need not be of unit length here: the quantities read cosines, and a gap of 1.2 is possible for real rows too.
    text = torch.eye(size) + 0.01 * torch.rand(size, size, generator=generator)
    image = gap * torch.eye(size) + 0.01 * torch.rand(size, size, generator=generator)
    image, text = image.requires_grad_(), text.requires_grad_()
    tie = sum(p.sum() for p in encoder.parameters()) * 0.0  # reach the parameters, so that their gradients exist
    embeddings = Embeddings(image=image + tie, text=text + tie, scale=torch.tensor(100.0))
    terms = Clip()(embeddings)
    reader.begin(1, 0)
    with reader.watching(toy_batch(size, 1), embeddings, terms):
        total_loss(terms).backward()
    step = reader._step
    assert step is not None
    return step, readings(reader)


def test_the_four_cases_of_a_zero_gradient() -> None:
    _, open_case = _made(16, 0.001)
    assert open_case["zeros", "infonce", "all_zero.logits"] == 0
    assert open_case["zeros", "infonce", "loss_zero_gradient_not"] == 0
    _, rounded = _made(2, 0.3)  # gap 30 logits: the loss prints 0, the negatives still push, the pull is lost
    assert rounded["loss", "infonce", "trained"] == 0
    assert rounded["loss", "infonce", "true"] > 0
    assert rounded["zeros", "infonce", "loss_zero_gradient_not"] == 1
    assert rounded["zeros", "infonce", "positive_zero.i2t"] == 1
    _, gone = _made(2, 1.2)  # beyond fp32 altogether
    assert gone["zeros", "infonce", "all_zero.logits"] == 1
    assert gone["loss", "infonce", "true"] > 0
    assert gone["zeros", "infonce", "all_zero.parameters"] == 1


def test_parameter_zeros_and_structure() -> None:
    step, values, _ = seen(7)
    for term in TERMS:
        grads = step.heads[term].param_grads
        assert grads is not None
        sizes = [g.numel() for g in grads if g is not None]
        zeros = sum(int((g == 0).sum()) for g in grads if g is not None)
        rows = VOCABULARY - len(set(step.token_ids.flatten().tolist()))
        structural = rows * WIDTH
        assert values["zeros", term, "entries.parameters"] == pytest.approx(zeros / sum(sizes))
        assert values["zeros", term, "structural.parameters"] == pytest.approx(structural / sum(sizes))
        assert values["zeros", term, "entries_reached.parameters"] == pytest.approx((zeros - structural) / (sum(sizes) - structural))
        assert values["zeros", term, "all_zero.parameters"] == 0
        plain = sum((g.numpy() ** 2).sum(dtype=np.float32) for g in grads if g is not None)
        assert values["zeros", term, "naive_norm"] == pytest.approx(math.sqrt(plain), rel=1e-5)
        assert structural > 0


def test_norm_underflow_is_told_from_a_zero_gradient() -> None:
    """Entries near 1e-25: the plain fp32 norm prints 0, the true norm does not."""
    encoder = Toy()
    step, _ = measured(encoder, toy_batch(5, 9))
    from dataclasses import replace

    from gradscope.quantities.gradient import Gradient
    from gradscope.quantities.zeros import Zeros

    heads = {n: replace(h, param_grads=[g * 1e-24 for g in h.param_grads if g is not None]) for n, h in step.heads.items()}
    small = replace(step, heads=heads)
    zeros = {(r.term, r.key): float(r.value) for r in Zeros()(small)}  # type: ignore[arg-type]
    assert zeros["infonce", "naive_norm_zero"] == 1
    assert zeros["infonce", "naive_norm"] == 0
    assert zeros["infonce", "all_zero.parameters"] == 0
    norms = {(r.term, r.key): float(r.value) for r in Gradient()(small)}  # type: ignore[arg-type]
    for term, head in heads.items():
        exact = math.sqrt(sum(float((g.double() ** 2).sum()) for g in head.param_grads or [] if g is not None))
        assert norms[term, "norm"] == pytest.approx(exact, rel=1e-6)


def test_gradient_norms_ratio_cosine_and_parts() -> None:
    step, values, _ = seen(9)
    flat = {}
    for term in TERMS:
        grads = step.heads[term].param_grads
        assert grads is not None
        flat[term] = np.concatenate([g.double().numpy().ravel() for g in grads if g is not None])
        assert values["gradient", term, "norm"] == pytest.approx(np.linalg.norm(flat[term]), rel=1e-6)
        assert values["gradient", term, "max_abs"] == pytest.approx(np.abs(flat[term]).max(), rel=1e-6)
        image = dict(zip(step.names, grads, strict=True))["visual.proj"]
        assert image is not None
        assert values["gradient", term, "norm.image"] == pytest.approx(float(image.double().norm()), rel=1e-6)
    a, b = flat["hn"], flat["infonce"]
    assert values["gradient", "pair", "ratio"] == pytest.approx(np.linalg.norm(a) / np.linalg.norm(b), rel=1e-6)
    assert values["gradient", "pair", "cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_gap_captions_scale(size: int) -> None:
    step, values, _ = seen(size)
    z = step.embeddings.text.double().numpy()
    g = z @ z.T
    off = g[~np.eye(size, dtype=bool)]
    assert values["captions", "", "mean"] == pytest.approx(off.mean(), abs=1e-6)
    hardest = np.array([np.delete(g[i], i).max() for i in range(size)])
    assert values["captions", "", "hardest_mean"] == pytest.approx(hardest.mean(), abs=1e-6)
    assert values["captions", "", "hardest_max"] == pytest.approx(hardest.max(), abs=1e-6)
    assert values["captions", "", "near_duplicates"] == pytest.approx((hardest >= 0.95).mean())
    pairs = np.clip(g[np.triu_indices(size, 1)], LOW, HIGH)
    histogram = values["captions", "", "histogram"]
    assert isinstance(histogram, list)
    assert sum(histogram) == size * (size - 1) / 2
    slow, _ = np.histogram(pairs, bins=BINS, range=(LOW, HIGH))
    assert np.abs(np.cumsum(histogram) - np.cumsum(slow)).max() <= 1  # a pair on an edge may fall on either side
    truncated = sum(int(n) > CONTEXT for n in step.lengths)
    assert values["captions", "", "truncated"] == truncated
    assert values["captions", "", "margin_logits"] == pytest.approx(20.0 * 0.5 * off.mean(), rel=1e-4)
    assert values["captions", "", "drift"] == pytest.approx(0.0, abs=1e-7)
    assert values["scale", "", "value"] == pytest.approx(20.0, rel=1e-6)
    assert values["scale", "", "at_limit"] == 0
    margin = step.heads["hn"].scores.margin
    assert margin is not None
    for direction, cosine in sides(step.heads["hn"].scores.cosine).items():
        gaps = np.array([cosine[i, i] - np.delete(cosine[i], i).max() for i in range(size)])
        for key, value in {"mean": gaps.mean(), "min": gaps.min(), "q10": np.quantile(gaps, 0.1), "q50": np.median(gaps)}.items():
            assert values["gap", "", f"{key}.{direction}"] == pytest.approx(value, abs=1e-9)
        assert values["gap", "", f"violated.{direction}"] == pytest.approx((gaps < 0).mean())
        raised = sides(step.heads["hn"].scores.cosine + margin)[direction]
        beaten = np.mean([raised[i, i] < np.delete(raised[i], i).max() for i in range(size)])
        assert values["gap", "hn", f"violated_with_margin.{direction}"] == pytest.approx(beaten)


def test_all_equal_captions_and_exact_duplicates() -> None:
    batch = toy_batch(5, 4, captions=["the same"] * 5)
    same = Batch(
        ids=batch.ids,
        images=batch.images,
        texts={"full": batch.texts["full"][:1].repeat(5, 1)},
        lengths=batch.lengths,
        captions=batch.captions,
    )
    step, values, _ = seen(5, batch=same)
    assert values["captions", "", "exact_duplicates"] == 4
    assert values["captions", "", "mean"] == pytest.approx(1, abs=1e-6)
    assert values["captions", "", "near_duplicates"] == 1
    assert values["residual", "infonce", "mean.i2t"] == pytest.approx(0.8, abs=1e-6)  # every caption equally likely
    losses = [slow_rows(m)[0].mean() for m in sides(step.heads["hn"].scores.logits).values()]
    assert values["loss", "hn", "true"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_a_nan_embedding_is_shown_and_not_hidden() -> None:
    batch = toy_batch(6, 5)
    batch.images["full"][2] = math.nan
    _, values, _ = seen(6, batch=batch)
    assert ("loss", "", "failed") not in values
    for key in (("loss", "infonce", "true"), ("loss", "infonce", "trained"), ("gradient", "infonce", "norm")):
        assert math.isnan(values[key])  # type: ignore[arg-type]
    assert math.isnan(values["saturation", "infonce", "below_1e-3"])  # type: ignore[arg-type]
    assert math.isnan(values["residual", "hn", "mean.i2t"])  # type: ignore[arg-type]


def test_nan_captions_are_in_no_bin_and_no_share() -> None:
    step, _, _ = seen(6)
    text = step.embeddings.text.clone()
    text[1] = math.nan
    broken = replace(step, embeddings=replace(step.embeddings, text=text))
    values = {reading.key: reading.value for reading in quantities["captions"]()(broken)}
    assert int(values["histogram"].sum()) == 5 * 4 // 2
    assert math.isnan(values["near_duplicates"])


@pytest.mark.parametrize("kind", MARGINS)
def test_the_constant_part_of_every_margin(kind: str) -> None:
    encoder, batch = Toy(), toy_batch(7, secrets.randbits(32))
    reader = toy_reader(encoder, "hn")
    reader.heads.objectives["hn"] = HN(gamma=0.25, margin=kind)
    embeddings = encoder.embed(batch)
    initial = torch.nn.functional.normalize(torch.randn(7, 9), dim=1)
    terms = Clip(objective=reader.heads.objectives["hn"])(embeddings, initial)
    reader.begin(1, 0)
    with reader.watching(batch, embeddings, terms, initial_text=initial, margin_text=initial):
        total_loss(terms).backward()
    off = ~np.eye(7, dtype=bool)
    live, start = ((z.detach().double() @ z.detach().double().T).numpy()[off].mean() for z in (embeddings.text, initial))
    mean = {"live": live, "fixed": live, "frozen": start, "external": start, "centred": 0.0}[kind]
    assert readings(reader)["captions", "", "margin_logits"] == pytest.approx(20.0 * 0.25 * mean, abs=1e-5)


def test_an_optimizer_without_moments_has_no_normalised_step() -> None:
    encoder = Toy()
    reader = toy_reader(encoder)
    reader.optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    reader.begin(1, 0)
    embeddings = encoder.embed(toy_batch(4, 0))
    terms = Clip()(embeddings)
    with reader.watching(toy_batch(4, 0), embeddings, terms):
        total_loss(terms).backward()
    reader.accumulated([total_loss(terms)])
    reader.optimizer.step()
    reader.updated()
    keys = {key for quantity, _, key in readings(reader) if quantity == "optimizer"}
    assert keys == {"update_ratio.image", "update_ratio.text", "update_ratio.scale"}


def test_adam_quantiles_eps_and_stale_against_loops() -> None:
    """20 steps of large gradients, then tiny ones: most entries become stale, and the twin recomputes Adam by hand."""
    encoder = Toy()
    reader = toy_reader(encoder, "infonce")
    reader.optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3, weight_decay=0.01)
    framework = Clip()
    moments = {name: [np.zeros(p.shape), np.zeros(p.shape)] for name, p in encoder.named_parameters()}
    for index in range(1, 31):
        reader.begin(index, 0)
        reader.optimizer.zero_grad(set_to_none=True)
        batch = toy_batch(8, index)
        embeddings = encoder.embed(batch)
        terms = framework(embeddings)
        with reader.watching(batch, embeddings, terms):
            total_loss(terms).backward()
        if index > 20:
            for p in encoder.parameters():
                assert p.grad is not None
                p.grad.mul_(1e-4)
        before = {n: p.detach().double().numpy().copy() for n, p in encoder.named_parameters()}
        grads = {n: p.grad.double().numpy().copy() for n, p in encoder.named_parameters() if p.grad is not None}
        reader.accumulated([total_loss(terms)])
        reader.optimizer.step()
        reader.updated()
        values = readings(reader)
        for name, g in grads.items():
            moments[name][0] = 0.9 * moments[name][0] + 0.1 * g
            moments[name][1] = 0.999 * moments[name][1] + 0.001 * g * g
    assert values["accumulation", "total", "norm"] == pytest.approx(math.sqrt(sum((g**2).sum() for g in grads.values())), rel=1e-6)
    sizes, roots, stale = [], [], []
    for name, (m, v) in moments.items():
        root = np.sqrt(v / (1 - 0.999**30))
        sizes.append((np.abs(m / (1 - 0.9**30)) / (root + 1e-8)).ravel())
        roots.append(root.ravel())
        stale.append(((np.abs(grads[name]) > 0) & (np.abs(grads[name]) * 100 < root)).ravel())
    size = np.concatenate(sizes)
    for q in (10, 50, 90, 99):
        exact = np.quantile(size, q / 100, method="inverted_cdf")
        if exact > 1e-19:
            assert abs(math.log10(values["optimizer", "total", f"step_q{q}"] / exact)) < 0.06  # type: ignore[operator]
    assert values["optimizer", "total", "eps_dominated"] == pytest.approx((np.concatenate(roots) < 1e-8).mean(), abs=0.01)
    assert values["optimizer", "total", "stale"] == pytest.approx(np.concatenate(stale).mean(), abs=0.01)
    assert values["optimizer", "total", "stale"] > 0.3  # type: ignore[operator]
    after = dict(encoder.named_parameters())["visual.proj"].detach().double().numpy()
    ratio = np.linalg.norm(after - before["visual.proj"]) / np.linalg.norm(before["visual.proj"])
    assert values["optimizer", "total", "update_ratio.image"] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"eps": 1e-4}, {"betas": (0.5, 0.9), "eps": 1e-12}])
def test_adam_over_several_pieces_in_float64(options: dict) -> None:
    """A tensor of more than two pieces, entries over twenty decades, a third of them zero: quantiles right to 3 %, shares exact."""
    seed = secrets.randbits(32)
    generator = torch.Generator().manual_seed(seed)
    n = 2 * PIECE + 5
    parameter = torch.nn.Parameter(torch.randn(n, generator=generator))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, **options)
    sizes = 10.0 ** (-20 * torch.rand(n, generator=generator)) * (torch.rand(n, generator=generator) > 1 / 3)
    for step in range(4):
        before = parameter.detach().clone()
        parameter.grad = sizes * torch.randn(n, generator=generator) * (1e-4 if step == 3 else 1.0)
        optimizer.step()
    base, _, _ = seen(3)
    values = {
        r.key: float(r.value)  # type: ignore[arg-type]
        for r in quantities["optimizer"]()(
            replace(
                base,
                names=["w"],
                towers=["text"],
                parameters=[parameter],
                before=[before],
                optimizer=optimizer,
                accumulated=[parameter.grad],
            )
        )
    }
    state, group = optimizer.state[parameter], optimizer.param_groups[0]
    first, second = (1 - beta**4 for beta in group["betas"])
    root = (state["exp_avg_sq"].double() / second).sqrt()
    exact = ((state["exp_avg"].double() / first).abs() / (root + group["eps"])).numpy()
    for q in (10, 50, 90, 99):
        expected = np.quantile(exact, q / 100, method="inverted_cdf")
        assert values[f"step_q{q}"] == pytest.approx(expected, rel=0.032, abs=1e-37), (seed, q)
    gradient = parameter.grad.double().abs()
    assert values["eps_dominated"] == pytest.approx(float((root < group["eps"]).double().mean()), abs=1e-5)
    assert values["stale"] == pytest.approx(float(((gradient > 0) & (gradient * 100 < root)).double().mean()), abs=1e-5)
    change = (parameter.detach().double() - before.double()).norm() / before.double().norm()
    assert values["update_ratio.text"] == pytest.approx(float(change), rel=1e-6)


def test_every_quantity_states_how_it_can_mislead() -> None:
    import sys

    for name, component in quantities:
        text = sys.modules[component.__module__].__doc__ or ""
        assert "mislead" in text, name
        assert component().phase in ("batch", "step", "update")
