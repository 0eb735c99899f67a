"""Concentration against all pairs of negatives, one at a time, and on batches whose answer is known."""

from __future__ import annotations

import itertools
import math
import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from toy import Toy, measured, readings, toy_batch, toy_reader

from gradscope.frameworks.clip import Clip, total_loss
from gradscope.objectives.hn import HN
from gradscope.quantities import quantities
from gradscope.types import Scores, Step

SIDES = {"i2t": lambda m: m, "t2i": lambda m: m.T}


def seen(step: Step) -> dict[tuple[str, str], Any]:
    return {(r.term, r.key): r.value.double().numpy() for r in quantities["concentration"]()(step)}


def fresh(size: int, scale: float = 20.0, gamma: float = 0.5, trained: str = "hn") -> Step:
    return measured(Toy(scale=scale, seed=secrets.randbits(20)), toy_batch(size, secrets.randbits(20)), trained, gamma)[0]


def all_pairs(x: np.ndarray, y: np.ndarray, negatives: np.ndarray) -> tuple[float, float]:
    """Least-squares slope through the origin, and r^2, over every ordered pair of an anchor's negatives."""
    pairs = [(i, j, k) for i in range(len(x)) for j, k in itertools.permutations(np.flatnonzero(negatives[i]), 2)]
    dx, dy = (np.array([values[i, j] - values[i, k] for i, j, k in pairs]) for values in (x, y))
    return (dx * dy).sum() / (dx**2).sum(), (dx * dy).sum() ** 2 / ((dx**2).sum() * (dy**2).sum())


def log_p(logits: np.ndarray) -> np.ndarray:
    return np.array([row - np.log(np.exp(row - row.max()).sum()) - row.max() for row in logits])


@pytest.mark.parametrize("size", [3, 8, 16])
@pytest.mark.parametrize("trained", ["infonce", "hn"])
def test_slopes_over_all_pairs_of_negatives(size: int, trained: str) -> None:
    step = fresh(size, trained=trained)
    values, text = seen(step), step.embeddings.text.double().numpy()
    margin = float(step.heads["hn"].scores.scale) * 0.5 * (text @ text.T)
    others = ~np.eye(size, dtype=bool)
    for direction, turn in SIDES.items():
        for term, head in step.heads.items():
            expected, explained = all_pairs(margin, log_p(turn(head.scores.logits.double().numpy())), others)
            assert values[term, f"slope.{direction}"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert values[term, f"explained.{direction}"] == pytest.approx(explained, rel=1e-4, abs=1e-5)
        assert values["hn", f"slope.{direction}"] == pytest.approx(values["infonce", f"slope.{direction}"] + 1, abs=1e-5)
        cosine = turn(step.heads["hn"].scores.cosine.double().numpy())
        _, explained = all_pairs(text @ text.T, cosine, others)
        assert values["", f"correlation.{direction}"] ** 2 == pytest.approx(explained, rel=1e-4, abs=1e-5)
        assert values["hn", f"slope_at_equal_cosine.{direction}"] == pytest.approx(1, abs=1e-5)
        assert values["hn", f"worst_at_equal_cosine.{direction}"] < 1e-4
        assert values["hn", f"lost.{direction}"] == 0


@pytest.mark.parametrize("size", [3, 16])
def test_amplification_and_gains_by_hand(size: int) -> None:
    step = fresh(size, scale=60.0)
    values, text = seen(step), step.embeddings.text.double().numpy()
    captions = text @ text.T
    ratios = []
    for i in range(size):
        g = np.delete(captions[i], i)
        ratios.append(60 * 0.5 * (g.max() - np.median(g)) / math.log(10))
    assert values["hn", "log10_amplification"] == pytest.approx(np.median(ratios), rel=1e-4)
    for (direction, turn), k in itertools.product(SIDES.items(), (1, 5)):
        share = {}
        for term, head in step.heads.items():
            p = np.exp(log_p(turn(head.scores.logits.double().numpy())))
            tops = [sorted((j for j in range(size) if j != i), key=lambda j: -captions[i, j])[:k] for i in range(size)]
            share[term] = np.mean([p[i, top].sum() / np.delete(p[i], i).sum() for i, top in enumerate(tops)])
        assert values["pair", f"share_gain_top{k}.{direction}"] == pytest.approx(share["hn"] - share["infonce"], abs=1e-6)


def test_a_batch_with_equal_cosines_has_a_raw_slope_of_one() -> None:
    """Every negative at one cosine: nothing but the margin tells negatives apart."""
    step = fresh(9)
    text = torch.nn.functional.normalize(torch.randn(9, 5), dim=1)
    margin = (0.5 * text @ text.T).fill_diagonal_(0.0)
    cosine = torch.full((9, 9), 0.2) + 0.6 * torch.eye(9)
    values = seen(with_scores(step, cosine, margin, text))
    for direction in SIDES:
        assert values["hn", f"slope.{direction}"] == pytest.approx(1, abs=1e-5)
        assert values["hn", f"explained.{direction}"] == pytest.approx(1, abs=1e-5)
        assert values["infonce", f"slope.{direction}"] == pytest.approx(0, abs=1e-5)


def with_scores(step: Step, cosine: torch.Tensor, margin: torch.Tensor, text: torch.Tensor, half: bool = False) -> Step:
    """The same step with other scores, and each direction's gradient by autograd from those logits; bf16 logits if ``half``."""
    heads = {}
    for name, head in step.heads.items():
        own = margin if name == "hn" else None
        logits = 20.0 * (cosine if own is None else cosine + own)
        logits = logits.bfloat16().float() if half else logits
        grads = {}
        for direction, turn in SIDES.items():
            leaf = turn(logits).clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(leaf, torch.arange(len(leaf))) / 2
            grads[direction] = torch.autograd.grad(loss, leaf)[0]
        scores = Scores(cosine=cosine, margin=own, logits=logits, scale=torch.tensor(20.0))
        heads[name] = replace(head, scores=scores, direction_grads=grads)
    return replace(step, heads=heads, embeddings=replace(step.embeddings, text=text))


def test_rounded_logits_and_lost_gradients_show() -> None:
    step = fresh(12)
    scores = step.heads["hn"].scores
    assert scores.margin is not None
    rounded = seen(with_scores(step, scores.cosine, scores.margin, step.embeddings.text, half=True))
    assert 1e-3 < rounded["hn", "worst_at_equal_cosine.i2t"] < 0.2  # logits up to 30 come in steps of .125
    far = scores.cosine + 12.0 * torch.eye(12)  # 240 logits ahead: no negative has a normal fp32 gradient
    gone = seen(with_scores(step, far, scores.margin, step.embeddings.text))
    for direction in SIDES:
        assert gone["hn", f"lost.{direction}"] == 1
        assert math.isnan(gone["hn", f"slope_at_equal_cosine.{direction}"])
        assert math.isnan(gone["hn", f"worst_at_equal_cosine.{direction}"])
        assert math.isfinite(gone["hn", f"slope.{direction}"])
    spread = torch.linspace(0, 6, 12) + 3.0 * torch.eye(12)  # the far ones of each image are lost, the near ones are not
    some = seen(with_scores(step, scores.cosine - spread, scores.margin, step.embeddings.text))
    assert 0 < some["hn", "lost.i2t"] < 1
    assert some["hn", "slope_at_equal_cosine.i2t"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("size", [3, 6, 16])
def test_bins_are_means_of_equally_many_points(size: int) -> None:
    step = fresh(size)
    values, text = seen(step), step.embeddings.text.double().numpy()
    margin = float(step.heads["hn"].scores.scale) * 0.5 * (text @ text.T)
    others = ~np.eye(size, dtype=bool)
    away = lambda m: np.concatenate([m[i][others[i]] - m[i][others[i]].mean() for i in range(size)])  # noqa: E731
    x, n = away(margin), size * (size - 1)
    order, bins = np.argsort(x, kind="stable"), min(20, n)
    groups = [order[[p for p in range(n) if p * bins // n == b]] for b in range(bins)]
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert values["", "binned_predicted"] == pytest.approx([x[g].mean() for g in groups], abs=1e-4)
    if size == 3:
        return  # pairs of symmetric cells are ties that only rounding orders: one point a bin is either of them
    for direction, turn in SIDES.items():
        assert values["hn", f"binned_at_equal_cosine.{direction}"] == pytest.approx(values["", "binned_predicted"], abs=1e-4)
        for term, head in step.heads.items():
            y = away(turn(head.scores.logits.double().numpy()))
            found = values[term, f"binned_log_ratio.{direction}"]
            assert len(found) == bins
            sizes = [len(g) for g in groups]
            assert np.average(found, weights=sizes) == pytest.approx(0, abs=1e-4)
            assert found == pytest.approx([y[g].mean() for g in groups], abs=1e-4) or tied(x)


def tied(x: np.ndarray) -> bool:
    """Whether points so close that fp32 and float64 order them differently straddle two bins."""
    return bool((np.diff(np.sort(x)) < 1e-5).any())


@pytest.mark.parametrize("margin", ["live", "centred", "fixed", "frozen", "external"])
def test_every_margin_is_read_as_it_is(margin: str) -> None:
    encoder, batch = Toy(seed=secrets.randbits(20)), toy_batch(10, secrets.randbits(20))
    reader = toy_reader(encoder, "hn")
    reader.heads.objectives["hn"] = HN(gamma=0.25, margin=margin)
    embeddings = encoder.embed(batch)
    initial = torch.nn.functional.normalize(torch.randn(10, 9), dim=1)
    terms = Clip(objective=reader.heads.objectives["hn"])(embeddings, initial)
    reader.begin(1, 0)
    with reader.watching(batch, embeddings, terms, initial_text=initial, margin_text=initial):
        total_loss(terms).backward()
    values = readings(reader)
    found = values["concentration", "hn", "slope_at_equal_cosine.i2t"]
    if margin == "fixed":
        assert math.isnan(found)  # type: ignore[arg-type]
        assert math.isnan(values["concentration", "infonce", "explained.t2i"])  # type: ignore[arg-type]
        assert values["concentration", "hn", "log10_amplification"] == pytest.approx(0, abs=1e-6)
    else:
        assert found == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("size", "gamma"), [(2, 0.5), (8, 0.0)])
def test_nothing_to_rank_is_undefined(size: int, gamma: float) -> None:
    values = seen(fresh(size, gamma=gamma))
    for direction in SIDES:
        for key in ("slope", "explained", "slope_at_equal_cosine"):
            assert math.isnan(values["hn", f"{key}.{direction}"])
    assert values["hn", "log10_amplification"] == pytest.approx(0, abs=1e-9)


def test_excluded_captions_are_no_negatives() -> None:
    step = fresh(7)
    twins = torch.zeros(7, 7, dtype=torch.bool)
    twins[1, 4] = twins[4, 1] = True
    heads = {}
    for name, head in step.heads.items():
        scores, margin = head.scores, head.scores.margin
        margin = None if margin is None else margin.masked_fill(twins, 0.0)
        scores = replace(scores, margin=margin, logits=scores.logits.masked_fill(twins, -math.inf), excluded=twins)
        grads = {direction: grad.masked_fill(twins, 0.0) for direction, grad in head.direction_grads.items()}
        heads[name] = replace(head, scores=scores, direction_grads=grads)
    values = seen(replace(step, heads=heads))
    others = ~np.eye(7, dtype=bool) & ~twins.numpy()
    hn = heads["hn"].scores
    assert hn.margin is not None
    x, y = float(hn.scale) * hn.margin.double().numpy(), hn.logits.double().numpy()
    rows = [(x[i][keep] - x[i][keep].mean(), y[i][keep] - y[i][keep].mean()) for i, keep in enumerate(others)]
    expected = sum((dx * dy).sum() for dx, dy in rows) / sum((dx**2).sum() for dx, _ in rows)
    assert values["hn", "slope.i2t"] == pytest.approx(expected, rel=1e-4)
    assert values["hn", "slope_at_equal_cosine.i2t"] == pytest.approx(1, abs=1e-5)
    assert values["hn", "lost.i2t"] == 0
    assert all(np.isfinite(value).all() for value in values.values())


def test_nan_stays_nan() -> None:
    step = fresh(6)
    cosine, text = step.heads["hn"].scores.cosine.clone(), step.embeddings.text.clone()
    text[2, 1] = math.nan
    cosine[:, 2] = math.nan
    margin = (0.5 * text @ text.T).fill_diagonal_(0.0)
    values = seen(with_scores(step, cosine, margin, text))
    assert {key for key, value in values.items() if not np.isnan(value).any()} == set()


def test_a_loss_of_one_direction_is_read_in_that_one() -> None:
    step = fresh(6)
    for one in SIDES:
        heads = {n: replace(h, directions=(one,), direction_grads={one: h.direction_grads[one]}) for n, h in step.heads.items()}
        for name in ("concentration", "geometry"):
            found = {r.key for r in quantities[name]()(replace(step, heads=heads))}
            whole = {r.key for r in quantities[name]()(step)}
            assert found == {key for key in whole if "." not in key or key.split(".")[1] in (one, "image", "text")}
