"""Geometry of two clouds of rows against brute force, closed forms and scipy; the strips and the command against the same."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from toy import Toy, measured, toy_batch
from typer.testing import CliRunner

from gradscope.cli import app
from gradscope.embeddings_file import save_embeddings
from gradscope.evaluate import Embedded
from gradscope.metrics import embedding_geometry as measure
from gradscope.metrics.gallery_geometry import embedding_geometry
from gradscope.metrics.softmax import dense_anchors
from gradscope.protocol import Protocol
from gradscope.quantities import quantities
from gradscope.quantities.geometry import GAP_QUANTILES
from gradscope.types import Step


def cloud(n: int, d: int, cone: float = 0.5) -> torch.Tensor:
    """Unit rows in a cone, float64, new at each call."""
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    return torch.nn.functional.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64) + cone, dim=1)


def pairs(rows: np.ndarray) -> np.ndarray:
    """|x_i - x_j|^2 over i < j, one pair at a time."""
    return np.array([((rows[i] - rows[j]) ** 2).sum() for i in range(len(rows)) for j in range(i)])


def skewness(counted: np.ndarray) -> float:
    return float(stats.skew(counted)) if counted.std() else math.nan


@pytest.mark.parametrize("block", [1, 5, 1000])
def test_clouds_against_one_pair_at_a_time(block: int) -> None:
    image, text = cloud(13, 6), cloud(13, 6, 1.0)
    v, t = image.numpy(), text.numpy()
    apart = np.mean([((a - b) ** 2).sum() for a, b in zip(v, t, strict=True)])
    assert float(measure.alignment(image, text)) == pytest.approx(apart, rel=1e-12)
    for rows in (image, text):
        squared = pairs(rows.numpy())
        assert float(measure.uniformity(rows, block=block)) == pytest.approx(math.log(np.exp(-2 * squared).mean()), rel=1e-9)
        assert float(measure.mean_squared_distance(rows)) == pytest.approx(squared.mean(), rel=1e-12)
        assert float(measure.mean_cosine(rows)) == pytest.approx(1 - squared.mean() / 2, rel=1e-9)
    assert float(measure.modality_gap(image, text)) == pytest.approx(np.linalg.norm(v.mean(0) - t.mean(0)), rel=1e-12)
    within = (pairs(v).mean() + pairs(t).mean()) / 2
    assert float(measure.relative_gap(image, text, measure.alignment(image, text))) == pytest.approx(apart / (apart + within))


def test_the_two_ends_of_uniformity_and_of_the_gaps() -> None:
    point = torch.eye(4)[:1].repeat(6, 1)
    assert float(measure.uniformity(point)) == pytest.approx(0.0, abs=1e-12)
    assert float(measure.mean_cosine(point)) == pytest.approx(1.0)
    assert float(measure.uniformity(torch.eye(300, dtype=torch.float64))) == pytest.approx(-4.0)  # all at distance sqrt 2
    assert float(measure.modality_gap(point, -point)) == pytest.approx(2.0)
    assert math.isnan(float(measure.uniformity(point[:1])))
    rows = cloud(2000, 3, 0.0)
    shuffled = rows[torch.randperm(2000)]  # pairs as far apart as any two rows
    assert float(measure.relative_gap(rows, shuffled, measure.alignment(rows, shuffled))) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (16, 16), (300, 12)])
@pytest.mark.parametrize("centred", [False, True])
def test_effective_rank_against_the_singular_values(shape: tuple[int, int], centred: bool) -> None:
    rows = cloud(*shape)
    plain = rows.numpy() - (rows.numpy().mean(0) if centred else 0)
    s = np.linalg.svd(plain, compute_uv=False)
    p = s[s > 1e-12 * s[0]] / s.sum()
    found = float(measure.effective_rank(rows, centred=centred, block=9))
    assert found == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-6)
    assert found <= min(shape) - (centred and shape[0] <= shape[1]) + 1e-9


def test_effective_ranks_of_several_clouds_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    library, calls = torch.linalg.eigvalsh, []
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda matrix: calls.append(matrix.shape) or library(matrix))
    clouds = [cloud(9, 5), cloud(9, 5, 3.0)]
    found = measure.effective_ranks(clouds)
    assert calls == [(4, 5, 5)]
    one = [[float(measure.effective_rank(rows, centred=centred)) for centred in (False, True)] for rows in clouds]
    assert found.numpy() == pytest.approx(np.array(one))
    clouds[0][2] = math.nan
    assert measure.effective_ranks(clouds).isnan().tolist() == [[True, True], [False, False]]


def test_effective_rank_of_what_is_known() -> None:
    assert float(measure.effective_rank(torch.eye(9))) == pytest.approx(9)
    assert float(measure.effective_rank(torch.eye(9), centred=True)) == pytest.approx(8)
    point = torch.nn.functional.normalize(torch.randn(1, 5), dim=1).repeat(12, 1)
    assert float(measure.effective_rank(point)) == pytest.approx(1, abs=1e-6)
    assert math.isnan(float(measure.effective_rank(point, centred=True)))
    axes = torch.eye(5, dtype=torch.float64)[torch.arange(39) % 3]  # three directions, many rows
    assert float(measure.effective_rank(axes)) == pytest.approx(3, rel=1e-6)
    small = cloud(16, 64, 0.0)
    assert float(measure.effective_rank(small)) < 16 < float(measure.effective_rank(cloud(500, 64, 0.0)))  # what a batch cannot show


@pytest.mark.parametrize(("anchors", "candidates", "k"), [(9, 9, 1), (14, 6, 3), (30, 30, 10)])
def test_hubness_by_counting(anchors: int, candidates: int, k: int) -> None:
    cosine = cloud(anchors, 4) @ cloud(candidates, 4).T
    counted = np.zeros(candidates, dtype=int)
    for row in cosine.numpy():
        for j in sorted(range(candidates), key=lambda j: -row[j])[:k]:
            counted[j] += 1
    counts = measure.k_occurrences(cosine[:5], k) + measure.k_occurrences(cosine[5:], k)
    assert counts.tolist() == counted.tolist()
    found = {key: float(value) for key, value in measure.hubness(counts, anchors).items()}
    assert found["skewness"] == pytest.approx(skewness(counted), nan_ok=True)
    assert found["largest"] == pytest.approx(counted.max() / anchors)
    assert found["antihubs"] == pytest.approx((counted == 0).mean())


def test_what_is_no_candidate_is_never_counted() -> None:
    cosine = torch.rand(5, 5).double().fill_diagonal_(-math.inf)
    cosine[2, :] = -math.inf
    counts = measure.k_occurrences(cosine, 4)
    assert counts.tolist() == [3, 3, 4, 3, 3]
    assert math.isnan(float(measure.hubness(torch.tensor([4, 4, 4]), 6)["skewness"]))


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_against_scipy(ties: bool) -> None:
    a, b = torch.randn(200).double(), torch.randn(200).double()
    b = a + 2 * b
    if ties:
        a, b = (a * 2).round(), (b * 2).round()
    assert float(measure.rank_correlation(a, b)) == pytest.approx(stats.spearmanr(a, b).statistic, rel=1e-9)
    assert math.isnan(float(measure.rank_correlation(torch.ones(5), torch.rand(5))))
    assert math.isnan(float(measure.rank_correlation(torch.tensor([1.0, math.nan, 2.0]), torch.rand(3))))


@pytest.mark.parametrize("size", [1, 2, 9, 100])
def test_quantiles_against_numpy(size: int) -> None:
    values = torch.randn(size)
    at = (0.0, 0.1, 0.33, 0.5, 0.9, 1.0)
    assert measure.quantiles(values, at).tolist() == pytest.approx(np.quantile(values.double().numpy(), at))
    values[size // 2] = math.nan
    assert measure.quantiles(values, at).isnan().all()


# ---- the quantity


def seen(step: Step) -> dict[tuple[str, str], np.ndarray]:
    return {(r.term, r.key): r.value.double().numpy() for r in quantities["geometry"]()(step)}


@pytest.mark.parametrize("size", [2, 7, 16])
def test_readings_of_a_step(size: int) -> None:
    step, _ = measured(Toy(seed=secrets.randbits(20)), toy_batch(size, secrets.randbits(20)), "hn")
    start = torch.nn.functional.normalize(step.embeddings.text + 0.3 * torch.randn(step.embeddings.text.shape), dim=1)
    step = replace(step, initial_text=start)
    values = seen(step)
    image, text = step.embeddings.image.double(), step.embeddings.text.double()
    assert values["", "alignment"] == pytest.approx(float((image - text).pow(2).sum(1).mean()))
    assert values["", "uniformity.text"] == pytest.approx(math.log(np.exp(-2 * pairs(text.numpy())).mean()), abs=1e-6)
    s = np.linalg.svd(image.numpy() - image.numpy().mean(0), compute_uv=False)
    p = s[s > 1e-7 * s[0]] / s.sum()
    assert values["", "effective_rank_centred.image"] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-5)
    for direction, turn in (("i2t", lambda m: m), ("t2i", lambda m: m.T)):
        matrix = turn(step.heads["hn"].scores.cosine.double().numpy())
        gap = [row[i] - max(np.delete(row, i)) for i, row in enumerate(matrix)]
        assert values["", f"gap_quantiles.{direction}"] == pytest.approx(np.quantile(gap, GAP_QUANTILES))
        for term, head in step.heads.items():
            logits = turn(head.scores.logits.double().numpy())
            gap = [row[i] - max(np.delete(row, i)) for i, row in enumerate(logits)]
            assert values[term, f"gap_logit_quantiles.{direction}"] == pytest.approx(np.quantile(gap, GAP_QUANTILES))
        k, counted = min(5, size - 1), np.zeros(size)
        for i, row in enumerate(matrix):
            counted[sorted((j for j in range(size) if j != i), key=lambda j: -row[j])[:k]] += 1
        assert values["", f"hub_skewness.{direction}"] == pytest.approx(skewness(counted), nan_ok=True)
        assert values["", f"hub_largest.{direction}"] == pytest.approx(counted.max() / size)
        assert values["", f"antihubs.{direction}"] == pytest.approx((counted == 0).mean())
    upper = np.triu_indices(size, 1)
    now, then = (t.numpy() @ t.numpy().T for t in (text, start.double()))
    if size > 2:
        assert values["", "order_kept"] == pytest.approx(stats.spearmanr(now[upper], then[upper]).statistic)
    for matrix in (now, then):
        np.fill_diagonal(matrix, -2)
    assert values["", "nearest_kept"] == pytest.approx((now.argmax(1) == then.argmax(1)).mean())


def test_nan_stays_nan_and_drift_needs_a_start() -> None:
    step, _ = measured(Toy(), toy_batch(6, 1), "hn")
    text = step.embeddings.text.clone()
    text[2, 0] = math.nan
    heads = {}
    for name, head in step.heads.items():
        assert head.scores is not None
        scores = replace(head.scores, cosine=step.embeddings.image @ text.T, logits=step.embeddings.image @ text.T)
        heads[name] = replace(head, scores=scores, anchors=dense_anchors(scores))
    values = seen(replace(step, embeddings=replace(step.embeddings, text=text), heads=heads, initial_text=None))
    assert not any(key in ("order_kept", "nearest_kept") for _, key in values)
    finite = {key for (_, key), value in values.items() if np.isfinite(value).all()}
    assert finite == {"uniformity.image", "mean_cosine.image", "effective_rank.image", "effective_rank_centred.image"}


# ---- a gallery


def gallery(n: int = 37, m: int = 61, d: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    owner = torch.cat([torch.arange(n), torch.randint(0, n, (m - n,))])
    image = cloud(n, d).float()
    return image, torch.nn.functional.normalize(image[owner] + 0.4 * torch.randn(m, d), dim=1), owner


@pytest.mark.parametrize("block", [7, 64])
def test_a_gallery_in_strips_against_brute_force(block: int) -> None:
    image, text, owner = gallery()
    calls: list[tuple[int, int]] = []
    values = embedding_geometry(image, text, owner, k=3, block=block, progress=lambda *at: calls.append(at))
    assert calls == [(i + 1, calls[0][1]) for i in range(calls[0][1])]
    v, t, own = image.double().numpy(), text.double().numpy(), owner.numpy()
    apart = ((v[own] - t) ** 2).sum(1).mean()
    assert values["alignment"] == pytest.approx(apart)
    assert values["relative_gap"] == pytest.approx(apart / (apart + (pairs(v).mean() + pairs(t).mean()) / 2))
    assert values["modality_gap"] == pytest.approx(np.linalg.norm(v.mean(0) - t.mean(0)))
    for name, rows in (("image", v), ("text", t)):
        assert values[f"uniformity.{name}"] == pytest.approx(math.log(np.exp(-2 * pairs(rows)).mean()), abs=2e-6)
        assert values[f"mean_cosine.{name}"] == pytest.approx(1 - pairs(rows).mean() / 2, abs=1e-6)
        s = np.linalg.svd(rows, compute_uv=False)
        assert values[f"effective_rank.{name}"] == pytest.approx(math.exp(stats.entropy(s / s.sum())), rel=1e-6)
    for direction, scores, mine in (
        ("i2t", v @ t.T, own[None] == np.arange(37)[:, None]),
        ("t2i", t @ v.T, own[:, None] == np.arange(37)),
    ):
        counted = np.bincount(np.argsort(-scores, axis=1)[:, :3].ravel(), minlength=scores.shape[1])
        assert values[f"hub_skewness.{direction}"] == pytest.approx(stats.skew(counted))
        assert values[f"hub_largest.{direction}"] == pytest.approx(counted.max() / len(scores))
        assert values[f"antihubs.{direction}"] == pytest.approx((counted == 0).mean())
        gap = np.array([row[m].max() - row[~m].max() for row, m in zip(scores, mine, strict=True)])
        for key, q in (("gap_q10", 0.1), ("gap_q50", 0.5), ("gap_q90", 0.9)):
            assert values[f"{key}.{direction}"] == pytest.approx(np.quantile(gap, q), abs=1e-6)
        assert values[f"violated.{direction}"] == pytest.approx((gap < 0).mean())


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    image, text, owner = gallery(12, 12)
    whole = embedding_geometry(image[1:], text[1:], k=2)
    image[0, 0], text[0, 3] = math.nan, math.inf
    values = embedding_geometry(image, text, owner, k=2)
    assert (values["excluded.image"], values["excluded.text"], values["images"]) == (1, 1, 12)
    same = [key for key in whole if not key.startswith(("excluded", "images", "captions"))]
    assert {key: values[key] for key in same} == pytest.approx({key: whole[key] for key in same}, rel=1e-5, abs=1e-6)
    image[1, 0] = math.nan  # its caption stays a candidate, but has no pair
    alone = embedding_geometry(image, text, owner, k=2)
    rest = slice(2, None)
    assert alone["alignment"] == pytest.approx(float(measure.alignment(image[rest], text[rest])), rel=1e-5)
    assert alone["uniformity.text"] == pytest.approx(float(measure.uniformity(text[1:].double())), abs=1e-5)


@pytest.mark.parametrize(
    ("image", "text", "words"),
    [
        (torch.eye(4), torch.eye(3, 4), "image_of_text|no caption"),
        (2 * torch.eye(4), torch.eye(4), "unit rows"),
        (torch.full((3, 4), math.nan), torch.eye(4)[:3], "two or more finite image rows"),
        (torch.eye(4) / torch.tensor([[1.0], [1], [0], [0]]), torch.eye(4) / torch.tensor([[0.0], [0], [1], [1]]), "found none"),
    ],
)
def test_what_is_no_gallery_is_refused(image: torch.Tensor, text: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        embedding_geometry(image, text)


def stored(path: Path, image: torch.Tensor, text: torch.Tensor, owner: torch.Tensor, data: str = "scenes") -> Path:
    embedded = Embedded(
        ids=tuple(map(str, range(len(image)))), image=image, text=text, image_of_text=owner, truncated=0,
        digests=("0" * 64,) * len(text),
    )  # fmt: skip
    protocol = Protocol(
        encoder="runs/hn", data=data, split="test", sha256="", images=len(image), captions=len(text), expected=len(image), missing=0,
        bad=0, context=77, truncated=0, preprocessing="", precision="",
    )  # fmt: skip
    save_embeddings(path, embedded, protocol)
    return path


def test_the_command_prints_what_the_function_finds(tmp_path: Path) -> None:
    sides = [gallery(20, 20), gallery(20, 20)]
    files = [str(stored(tmp_path / f"{name}.safetensors", *side)) for name, side in zip(("start", "end"), sides, strict=True)]
    told = CliRunner().invoke(app, ["embedding-geometry", *files, "--k", "4", "--json", "--device", "cpu"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    for entry, side in zip(found, sides, strict=True):
        assert entry["geometry"] == pytest.approx(embedding_geometry(*side, k=4))
    table = CliRunner().invoke(app, ["embedding-geometry", *files, "--k", "4", "--device", "cpu"], env={"COLUMNS": "160"})
    assert table.exit_code == 0, table.output
    values = found[0]["geometry"]
    assert all(f"{values[f'uniformity.{tower}']:.3f}" in table.stdout for tower in ("image", "text"))
    assert "hubs say nothing" not in table.stdout
    narrow = CliRunner().invoke(app, ["embedding-geometry", *files, *files, "--k", "20", "--device", "cpu"], env={"COLUMNS": "80"})
    assert f"{values['uniformity.image']:.3f}" in narrow.stdout
    assert "…" not in narrow.stdout
    assert "no more than 20 candidates on a side" in narrow.stdout
    assert "at most 8" in table.stdout
    assert "start" in table.stdout
    assert "end" in table.stdout


def test_what_is_undefined_is_null_in_json(tmp_path: Path) -> None:
    file = stored(tmp_path / "few.safetensors", *gallery(4, 4))
    told = CliRunner().invoke(app, ["embedding-geometry", str(file), "--k", "10", "--json", "--device", "cpu"])
    values = json.loads(told.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))[0]["geometry"]
    assert values["hub_skewness.i2t"] is None  # every candidate is among the ten nearest of four
    assert values["hub_largest.i2t"] == 1


def test_the_command_says_what_does_not_compare(tmp_path: Path) -> None:
    image, text, owner = gallery(10, 10)
    image[3, 0] = math.nan
    files = [str(stored(tmp_path / "a.safetensors", image, text, owner)), str(stored(tmp_path / "b.safetensors", *gallery(20, 20)))]
    told = CliRunner().invoke(app, ["embedding-geometry", *files, "--device", "cpu"])
    assert told.exit_code == 0, told.output
    assert "1 image and 0 caption rows are not finite" in told.stdout
    assert "different galleries" in told.stdout
    missing = CliRunner().invoke(app, ["embedding-geometry", str(tmp_path / "none.safetensors")])
    assert isinstance(missing.exception, ValueError)
    assert "does not exist" in str(missing.exception)
