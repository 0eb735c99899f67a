"""Training and evaluation on two and three gloo processes against one: the same update, readings, recall; shards; resume."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import SMALL
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscope import distributed
from gradscope import train as loop
from gradscope.assembly import check_same_records
from gradscope.data.batching import Batches
from gradscope.data.source import open_data
from gradscope.encoders.load import load_encoder
from gradscope.evaluate import evaluate
from gradscope.objectives.infonce import InfoNCE
from gradscope.quantities.accumulation import Accumulation
from gradscope.quantities.saturation import Saturation
from gradscope.recipe import Recipe, Train, resolve
from gradscope.run_tables import comparable
from gradscope.runlog import Run, RunLog
from gradscope.step_reader import StepReader
from gradscope.training_data import training_data
from gradscope.types import Embeddings, Reading, Step

pytestmark = pytest.mark.usefixtures("one_thread")

TWICE = {"train.accumulate": 2, "train.batch_size": 4}
LOCKED = {"encoder.freeze": "image", "encoder.checkpoint_activations": True}
UNWATCHED = {"probe.log_grads": False}
#: What each run changes of the recipe below. Three steps of SGD with momentum, unless it says more.
RUNS: dict[str, dict[str, Any]] = {
    "narrow": {**TWICE, "train.accumulate_mode": "narrow", "objective.framework": "hn_clip", "train.grad_clip": 0.5},
    "cached": {**TWICE, "train.accumulate_mode": "cached", "objective.framework": "hn_clip"},
    "streaming": {"objective.name": "hn", "objective.kernel": "streaming", "objective.duplicates": "exclude"},
    "frozen": {**LOCKED, **TWICE, "train.accumulate_mode": "cached", "objective.name": "hn", "objective.margin": "frozen"},
    "sharded": {**TWICE, "train.accumulate_mode": "narrow", "train.shard": "full", "train.grad_clip": 0.5, "train.max_steps": 6},
    "sharded cached": {**TWICE, "train.accumulate_mode": "cached", "train.shard": "full", "objective.framework": "hn_clip"},
    "sharded frozen": {**LOCKED, "train.shard": "full"},
}
#: Runs of AdamW that are broken off at step 3 of 6 and go on: the same bits.
RESUMED = {"dropout": {}, "in shards": {"train.shard": "full"}}
#: Readings that are rounding errors themselves, or counts of entries whose sign or zero is decided by one.
ROUNDING = ("sketch", "precision")


def recipe(scenes: Path, encoder: Path, changes: dict[str, Any]) -> Recipe:
    base = {
        "data.name": str(scenes),
        "encoder.name": str(encoder),
        "train.device": "cpu",
        "train.batch_size": 8,
        "train.max_steps": 3,
        "train.checkpoint_every": 3,
        "probe.log_grads": True,
        "probe.every": 2,
    }
    return resolve({}, {**base, **changes})


def sgd(module: nn.Module, settings: Train) -> Optimizer:
    """Adam hides a constant factor."""
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.02, momentum=0.9)


def run(settings: Recipe, output: Path, *, optimizer: Callable[..., Optimizer] | None = sgd, resume: bool = False) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_prune", lambda *_, **__: None)
        if optimizer:
            patch.setattr(loop, "make_optimizer", optimizer)
            patch.setattr(loop, "set_rate", lambda optimizer, rate: None)
        loop.train(settings, output, quiet=True, resume=resume)


def broken_off(whole: Path, copy: Path) -> Path:
    """A run as it was when step 3 had been saved and nothing later."""
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000006")
    (copy / "DONE").unlink()
    return copy


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(Run(run).checkpoints()[-1] / "encoder" / "open_clip_model.safetensors")


# ---- what the processes do


def process(rank: int, size: int, port: int, work: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        work()
    finally:
        dist.destroy_process_group()


def spawn(size: int, work: Callable[[], None]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.set_forkserver_preload(["gradscope.train", "open_clip"])  # imported once, not by each process
    mp.start_processes(process, args=(size, port, work), nprocs=size, start_method="forkserver")


def three(scenes: Path, encoder: Path, folder: Path) -> None:
    the_gather()
    embed_five(scenes, encoder, folder)


def two(scenes: Path, encoder: Path, dropout: Path, folder: Path) -> None:
    the_layer()
    the_gather()
    other_records(scenes, encoder)
    embed_five(scenes, encoder, folder)
    for name, changes in RUNS.items():
        run(recipe(scenes, encoder, changes), folder / name)
    run(recipe(scenes, encoder, {**RUNS["narrow"], **UNWATCHED}), folder / "unwatched")
    for name, changes in RESUMED.items():
        settings = recipe(scenes, dropout, {**changes, "train.max_steps": 6})
        run(settings, folder / name, optimizer=None)
        with distributed.first_rank_first():
            if distributed.rank() == 0:
                broken_off(folder / name, folder / f"{name} again")
        run(settings, folder / f"{name} again", optimizer=None, resume=True)
    a_loss_that_is_no_number(scenes, encoder, folder / "nan")
    a_probe_that_fails_on_the_second_rank(scenes, encoder, folder / "failing")
    a_streamed_probe_that_fails_on_the_second_rank(scenes, encoder, folder / "failing streamed")
    a_sharded_probe_that_fails_on_the_second_rank(scenes, encoder, folder / "failing in shards")


def the_layer() -> None:
    rank = distributed.rank()
    assert [distributed.own_share(n) for n in (5, 1, 0)] == [
        (slice(0, 3), slice(3, 5))[rank],
        (slice(0, 1), slice(1, 1))[rank],
        slice(0, 0),
    ]
    rows = torch.arange(10.0).reshape(5, 2)
    assert torch.equal(distributed.concatenated([*rows[distributed.own_share(5)].split(1)], rows.device), rows)
    assert torch.equal(distributed.concatenated([rows] if rank else [], rows.device), rows)
    assert distributed.everyones(rank) == [0, 1]
    assert distributed.shared(rank) == 0
    assert torch.equal(distributed.from_first(None if rank else rows.int(), rows.device), rows.int())
    means = distributed.averaged([torch.tensor([1.0 + rank]), None, torch.full((2, 2), 3.0 * rank)])
    assert [None if m is None else m.tolist() for m in means] == [[1.5], None, [[1.5, 1.5], [1.5, 1.5]]]
    whole = torch.arange(8.0).reshape(4, 2)
    own = torch.where(torch.arange(4)[:, None] // 2 == rank, whole, -1.0)
    assert torch.equal(distributed.completed(own), whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a name that torch gives up would be said at each step of a user's run
        assert torch.equal(distributed.summed_rows((1 + rank) * whole), 3 * whole[2 * rank : 2 * rank + 2])


def the_gather() -> None:
    """The mean over ranks of the gradient through ``joined``, against autograd on all rows at once; any loss, float64."""
    generator = torch.Generator().manual_seed(distributed.shared(torch.seed()) % 2**40)
    x, w = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (4, 3)))
    scale = torch.tensor(1.7, dtype=torch.float64)

    def loss(rows: Tensor, scale: Tensor) -> Tensor:
        return (scale * rows @ rows.T).tanh().sum() + (rows**3).sum()

    full = [t.clone().requires_grad_() for t in (w, scale)]
    expected = torch.autograd.grad(loss(x @ full[0], full[1]), full)
    own = [t.clone().requires_grad_() for t in (w, scale)]
    joined = distributed.joined(x[distributed.own_share(6)] @ own[0])
    assert torch.equal(joined, x @ w)
    found = distributed.averaged(list(torch.autograd.grad(loss(joined, own[1]), own)))
    for a, b in zip(found, expected, strict=True):
        # Terms of up to some 1e3 are added in another order: 1e-12 at worst, where a wrong factor is off by their size.
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def other_records(scenes: Path, encoder: Path) -> None:
    """A node whose disk holds something else: each rank says so, none trains."""
    split = ("train", "test")[distributed.rank()]
    data = training_data(recipe(scenes, encoder, {"data.train_split": split}))
    with pytest.raises(ValueError, match="processes 1 read other records than process 0"):
        check_same_records(data)


def a_loss_that_is_no_number(scenes: Path, encoder: Path, output: Path) -> None:
    """The first rank is slow to write; no other leaves before, since torchrun would then end the first one."""
    write = RunLog.write_steps

    def slowly(log: RunLog, rows: Any) -> None:
        time.sleep(0.3)
        write(log, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "write_steps", slowly)
        with pytest.raises(FloatingPointError, match="the loss of step 2 is nan; first non-finite parameter"):
            run(recipe(scenes, encoder, {"train.lr": 1e38}), output, optimizer=None)
    assert Run(output).steps["step"].tolist() == [1, 2]
    assert "the loss of step 2 is nan" in (output / "console.log").read_text()


def a_probe_that_fails_on_the_second_rank(scenes: Path, encoder: Path, output: Path) -> None:
    """A quantity at every probed step; and at the first a gradient of the second backward, at the third all of the heads, for both of
    which the others would wait in a collective."""
    saturation, through, known = Saturation.__call__, StepReader.replaying, StepReader._known

    def broken(self: Saturation, step: Step) -> list[Reading]:
        if distributed.rank():
            raise ZeroDivisionError("broken on purpose")
        return saturation(self, step)

    def without_graph(reader: StepReader, embeddings: Embeddings, rows: slice) -> None:
        cut = distributed.rank() and reader._index == 1
        image, text = (side.detach() if cut else side for side in (embeddings.image, embeddings.text))
        through(reader, replace(embeddings, image=image, text=text), rows)

    def out_of_memory(reader: StepReader, *args: Any) -> Any:
        if distributed.rank() and reader._index == 3:
            raise MemoryError("broken on purpose")
        return known(reader, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saturation, "__call__", broken)
        patch.setattr(StepReader, "replaying", without_graph)
        patch.setattr(StepReader, "_known", out_of_memory)
        run(recipe(scenes, encoder, RUNS["cached"]), output)


def a_streamed_probe_that_fails_on_the_second_rank(scenes: Path, encoder: Path, output: Path) -> None:
    """At the first probed step, the objective that is not trained: the others would wait in the sums of its softmax."""
    streamed, calls = InfoNCE.streamed, []

    def broken(self: InfoNCE, *args: Any, **settings: Any) -> Any:
        calls.append(0)
        if distributed.rank() and len(calls) == 1:
            raise MemoryError("broken on purpose")
        return streamed(self, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InfoNCE, "streamed", broken)
        run(recipe(scenes, encoder, RUNS["streaming"]), output)


def a_sharded_probe_that_fails_on_the_second_rank(scenes: Path, encoder: Path, output: Path) -> None:
    """A quantity at the first probed step and the heads at the second, each before a collective in which the others would wait."""
    accumulation, measured = Accumulation.__call__, StepReader._measured

    def broken(self: Accumulation, step: Step) -> list[Reading]:
        if distributed.rank() and step.index == 1:
            raise ZeroDivisionError("broken on purpose")
        return accumulation(self, step)

    def out_of_memory(reader: StepReader, *args: Any) -> Step:
        if distributed.rank() and reader._index == 3:
            raise MemoryError("broken on purpose")
        return measured(reader, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accumulation, "__call__", broken)
        patch.setattr(StepReader, "_measured", out_of_memory)
        run(recipe(scenes, encoder, RUNS["sharded"]), output)


def embed_five(scenes: Path, encoder: Path, folder: Path) -> None:
    """D02: five pairs, batches of two."""
    records = open_data(str(scenes)).records("test")[:5]
    result, embedded = evaluate(load_encoder(str(encoder)), records, batch_size=2, resamples=50)
    name = f"five-{distributed.world()}-{distributed.rank()}.pt"
    torch.save({"image": embedded.image, "text": embedded.text, "ids": embedded.ids, "rows": result.dicts()}, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def several(folder: Path, scenes_folder: Path, small_encoder: Path, dropout_encoder: Path) -> Path:
    """All that two processes do, at once: to start them takes longer than most of it."""
    spawn(2, partial(two, scenes_folder, small_encoder, dropout_encoder, folder))
    return folder


@pytest.fixture(scope="module")
def dropout_encoder(make_encoder: Callable[..., Path]) -> Path:
    vision = {**SMALL["model_cfg"]["vision_cfg"], "patch_dropout": 0.5}
    return make_encoder(config={**SMALL, "model_cfg": {**SMALL["model_cfg"], "vision_cfg": vision}})


# ---- what must come out


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_equal_one(several, scenes_folder, small_encoder, tmp_path, name):
    run(recipe(scenes_folder, small_encoder, {**RUNS[name], "train.shard": "none"}), tmp_path / "one")
    same_update(weights(tmp_path / "one"), weights(several / name), load_file(small_encoder / "open_clip_model.safetensors"))
    one, two = Run(tmp_path / "one"), Run(several / name)
    a, b = comparable(one.evals), comparable(two.evals)
    assert a.drop(columns=["value", "low", "high"]).equals(b.drop(columns=["value", "low", "high"]))
    assert b["value"].tolist() == pytest.approx(a["value"].tolist(), abs=1e-9)
    for column in ("loss", "grad_norm", "scale", "samples", "truncated", "negatives_per_anchor"):
        assert two.steps[column].tolist() == pytest.approx(one.steps[column].tolist(), rel=1e-5), column
    same_readings(one, two, sharded=name.startswith("sharded"))


def same_update(one: dict[str, Tensor], two: dict[str, Tensor], start: dict[str, Tensor]) -> None:
    update = torch.cat([(one[k].double() - start[k].double()).flatten() for k in one]).norm()
    error = torch.cat([(one[k].double() - two[k].double()).flatten() for k in one]).norm()
    assert update > 0
    assert error / update < 1e-5


def same_readings(one: Run, two: Run, *, sharded: bool) -> None:
    key = ["step", "quantity", "term", "key"]
    a, b = (dict(zip(zip(*(f[k] for k in key), strict=True), f["value"], strict=True)) for f in (one.readings, two.readings))
    of_parameters = [k for k in a if k not in b]  # and of the probe: what the second backward took
    assert {k[1] for k in of_parameters} == ({"gradient", "zeros", "zero_causes", "probe"} if sharded else set())
    assert not [k for k in b if k not in a]
    for name in ("loss", "residual", "saturation", "gap", "accumulation", "scale", "hooks"):
        assert any(k[1] == name for k in b), name
    for k in b:
        if k[1] in ("probe", *ROUNDING) or "zero" in k[3] or "zero" in k[1]:
            continue
        loose = k[1] in ("concentration", "geometry", "optimizer", "false_negatives")
        close = 1e-4 if loose else 1e-5 if "log10" in k[3] else 1e-6  # a logarithm near 0 has no relative error
        assert b[k] == pytest.approx(a[k], rel=1e-3 if loose else 1e-5, abs=close, nan_ok=True), k


def test_the_probe_changes_no_bit_on_two_processes(several):
    watched, plain = weights(several / "narrow"), weights(several / "unwatched")
    assert all(torch.equal(watched[name], plain[name]) for name in plain)


def test_the_first_rank_alone_writes(several):
    run = Run(several / "narrow")
    assert run.done
    assert run.steps["step"].tolist() == [1, 2, 3]
    assert "4 rows a micro-batch, 2 on each of 2 ranks" in (several / "narrow" / "console.log").read_text()
    assert "dealt to 2 ranks" in run.readings["stamps"].iloc[0]
    assert (several / "narrow" / "console.log").read_text().count("rows a micro-batch") == 1


def test_what_fails_on_another_rank_is_counted_and_said(several):
    found = Run(several / "failing").readings
    failed = found[found["key"] == "failed"]
    assert list(zip(failed["step"], failed["quantity"], failed["value"], strict=True)) == [
        (1, "second backward", 1.0),
        (1, "saturation", 1.0),
        (3, "heads", 1.0),
    ]
    lines = (several / "failing" / "console.log").read_text().splitlines()
    said = [line.partition("step ")[2] for line in lines if "of the probe failed" in line]
    assert [line.partition(" of the probe")[0] for line in said] == [
        "1, rank 1: 'second backward'",
        "1, rank 1: 'saturation'",
        "3, rank 1: 'heads'",
    ]
    first = found[found["step"] == 1]
    assert not first[first["quantity"] == "saturation"].query("key != 'failed'").empty  # of the first rank: those of all rows
    assert first.query("quantity == 'gradient' and term == 'hn'").empty  # a mean over ranks of which one is missing
    whole, watched = weights(several / "cached"), weights(several / "failing")
    assert all(torch.equal(whole[name], watched[name]) for name in whole)  # and training went on


def test_a_streamed_objective_that_fails_on_one_rank_leaves_none_waiting(several):
    found = Run(several / "failing streamed").readings
    failed = found[found["key"] == "failed"]
    assert list(zip(failed["step"], failed["quantity"], failed["value"], strict=True)) == [(1, "heads", 1.0)]
    assert set(found[found["quantity"] == "loss"]["step"]) == {3}
    whole, watched = weights(several / "streaming"), weights(several / "failing streamed")
    assert all(torch.equal(whole[name], watched[name]) for name in whole)


def test_what_fails_on_one_rank_of_a_sharded_run_leaves_none_waiting(several):
    found, whole = (Run(several / name).readings for name in ("failing in shards", "sharded"))
    failed = found[found["key"] == "failed"]
    assert list(zip(failed["step"], failed["quantity"], failed["value"], strict=True)) == [(1, "accumulation", 1.0), (3, "heads", 1.0)]
    read = {step: set(rows["quantity"]) - {"probe"} for step, rows in found[found["key"] != "failed"].groupby("step")}
    expected = set(whole["quantity"]) - {"probe"}
    assert read == {1: expected - {"accumulation"}, 5: expected} | ({3: set()} if 3 in read else {})
    assert all(
        torch.equal(tensor, weights(several / "sharded")[name]) for name, tensor in weights(several / "failing in shards").items()
    )


@pytest.mark.parametrize("name", RESUMED)
def test_resume_on_as_many_processes_gives_the_same_bits(several, name):
    """Each rank's random state is its own and comes back: half of the patches are dropped."""
    whole, again = weights(several / name), weights(several / f"{name} again")
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    state = torch.load(several / name / "checkpoints" / "step-000006" / "trainer.pt", weights_only=True)
    first, second = (host for host, _ in state["random_states_of_ranks"])
    assert not torch.equal(first, second)


def test_a_run_of_two_sharded_processes_goes_on_as_one(several, scenes_folder, small_encoder, tmp_path):
    """The files do not know how many there were: moments are whole, the order of the records is a function of seed and epoch."""
    settings = {**RUNS["sharded"], "train.shard": "none"}
    run(recipe(scenes_folder, small_encoder, settings), broken_off(several / "sharded", tmp_path / "again"), resume=True)
    start = load_file(small_encoder / "open_clip_model.safetensors")
    same_update(weights(several / "sharded"), weights(tmp_path / "again"), start)


def test_five_pairs_on_one_two_and_three_processes(several, folder, scenes_folder, small_encoder):
    """D02: the rows are the same bits, each record once and in order; so are all numbers; nothing hangs."""
    spawn(3, partial(three, scenes_folder, small_encoder, folder))
    embed_five(scenes_folder, small_encoder, folder)
    one = torch.load(folder / "five-1-0.pt")
    assert {row["n_queries"] for row in one["rows"]} == {5}
    for size in (2, 3):
        for rank in range(size):
            found = torch.load(folder / f"five-{size}-{rank}.pt")
            assert torch.equal(found["image"], one["image"])
            assert torch.equal(found["text"], one["text"])
            assert (found["ids"], found["rows"]) == (one["ids"], one["rows"])


def test_a_softmax_is_dealt_evenly_or_refused(scenes_folder, small_encoder):
    records, encoder = open_data(str(scenes_folder)).records("train"), load_encoder(str(small_encoder))
    with pytest.raises(ValueError, match=r"--batch-size 10 .* dealt evenly to 4 of them; use 8 or 12"):
        Batches(records=records, encoder=encoder, batch_size=10, accumulate=1, seed=0, ranks=4)


def test_ranks_together_read_what_one_reads(scenes_folder, small_encoder):
    """Narrow: each micro-batch in its order. Wide: the order in which ranks are gathered. Pixels of the own part only."""
    records, encoder = open_data(str(scenes_folder)).records("train"), load_encoder(str(small_encoder))
    ranks = [Batches(records=records, encoder=encoder, batch_size=6, accumulate=2, seed=3, rank=r, ranks=3) for r in range(3)]
    one = Batches(records=records, encoder=encoder, batch_size=6, accumulate=2, seed=3)
    whole, parts = next(one.steps(2, 2)), [next(batches.steps(2, 2)) for batches in ranks]
    assert one.of_all_ranks(2, whole, wide=True) is whole
    for micro in (0, 1):
        assert torch.equal(torch.cat([part[micro].images["full"] for part in parts]), whole[micro].images["full"])
        known = ranks[1].of_all_ranks(2, parts[1], wide=False)[micro]
        assert (known.ids, known.captions, dict(known.images)) == (whole[micro].ids, whole[micro].captions, {})
        assert torch.equal(known.texts["full"], whole[micro].texts["full"])
        assert torch.equal(known.lengths, whole[micro].lengths)
    (wide,) = ranks[2].of_all_ranks(2, parts[2], wide=True)
    assert wide.ids == tuple(i for part in parts for batch in part for i in batch.ids)


def test_shards_need_several_processes(scenes_folder, small_encoder, tmp_path):
    with pytest.raises(ValueError, match="divides the parameters among several processes, and this is one; start it with torchrun"):
        run(recipe(scenes_folder, small_encoder, {"train.shard": "full"}), tmp_path / "one")


def test_shards_and_a_loss_scale_are_refused(scenes_folder, small_encoder):
    with pytest.raises(ValueError, match="use --precision bf16"):
        recipe(scenes_folder, small_encoder, {"train.shard": "full", "train.precision": "fp16"})
