"""The probe under DDP and FSDP2: two gloo processes against one, readings labelled by rank, every rank in every collective."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_probe import Towers, batch, info_nce, norm
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradscope.distributed import local
from gradscope.probe import Probe
from gradscope.runlog import Run

SIZE = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[Any, Any]]]:
    """Every case below on the same two processes; case -> what each rank returned."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload(["gradscope.probe", "open_clip"])  # imported once, not by each process
    mp.start_processes(_process, args=(folder,), nprocs=2, start_method="forkserver")
    found: dict[str, list[dict[Any, Any]]] = {"folder": [{"path": folder}]}
    for case in CASES:
        read = [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in (0, 1)]
        found[case] = [{tuple(key.split("|")): value for key, value in rows.items()} for rows in read]
    return found


def _process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        for name, case in CASES.items():
            rows = {"|".join(key): value for key, value in case(rank, folder).items()}
            (folder / f"{name}-{rank}.json").write_text(json.dumps(rows))
    finally:
        dist.destroy_process_group()


def whole_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return batch(0, 2 * SIZE)


def part(rank: int) -> list[torch.Tensor]:
    return [piece[rank * SIZE : (rank + 1) * SIZE] for piece in whole_batch()]


def one_process() -> dict[Any, Any]:
    model = Towers()
    with Probe(model, probe_set="full", every=1) as probe:
        info_nce(*model(*whole_batch())).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return probe.last


def clip_loss(rank: int, **settings: bool) -> open_clip.ClipLoss:
    return open_clip.ClipLoss(rank=rank, world_size=2, **settings)


def ddp_with_gather(rank: int, folder: Path) -> dict[Any, Any]:
    model = DistributedDataParallel(Towers())
    loss = clip_loss(rank, local_loss=True, gather_with_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Probe(model, loss=loss, output=folder / "run", probe_set="full", every=1) as probe:
        for _ in range(2):
            loss(*model(*part(rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return probe.last


def test_ddp_reads_the_softmax_over_all_ranks_and_the_averaged_gradient(ranks: Any) -> None:
    """G19, G24: the same numbers as one process with the whole batch; the local norms stand beside, by rank."""
    pair, expected = ranks["gather"], one_process()
    for found in pair:
        for key in (("loss", "infonce", "trained"), ("residual", "infonce", "mean.i2t"), ("residual", "hn", "mean.t2i")):
            assert found[key] == pytest.approx(expected[key], rel=1e-6), key
        for key in (("accumulation", "total", "norm"), ("gradient", "infonce", "norm")):
            assert found[key] == pytest.approx(expected[key], rel=1e-5), key
        assert found["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-6)
        assert found["hooks", "infonce", "factor"] == pytest.approx(2.0, rel=1e-5)  # the gather sends the gradient of both ranks back
    local = pair[0]["accumulation", "total", "norm_by_rank"]
    assert local == pair[1]["accumulation", "total", "norm_by_rank"]
    assert len(set(local)) == 2
    assert all(value != pytest.approx(expected["accumulation", "total", "norm"], rel=1e-3) for value in local)
    run = Run(ranks["folder"][0]["path"] / "run")
    assert run.steps["step"].tolist() == [1, 2]
    assert run.provenance["width"] == 2 * SIZE
    assert "softmax over 2 ranks; gradients averaged over 2 ranks" in run.readings["stamps"].iloc[0]


def gathered_by(rank: int, **settings: bool) -> dict[Any, Any]:
    model = DistributedDataParallel(Towers())
    loss = clip_loss(rank, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Probe(model, loss=loss, probe_set="full", every=1) as probe:
        loss(*model(*part(rank))).backward()
        optimizer.step()
    return probe.last


def gathered_without_gradient(rank: int, folder: Path) -> dict[Any, Any]:
    return gathered_by(rank, local_loss=False, gather_with_grad=False)


def local_rows_without_gradient(rank: int, folder: Path) -> dict[Any, Any]:
    return gathered_by(rank, local_loss=True, gather_with_grad=False)


def test_a_gather_without_gradient_halves_the_step_and_that_is_seen(ranks: Any) -> None:
    """G24: open_clip's default. Each rank passes the gradient of its own rows only, DDP averages: the step is the batch's gradient / W;
    the reading of the objective itself is not."""
    expected = one_process()
    for found in ranks["no gradient"]:
        assert found["loss", "infonce", "trained"] == pytest.approx(expected["loss", "infonce", "trained"], rel=1e-6)
        assert found["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-6)
        assert found["hooks", "infonce", "factor"] == pytest.approx(1.0, rel=1e-5)
        key = ("gradient", "infonce", "norm.text")
        assert found[key] == pytest.approx(expected[key], rel=1e-5)
        assert found["accumulation", "total", "norm"] < 0.9 * expected["accumulation", "total", "norm"]


def test_local_rows_without_gradient_are_another_loss(ranks: Any) -> None:
    """G24: logits are (local, global), columns have no gradient: rows are read whole, and the agreement says that it is not InfoNCE."""
    expected = one_process()
    for found in ranks["local rows"]:
        assert found["residual", "infonce", "mean.i2t"] == pytest.approx(expected["residual", "infonce", "mean.i2t"], rel=1e-6)
        assert 0.1 < found["hooks", "infonce", "agreement"] < 0.99


def different_sizes(rank: int, folder: Path, gather: bool) -> dict[Any, Any]:
    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Probe(model, gather=gather, output=folder / f"sizes-{gather}", every=1) as probe:
        for _ in range(2):
            info_nce(*model(*(piece[: SIZE - rank] for piece in part(rank)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return probe.last


def different_sizes_gathered(rank: int, folder: Path) -> dict[Any, Any]:
    return different_sizes(rank, folder, True)


def different_sizes_alone(rank: int, folder: Path) -> dict[Any, Any]:
    return different_sizes(rank, folder, False)


def test_ranks_with_batches_of_different_sizes_do_not_hang(ranks: Any) -> None:
    """One softmax over both cannot be read, which each rank says; a softmax of its own can."""
    for found in ranks["sizes, gathered"]:
        assert found["embeddings", "", "failed"] == 1.0
        assert ("loss", "infonce", "trained") not in found
    words = (ranks["folder"][0]["path"] / "sizes-True" / "console.log").read_text()
    assert words.count("the ranks hold batches of [4, 3] pairs") == 2  # in full, and how often
    for found in ranks["sizes, alone"]:
        assert found["hooks", "infonce", "agreement"] == pytest.approx(1.0, abs=1e-6)
        assert found["accumulation", "total", "norm_by_rank"] == pytest.approx([own_norm(0), own_norm(1)], rel=1e-5)


def own_norm(rank: int) -> float:
    """Of one rank's gradient before averaging, by float64 autograd (G19)."""
    model = Towers().double()
    features, ids = (piece[: SIZE - rank] for piece in part(rank))
    image, text, scale = model(features.double(), ids)
    logits, target = scale * image @ text.T, torch.arange(len(ids))
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    return norm(list(torch.autograd.grad(loss, list(model.parameters()))))


def ddp_with_copied_gradients(rank: int, folder: Path) -> dict[Any, Any]:
    return ddp_alone(rank, folder, views=False)


def test_gradients_that_are_views_of_ddp_s_buckets_read_the_same(ranks: Any) -> None:
    """G20: a kept reference would be overwritten by the next backward; over three steps, one of them without averaging, nothing is."""
    for views, copies in zip(ranks["alone"], ranks["copied"], strict=True):
        keys = [key for key in views if key[0] != "probe"]
        assert {key: views[key] for key in keys} == {key: pytest.approx(copies[key], rel=1e-6, nan_ok=True) for key in keys}


def ddp_alone(rank: int, folder: Path, views: bool = True) -> dict[Any, Any]:
    """Each rank contrasts its own batch; gradients live in DDP's buckets (G20)."""
    model = DistributedDataParallel(Towers(), gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Probe(model, probe_set="default", every=1) as probe:
        for step in range(3):
            with model.no_sync() if step == 1 else _nothing():
                info_nce(*model(*part(rank))).backward()
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
    return probe.last


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_a_softmax_per_rank_is_labelled_so(ranks: Any) -> None:
    pair = ranks["alone"]
    losses = [found["loss", "infonce", "trained"] for found in pair]
    assert losses[0] != losses[1]
    for found in pair:
        assert found["hooks", "infonce", "factor"] == pytest.approx(1.0, rel=1e-5)
        assert found["accumulation", "total", "norm"] == pair[0]["accumulation", "total", "norm"]  # averaged: one for all


def vector_scale() -> Towers:
    """FSDP2 shards no scalar."""
    model = Towers()
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    return model


def fsdp(rank: int, folder: Path) -> dict[Any, Any]:
    model = vector_scale()
    for module in (model.first, model.second):
        fully_shard(module)
    fully_shard(model)
    loss = clip_loss(rank, local_loss=True, gather_with_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Probe(model, loss=loss, probe_set="full", every=1) as probe:
        first: dict[Any, Any] = {}
        for _ in range(2):
            loss(*model(*part(rank))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            first = first or dict(probe.last)
    failed = {key: value for key, value in first.items() if key[2] == "failed"}
    assert not failed, failed
    return {**first, ("shard", "", "scale"): local(model.logit_scale).numel()}


def test_fsdp2_adds_up_shards_once_on_every_rank(ranks: Any) -> None:
    """G21, G22: parameters and gradients are sharded; statistics are of all shards together, the same on each rank, one of which
    has an empty shard."""
    pair, expected = ranks["fsdp"], one_process()
    assert [found.pop(("shard", "", "scale")) for found in pair] == [1, 0]
    for found in pair:
        assert found["accumulation", "total", "norm"] == pytest.approx(expected["accumulation", "total", "norm"], rel=1e-4)
        assert found["accumulation", "total", "norm_clipped"] == pytest.approx(0.01, rel=1e-3)
        key = ("accumulation", "total", "entries_zero")
        assert found[key] == pytest.approx(expected[key], rel=1e-6)
        assert found["loss", "infonce", "trained"] == pytest.approx(expected["loss", "infonce", "trained"], rel=1e-5)
        assert ("gradient", "infonce", "norm") not in found
        assert ("accumulation", "total", "norm_by_rank") not in found  # tensor hooks do not fire on sharded parameters
    shared = [key for key in pair[0] if key[0] not in ("probe", "hooks")]
    assert {key: pair[0][key] for key in shared} == {key: pytest.approx(pair[1][key], nan_ok=True) for key in shared}


def no_second_backward_when_sharded(rank: int, folder: Path) -> dict[Any, Any]:
    model = vector_scale()
    fully_shard(model)
    try:
        Probe(model, probe_set="full", second_backward=True)
    except ValueError as error:
        return {("said", "", ""): str(error)}
    return {}


def test_a_second_backward_over_shards_is_refused(ranks: Any) -> None:
    for found in ranks["refused"]:
        assert "sharded (FSDP)" in found["said", "", ""]


CASES = {
    "gather": ddp_with_gather,
    "no gradient": gathered_without_gradient,
    "local rows": local_rows_without_gradient,
    "sizes, gathered": different_sizes_gathered,
    "sizes, alone": different_sizes_alone,
    "alone": ddp_alone,
    "copied": ddp_with_copied_gradients,
    "fsdp": fsdp,
    "refused": no_second_backward_when_sharded,
}
