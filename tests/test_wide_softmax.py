"""A softmax without its cells: every reading that dense and streamed heads share agrees, training is the same, what is lost is said."""

from __future__ import annotations

import math
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toy import Toy, toy_batch, toy_reader

from gradscope.frameworks.clip import Clip, total_loss
from gradscope.heads import Heads, Observed
from gradscope.metrics.duplicates import group_sizes, identical_groups, identical_rows
from gradscope.metrics.softmax import dense_anchors, log_odds, negative_log_shares
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.margin import MARGINS, margin_matrix, off_diagonal_mean
from gradscope.probe import Probe
from gradscope.quantities import left_out_words, needs, quantity_set
from gradscope.quantities.zeros import Zeros
from gradscope.recipe import resolve
from gradscope.run_tables import comparable
from gradscope.runlog import Run
from gradscope.step_reader import StepReader
from gradscope.train import train
from gradscope.types import Batch, Embeddings
from gradscope.verdict import sentences, summarise

Readings = dict[tuple[str, str, str], object]


def repeating(size: int, seed: int) -> Batch:
    """A toy batch in which some captions have the same token ids."""
    batch = toy_batch(size, seed)
    ids = batch.texts["full"].clone()
    ids[size // 2] = ids[0]
    ids[-1] = ids[0]
    return replace(batch, texts={"full": ids})


def reader_of(framework: Clip, encoder: Toy) -> StepReader:
    hn = framework.objective if isinstance(framework.objective, HN) else HN(gamma=0.3)
    reader = toy_reader(encoder, framework.objective.name)
    objectives: dict[str, InfoNCE | HN] = {"infonce": InfoNCE(), "hn": hn}
    reader.heads = Heads(
        objectives=objectives, trained=framework.objective.name, kernel=framework.kernel, loss_form=framework.loss_form
    )
    return reader


def look(reader: StepReader, framework: Clip, encoder: Toy, batch: Batch) -> Readings:
    """The readings of one watched backward, by (quantity, term, key)."""
    encoder.zero_grad(set_to_none=True)
    reader.begin(1, 0)
    embeddings = encoder.embed(batch)
    start = torch.nn.functional.normalize(torch.randn(len(batch), 9, generator=torch.Generator().manual_seed(5)), dim=1)
    terms = framework(embeddings, start, batch.texts["full"], top=reader.top)
    with reader.watching(batch, embeddings, terms, initial_text=start, margin_text=start):
        total_loss(terms).backward()
    rows = [row for row in reader.flush() if row["quantity"] != "probe"]
    assert all(("streamed, no cells" in row["stamps"]) == (terms[0].scores is None) for row in rows)
    return {(row["quantity"], row["term"], row["key"]): row["value"] for row in rows}


def close(a: object, b: object, rel: float) -> bool:
    """Up to what fp32 products of unit rows leave in logits at scale 20."""
    pairs = zip(a, b, strict=True) if isinstance(a, list) and isinstance(b, list) else [(a, b)]
    return all(x == pytest.approx(y, rel=rel, abs=1e-5, nan_ok=True) for x, y in pairs)


@pytest.mark.parametrize("duplicates", ["keep", "exclude"])
@pytest.mark.parametrize("objective", [InfoNCE(), *(HN(gamma=0.4, margin=margin) for margin in MARGINS)], ids=str)
def test_streamed_and_dense_readings_agree(objective: InfoNCE | HN, duplicates: str) -> None:
    encoder, batch = Toy(), repeating(23, secrets.randbits(32))
    dense, streamed = (
        look(reader_of(framework, encoder), framework, encoder, batch)
        for kernel in ("dense", "streaming")
        for framework in [Clip(objective=objective, duplicates=duplicates, kernel=kernel, loss_form="residual")]
    )
    assert set(streamed) <= set(dense), set(streamed) - set(dense)
    wrong = {key: (dense[key], streamed[key]) for key in streamed if not close(streamed[key], dense[key], 2e-5)}
    assert not wrong
    for name in ("loss", "saturation", "gap", "hooks", "captions", "scale", "gradient", "zero_causes"):
        assert {key for key in dense if key[0] == name} == {key for key in streamed if key[0] == name}, name
    assert ("residual", "infonce", "share_top5_by_logit.i2t") in streamed
    assert ("residual", "hn", "share_top5_by_push.i2t") in streamed


@pytest.mark.parametrize("form", ["plain", "residual"])
@pytest.mark.parametrize("kernel", ["dense", "streaming"])
def test_the_set_loss_reads_the_same_without_the_other_gradient(kernel: str, form: str) -> None:
    encoder, batch, found = Toy(), repeating(19, secrets.randbits(32)), []
    framework = Clip(kernel=kernel, loss_form=form)
    for name in ("default", "loss"):
        reader = reader_of(framework, encoder)
        reader.quantities = quantity_set(name)
        found.append(look(reader, framework, encoder, batch))
        assert reader.heads.gradients == (name == "default")
    whole, alone = found
    assert set(alone) == {key for key in whole if key[0] in quantity_set("loss") and key[:2] != ("hooks", "hn")}
    assert all(alone[key] == whole[key] or alone[key] != alone[key] for key in alone)


def test_what_needs_the_cells_is_left_out_said_once_and_stamped() -> None:
    encoder, framework = Toy(), Clip(kernel="streaming")
    reader = reader_of(framework, encoder)
    values = look(reader, framework, encoder, toy_batch(9, 1))
    names = {quantity for quantity, _, _ in values}
    assert not names & {"concentration", "precision", "false_negatives"}
    assert ("zeros", "infonce", "entries.embeddings") in values
    assert ("zeros", "infonce", "rows.logits") not in values
    assert len(reader.failures) == 1
    assert "the softmax over 9 is streamed" in reader.failures[0]
    for name in ("concentration", "false_negatives", "precision", "parts of zeros", "parts of residual", "parts of geometry"):
        assert name in reader.failures[0]
    look(reader, framework, encoder, toy_batch(9, 2))
    assert len(reader.failures) == 1


@pytest.mark.parametrize("duplicates", ["keep", "exclude"])
@pytest.mark.parametrize("cluster", [1, 3])
def test_zeros_of_the_logit_gradient_are_counted_as_dense(cluster: int, duplicates: str) -> None:
    """Cosines are about .99 within a cluster and about 0 beyond it: at scale 400 a cell is far above 1e-38 or far below."""
    batch, found = repeating(12, secrets.randbits(32)), []
    rows = torch.eye(12).repeat_interleave(cluster, dim=0)[:12] + 0.03 * torch.randn(24, 12).abs().reshape(2, 12, 12)
    image, text = torch.nn.functional.normalize(rows, dim=2)
    for kernel in ("dense", "streaming"):
        framework = Clip(objective=HN(gamma=0.01), kernel=kernel, duplicates=duplicates, loss_form="residual")
        reader, pair = reader_of(framework, Toy()), [side.clone().requires_grad_() for side in (image, text)]
        reader.quantities = {"zeros": Zeros()}
        embeddings = Embeddings(image=pair[0], text=pair[1], scale=torch.tensor(400.0))
        reader.begin(1, 0)
        terms = framework(embeddings, token_ids=batch.texts["full"])
        with reader.watching(batch, embeddings, terms):
            total_loss(terms).backward()
        found.append({(r["term"], r["key"]): r["value"] for r in reader.flush() if r["quantity"] == "zeros"})
    dense, streamed = found
    assert 0.5 < dense["hn", "entries.logits"] < 1 or cluster == 1
    for key in streamed:
        assert streamed[key] == pytest.approx(dense[key], abs=1e-6), key
    assert {("infonce", "entries.logits"), ("hn", "all_zero.logits"), ("hn", "positive_zero.t2i")} < set(streamed)


@pytest.mark.parametrize("normalise", [False, True])
def test_in_a_foreign_loop(normalise: bool) -> None:
    """Where the loss is not ours both objectives are evaluated on copies, rows that are not unit yet included."""
    found = []
    for kernel in ("dense", "streaming"):
        encoder, batch = Toy(), toy_batch(11, 4)
        reader = reader_of(Clip(kernel=kernel, loss_form="residual"), encoder)
        reader.heads.normalise = normalise
        reader.begin(1, 0)
        unit = encoder.embed(batch)
        embeddings = replace(unit, image=3.0 * unit.image, text=0.5 * unit.text) if normalise else unit
        reader.open(embeddings, Observed(captions=batch.captions, token_ids=batch.texts["full"]))
        rows = {side: torch.nn.functional.normalize(getattr(embeddings, side), dim=1) for side in ("image", "text") if normalise}
        total_loss(Clip(kernel="dense")(replace(embeddings, **rows))).backward()
        reader.close()
        found.append({(row["quantity"], row["term"], row["key"]): row["value"] for row in reader.flush() if row["quantity"] != "probe"})
    dense, streamed = found
    assert {("hooks", "hn", "agreement"), ("loss", "hn", "true"), ("gap", "", "mean.t2i")} <= set(streamed) < set(dense)
    assert not {key: (dense[key], streamed[key]) for key in streamed if not close(streamed[key], dense[key], 2e-5)}
    assert streamed["hooks", "infonce", "agreement"] == pytest.approx(1, abs=1e-6)
    assert ("zeros", "infonce", "entries.logits") in streamed
    assert not [key for _, _, key in streamed if key.startswith(("positive_zero", "loss_zero"))], "the loop's loss has another form"


def test_an_unknown_kernel_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="kernel 'sparse' is unknown"):
        Probe(Toy(), kernel="sparse")


def test_nothing_lost_is_nothing_said() -> None:
    held = {name: quantity for name, quantity in quantity_set("loss").items() if name != "residual"}
    assert left_out_words(held, 8192) == ""
    assert "268" not in left_out_words(quantity_set("loss"), 8192)
    assert "256 MB a matrix" in left_out_words(quantity_set("loss"), 8192)
    assert "reads all; docs/streaming.md)" in left_out_words(quantity_set("loss"), 16)


def test_the_words_on_what_is_lost_are_short_and_the_page_has_the_rest() -> None:
    held = quantity_set("full")
    words = left_out_words(held, 4096)
    assert len(words) < 260
    assert "--kernel dense" in words
    page = (Path(__file__).parents[1] / "docs" / "streaming.md").read_text()
    whole = sorted(name for name, quantity in held.items() if needs(quantity, "cells"))
    assert f"| {', '.join(whole)} | all of it |" in page
    for name, quantity in held.items():
        if lost := getattr(quantity, "left_out", ""):
            assert f"| {name} | {lost} |" in page
            assert f"parts of {name}" in words


def test_a_loss_of_one_direction_keeps_its_cells() -> None:
    heads = Heads(objectives={"infonce": InfoNCE(), "hn": HN()}, trained="infonce", directions=("i2t",), kernel="streaming")
    embeddings = Toy().embed(toy_batch(6, 1))
    assert heads.evaluate("infonce", embeddings, Observed()).scores is not None


@pytest.mark.parametrize("size", [2, 3, 16, 70])
@pytest.mark.parametrize("scale", [1.0, 50.0, 200.0, 3000.0])
def test_dense_anchors_are_the_softmax_row_by_row(size: int, scale: float) -> None:
    """At 3000 one shift for all columns would lose those that live far below the others."""
    rows = torch.nn.functional.normalize(torch.randn(2 * size, 5), dim=1)
    excluded = torch.rand(size, size) < 0.2
    excluded = (excluded | excluded.T).fill_diagonal_(False)
    scores = HN(gamma=0.3).scores(rows[:size], rows[size:], torch.tensor(scale), None, excluded)
    found = dense_anchors(scores)
    rounding = 1e-14 * (scale + 10)  # logits are up to 1.3 scale, sums of their differences are to 2^-53 of that
    for direction, turn in (("i2t", lambda m: m), ("t2i", lambda m: m.T)):
        logits = turn(scores.logits)
        assert torch.allclose(found.log_odds[direction], log_odds(logits), rtol=0, atol=rounding)
        shares = negative_log_shares(logits).exp()
        numbers = torch.exp(torch.special.entr(shares).sum(dim=1))
        assert torch.allclose(found.effective[direction], numbers, rtol=rounding, equal_nan=True)
        assert scores.margin is not None
        raised = turn(scores.cosine + scores.margin).double().masked_fill(excluded, -math.inf).fill_diagonal_(-math.inf)
        assert torch.equal(found.hardest[direction], raised.amax(dim=1))
    assert torch.equal(found.positive, scores.cosine.diagonal().double())


def test_dense_anchors_leave_float64_logits_alone() -> None:
    scores = InfoNCE().scores(*(torch.eye(5, dtype=torch.float64),) * 2, torch.tensor(3.0, dtype=torch.float64))
    before = scores.logits.clone()
    dense_anchors(scores)
    assert torch.equal(before, scores.logits)


@pytest.mark.parametrize("size", [1, 2, 40])
def test_groups_are_the_equal_rows(size: int) -> None:
    ids = torch.randint(0, 2, (size, 4))
    groups = identical_groups(ids)
    slow = [next(j for j in range(size) if torch.equal(ids[j], ids[i])) for i in range(size)]
    assert groups.tolist() == slow
    assert group_sizes(groups).tolist() == [slow.count(g) for g in slow]
    equal = torch.tensor([[i != j and slow[i] == slow[j] for j in range(size)] for i in range(size)])
    assert torch.equal(identical_rows(ids), equal)


@pytest.mark.parametrize("margin", MARGINS)
def test_the_mean_margin_without_the_matrix(margin: str) -> None:
    text, start = (torch.nn.functional.normalize(torch.randn(11, d, dtype=torch.float64), dim=1) for d in (5, 7))
    groups = torch.tensor([0, 1, 2, 0, 4, 5, 2, 0, 8, 9, 10])
    excluded = (groups[:, None] == groups).fill_diagonal_(False)
    for given, mask in ((None, None), (groups, excluded)):
        slow = off_diagonal_mean(margin_matrix(margin, 0.4, text, start, mask), mask)
        assert float(HN(gamma=0.4, margin=margin).margin_mean(text, start, given)) == pytest.approx(float(slow), abs=1e-13)


# ---- training


@pytest.fixture
def run(small_encoder: Path, scenes_folder: Path, tmp_path: Path) -> Callable[..., tuple[Run, dict[str, Tensor]]]:
    """``run(name, changes)``: a finished small CPU run and its weights."""

    def go(name: str, changes: dict[str, object]) -> tuple[Run, dict[str, Tensor]]:
        base = {"data.name": str(scenes_folder), "encoder.name": str(small_encoder), "train.device": "cpu", "train.batch_size": 8}
        train(resolve({}, {**base, "train.max_steps": 3, "train.lr": 1e-3, **changes}), tmp_path / name, quiet=True)
        found = Run(tmp_path / name)
        return found, load_file(found.checkpoints()[-1] / "encoder" / "open_clip_model.safetensors")

    return go


CHANGES = [
    {"objective.name": "hn", "objective.duplicates": "exclude"},
    {"train.accumulate": 2, "train.accumulate_mode": "cached", "objective.name": "hn", "objective.margin": "frozen"},
]


@pytest.mark.parametrize("objective", [InfoNCE(), HN(gamma=0.3)], ids=str)
def test_three_steps_of_plain_descent_end_at_the_same_weights(objective: InfoNCE | HN) -> None:
    ends = []
    for kernel in ("dense", "streaming"):
        encoder = Toy(scale=20.0)
        for k in range(3):
            encoder.zero_grad(set_to_none=True)
            batch = repeating(12, k)
            framework = Clip(objective=objective, kernel=kernel, loss_form="residual", duplicates="exclude")
            total_loss(framework(encoder.embed(batch), token_ids=batch.texts["full"])).backward()
            with torch.no_grad():
                for parameter in encoder.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.05 * parameter.grad)
        ends.append(torch.cat([p.detach().flatten() for p in encoder.parameters()]))
    assert float((ends[0] - ends[1]).norm() / ends[0].norm()) < 1e-6


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("changes", CHANGES, ids=["one batch", "cached"])
def test_training_streamed_is_training_dense(run: Callable[..., tuple[Run, dict[str, Tensor]]], changes: dict[str, object]) -> None:
    probe = {"probe.log_grads": True, "probe.every": 2}
    wide, weights = run("wide", {**changes, **probe, "objective.kernel": "streaming"})
    dense, expected = run("dense", {**changes, **probe, "objective.kernel": "dense", "objective.loss_form": "residual"})
    _, unwatched = run("unwatched", {**changes, "objective.kernel": "streaming"})
    assert all(torch.equal(value, unwatched[name]) for name, value in weights.items())
    # Adam makes full steps of what is rounding only (the bias of attention keys): a few entries differ by a whole step.
    apart = torch.cat([(value - expected[name]).flatten() for name, value in weights.items()])
    assert float((apart.abs() > 1e-6).double().mean()) < 0.01
    steps = [comparable(r.steps) for r in (wide, dense)]
    assert steps[0]["loss"].tolist() == pytest.approx(steps[1]["loss"].tolist(), rel=1e-5)
    assert steps[0]["grad_norm"].tolist() == pytest.approx(steps[1]["grad_norm"].tolist(), rel=1e-4)
    for column in ("duplicates_excluded", "anchors_without_negatives"):
        assert (column in steps[0]) == (column in steps[1]) == ("objective.duplicates" in changes)
        if column in steps[0]:
            assert steps[0][column].tolist() == steps[1][column].tolist()
    console = (wide.path / "console.log").read_text()
    assert "loss streaming: as asked; value and gradient in the residual form" in console
    assert console.count("is streamed, without single cells; not read: ") == 1
    assert "failed" not in console
    assert wide.readings["stamps"].str.contains("streamed, no cells").any()
    assert any("pull on the positive rounded to 0 in 0%." in line for line in sentences(summarise(wide.path)))
    with pytest.raises(ValueError, match="with --log-grads --probe-set full --kernel dense to record it"):
        wide.reading("concentration", "binned_predicted", "")
    assert "loss dense: as asked; in the residual form" in (dense.path / "console.log").read_text()


def test_streaming_is_the_residual_form_and_a_contradiction_is_refused() -> None:
    assert resolve({}, {"objective.kernel": "streaming"}).objective.loss_form == "residual"
    with pytest.raises(ValueError, match="--loss-form plain would be ignored"):
        resolve({}, {"objective.kernel": "streaming", "objective.loss_form": "plain"})
    with pytest.raises(ValueError, match="--kernel"):
        resolve({}, {"objective.kernel": "sparse"})
    spelled_out = {"objective": {"kernel": "auto", "loss_form": "plain"}}
    assert resolve(spelled_out, {"objective.kernel": "streaming"}).objective.loss_form == "residual"
    again = {"objective": {"kernel": "streaming", "loss_form": "residual"}}
    assert resolve(again, {}).objective == resolve({}, {"objective.kernel": "streaming"}).objective


# ---- memory

WIDE = """
import torch
from memory import mebibytes
from toy import Toy, toy_batch, toy_reader
from collections.abc import Callable
from dataclasses import replace
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.quantities import quantity_set
from gradscope.types import Embeddings

def step(n, k):
    batch = toy_batch(n, k)
    rows = torch.nn.functional.normalize(torch.randn(2 * n, 16), dim=1)
    image, text = rows[:n].clone().requires_grad_(), rows[n:].clone().requires_grad_()
    embeddings = Embeddings(image=image, text=text, scale=torch.tensor(50.0))
    reader.begin(k, 0)
    terms = Clip(duplicates="exclude")(embeddings, token_ids=batch.texts["full"], top=reader.top)
    with reader.watching(batch, embeddings, terms):
        total_loss(terms).backward()
    return reader.flush()

reader = toy_reader(Toy())
reader.quantities = quantity_set("default")
step(64, 1)
before = mebibytes("VmHWM")
found = step(8192, 2)
assert {row["quantity"] for row in found} >= {"loss", "captions", "gap", "residual", "saturation", "zeros", "hooks"}, found
assert not any(row["key"] == "failed" for row in found), reader.failures
print(mebibytes("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_probed_step_at_width_8192_holds_no_matrix() -> None:
    done = subprocess.run([sys.executable, "-c", WIDE], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 250  # MiB; one fp32 matrix would be 256


def test_the_verdict_on_a_foreign_loop_read_streamed_says_what_it_cannot_know(tmp_path: Path) -> None:
    encoder = Toy()
    with Probe(encoder, output=tmp_path / "run", kernel="streaming", probe_set="default", every=1) as probe:
        embeddings = encoder.embed(toy_batch(7, 1))
        probe.watch(embeddings.image, embeddings.text, embeddings.scale)
        total_loss(Clip(kernel="dense")(embeddings)).backward()
        torch.optim.SGD(encoder.parameters(), lr=0.1).step()
    assert any("Whether the loss lost its pull was not read" in line for line in sentences(summarise(tmp_path / "run")))
