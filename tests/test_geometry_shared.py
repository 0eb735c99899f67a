"""Geometry and ranks over two gloo processes against one, and a sweep that is killed and taken up again."""

from __future__ import annotations

import dataclasses
import secrets
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_figure1 import HashEncoder, caption_file

from gradscope.caption_geometry import _duration, measure_captions
from gradscope.data.captions import Captions, read_captions
from gradscope.geometry_file import CaptionGeometry
from gradscope.metrics.geometry import Course, Geometry, caption_geometry, estimate
from gradscope.metrics.ranks import Ranks, ranks

BLOCK = 48

Found = tuple[Geometry, tuple[Ranks, Ranks], str, CaptionGeometry]


def unit_rows(n: int, seed: int, width: int = 24) -> torch.Tensor:
    rows = torch.nn.functional.normalize(torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) + 0.7, dim=1)
    rows[n // 2 : n // 2 + 20] = rows[:20]  # repeats, so that hardest neighbours tie across blocks
    return rows


def gallery(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    images = unit_rows(170, seed)
    owner = torch.arange(170).repeat(2)
    noise = torch.randn(340, 24, generator=torch.Generator().manual_seed(seed))
    return images, torch.nn.functional.normalize(images[owner] + 0.1 * noise, dim=1), owner


def same(one: Geometry, other: Geometry) -> None:
    for field in dataclasses.fields(Geometry):
        if field.name != "resumed":
            np.testing.assert_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


def captions(folder: Path) -> Captions:
    return read_captions(str(caption_file(folder, "toy", 49, "one two three four five six seven")))


# ---- two processes


def _process(rank: int, folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        course = Course(shared=True, state=folder / "state", save_every=0.0)
        found = caption_geometry(unit_rows(310, seed), block=BLOCK, exact_quantiles=True, course=course)
        both = ranks(*gallery(seed), block=BLOCK, shared=True)
        measured = measure_captions(captions(folder), HashEncoder(), output=folder / f"written-{rank}")
        try:
            ranks(*gallery(seed + rank), block=BLOCK, shared=True)
            refusal = ""
        except ValueError as error:
            refusal = str(error)
        torch.save((found, both, refusal, measured), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[int, Path, list[Found]]:
    folder, seed = tmp_path_factory.mktemp("shared"), secrets.randbits(31)
    mp.spawn(_process, args=(folder, seed), nprocs=2)
    return seed, folder, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def test_geometry_of_two_processes_is_that_of_one(shared):
    seed, folder, found = shared
    one = caption_geometry(unit_rows(310, seed), block=BLOCK, exact_quantiles=True)
    assert one.repeated == 20
    for geometry, *_ in found:
        same(geometry, one)
    assert list((folder / "state").iterdir()) == []


def test_ranks_of_two_processes_are_those_of_one(shared):
    seed, _, found = shared
    for direction, one in enumerate(ranks(*gallery(seed), block=BLOCK)):
        for _, both, *_ in found:
            for name in ("greater", "ties", "positives", "image", "negatives"):
                assert torch.equal(getattr(both[direction], name), getattr(one, name))


def test_processes_with_different_rows_are_refused_on_each(shared):
    assert all("different embeddings" in refusal for _, _, refusal, _ in shared[2])


def test_captions_are_embedded_in_parts_and_written_once(shared):
    _, folder, found = shared
    one = measure_captions(captions(folder), HashEncoder(), output=folder / "alone")
    for *_, measured in found:
        for field in dataclasses.fields(CaptionGeometry):
            if field.name not in ("seconds", "provenance"):
                np.testing.assert_equal(getattr(measured, field.name), getattr(one, field.name), err_msg=field.name)
    assert (folder / "written-0").is_dir()
    assert not (folder / "written-1").exists()


# ---- stopped and taken up again


def test_captions_go_on_from_a_kept_state_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr("gradscope.metrics.geometry.default_block", lambda device: 16)
    source, said, blocks = captions(tmp_path), [], []
    kept = {"state": tmp_path / "state", "save_every": 0.0}

    @contextmanager
    def progress(title):
        yield stop_after(4, blocks) if "pairs" in title else lambda done, total: None

    with pytest.raises(Stopped):
        measure_captions(source, HashEncoder(), output=tmp_path / "out", **kept, progress=progress)
    found = measure_captions(source, HashEncoder(), output=tmp_path / "out", **kept, say=said.append)
    assert "goes on from" in said[0]
    assert "4 blocks of pairs were taken over" in said[-1]
    alone = measure_captions(source, HashEncoder(), output=tmp_path / "alone")
    np.testing.assert_equal(found.hardest, alone.hardest)
    np.testing.assert_equal(found.counts, alone.counts)


def test_the_plan_is_said_before_the_pass(tmp_path):
    said: list[str] = []
    measure_captions(captions(tmp_path), HashEncoder(), output=tmp_path / "out", say=said.append)
    assert len(said) == 1
    assert "1,225 pairs, less than 0.1 s now that they are embedded" in said[0]
    assert "the full matrix would take" in said[0]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (119.0, "119.0 s"), (150.0, "2.5 min"), (7199, "120.0 min"), (9000, "2.5 h")]
)
def test_durations(seconds, words):
    assert _duration(seconds) == words


class Stopped(Exception):
    pass


def stop_after(blocks: int, seen: list[tuple[int, int]]):
    def advance(done: int, total: int) -> None:
        seen.append((done, total))
        if done == blocks:
            raise Stopped

    return advance


@pytest.mark.parametrize("blocks", [1, 9, 27])
def test_a_stopped_sweep_goes_on_and_ends_with_the_same_numbers(tmp_path, blocks):
    rows, state = unit_rows(310, secrets.randbits(31)), tmp_path / "deep" / "state"
    first: list[tuple[int, int]] = []
    with pytest.raises(Stopped):
        caption_geometry(rows, block=BLOCK, course=Course(state=state, save_every=0.0, progress=stop_after(blocks, first)))
    assert first[-1] == (blocks, 28)
    assert [file.suffix for file in state.iterdir()] == [".npz"]
    second: list[tuple[int, int]] = []
    course = Course(state=state, save_every=0.0, progress=lambda *at: second.append(at))
    found = caption_geometry(rows, block=BLOCK, course=course)
    assert found.resumed == blocks
    assert second == [(done, 28) for done in range(blocks + 1, 29)]
    same(found, caption_geometry(rows, block=BLOCK))
    assert list(state.iterdir()) == []


def test_a_state_of_other_rows_or_other_blocks_is_not_taken_up(tmp_path):
    rows = unit_rows(310, 1)
    with pytest.raises(Stopped):
        caption_geometry(rows, block=BLOCK, course=Course(state=tmp_path, save_every=0.0, progress=stop_after(9, [])))
    changed = rows.clone()
    changed[5] = torch.nn.functional.normalize(changed[5] + 1e-3, dim=0)
    assert caption_geometry(changed, block=BLOCK, course=Course(state=tmp_path)).resumed == 0
    assert caption_geometry(rows, block=BLOCK - 1, course=Course(state=tmp_path)).resumed == 0
    assert caption_geometry(rows, block=BLOCK, course=Course(state=tmp_path)).resumed == 9


def test_a_damaged_state_is_refused_with_its_name(tmp_path):
    rows = unit_rows(310, 2)
    with pytest.raises(Stopped):
        caption_geometry(rows, block=BLOCK, course=Course(state=tmp_path, save_every=0.0, progress=stop_after(9, [])))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(ValueError, match=f"{file.name}.*delete it to start anew"):
        caption_geometry(rows, block=BLOCK, course=Course(state=tmp_path))


def test_a_short_sweep_leaves_nothing(tmp_path):
    caption_geometry(unit_rows(310, 3), block=BLOCK, course=Course(state=tmp_path / "state"))
    assert not (tmp_path / "state").exists()


# ---- what the blocks give


@pytest.mark.parametrize(("n", "block"), [(5, 1), (33, 2), (150, 31), (257, 64)])
def test_index_and_counts_with_odd_blocks_and_repeats(n, block):
    rows = torch.nn.functional.normalize(torch.randint(-1, 2, (n, 3), generator=torch.Generator().manual_seed(n)).float() + 1e-3, dim=1)
    found = caption_geometry(rows, block=block, top=7)
    cosine = (rows.double() @ rows.double().T).fill_diagonal_(-2.0).numpy()
    assert cosine[np.arange(n), found.hardest_index] == pytest.approx(cosine.max(1), abs=1e-6)
    assert (np.abs(cosine - 0.9) > 1e-6).all()
    assert (found.near_counts == (cosine >= 0.9).sum(1)).all()
    assert found.repeated == n - len(rows.unique(dim=0))
    best = np.sort(cosine[np.triu_indices(n, 1)])[::-1][:7]
    assert [c for *_, c in found.top_pairs] == pytest.approx(best.tolist(), abs=1e-6)
    assert len({(i, j) for i, j, _ in found.top_pairs}) == len(best)


def test_counts_of_a_narrow_cone_beyond_what_float32_can_count():
    """33.5 M pairs in one bin: a float32 counter stops at 16.8 M."""
    rows = unit_rows(1, 0, width=4).repeat(8192, 1)
    found = caption_geometry(rows, block=2048)
    assert found.counts[-1] == 8192 * 8191 // 2 == found.counts.sum()


def test_estimate_is_of_the_right_size():
    rows = unit_rows(3000, 4, width=64)
    seconds, extra = estimate(rows, block=512)
    assert 0.0 < seconds < 60.0
    assert estimate(rows, block=512, processes=2)[0] < 60.0
    assert 48 * 3000 <= extra < 100e6
    with pytest.raises(ValueError, match="unit rows"):
        estimate(2.0 * rows)
