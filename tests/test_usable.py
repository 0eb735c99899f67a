"""Policies for missing and bad pictures: what is left out is counted and named, and nothing is decoded that need not be."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradscope.data import usable as module
from gradscope.data.usable import Usable, bad_pictures, usable
from gradscope.types import Record

GOOD, BAD, GONE = "good", "bad", "gone"


@pytest.fixture(autouse=True)
def _own_memory(tmp_path_factory, monkeypatch):
    """Each test remembers its own pictures."""
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))


def make(folder: Path, kinds: list[str]) -> list[Record]:
    records = []
    for i, kind in enumerate(kinds):
        path = folder / f"{i:03}.png"
        if kind == GOOD:
            Image.fromarray(np.random.default_rng().integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(path)
        elif kind == BAD:
            path.write_bytes(b"<html></html>")
        records.append(Record(id=str(i), image=str(path), captions=(f"caption {i}",)))
    return records


def run(records: list[Record], **changes: object) -> Usable:
    settings = {"allow_missing": False, "on_bad_image": "error", "workers": 0} | changes
    return usable(records, **settings)  # type: ignore[arg-type]


def test_whole_data_are_left_alone(tmp_path):
    records = make(tmp_path, [GOOD] * 4)
    found = run(records)
    assert found == Usable(records=tuple(records), expected=4)


def test_missing_pictures_stop_the_run_before_anything_is_decoded(tmp_path):
    records = make(tmp_path, [BAD, GONE, GOOD, GONE])
    calls: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match=r"2 of 4 pictures do not exist: .*001.png, .*003.png; .*--allow-missing"):
        run(records, on_bad_image="skip", advance=lambda *count: calls.append(count))
    assert not calls


def test_missing_pictures_can_be_left_out(tmp_path):
    records = make(tmp_path, [GOOD, GONE, BAD, GONE, GOOD])
    found = run(records, allow_missing=True)
    assert [r.id for r in found.records] == ["0", "2", "4"], "error decodes nothing ahead"
    assert (found.expected, found.missing, found.bad) == (5, ("1", "3"), ())
    (note,) = found.notes
    assert note.startswith("2 of 5 records left out, their pictures do not exist: ")
    assert "001.png" in note


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pictures_are_skipped_by_name(tmp_path, workers):
    rng = np.random.default_rng(secrets.randbits(31))
    kinds = [str(k) for k in rng.choice([GOOD, GOOD, GOOD, BAD, GONE], 40)]
    kinds[:3] = GOOD, BAD, GONE
    records = make(tmp_path, kinds)
    calls: list[tuple[int, int]] = []
    found = run(
        records, allow_missing=True, on_bad_image="skip", workers=workers, limit=1.0, advance=lambda *count: calls.append(count)
    )
    by_kind = {kind: [r for r, k in zip(records, kinds, strict=True) if k == kind] for kind in (GOOD, BAD, GONE)}
    assert list(found.records) == by_kind[GOOD], "the same records, so the same pairs, in the same order"
    assert list(found.missing) == [r.id for r in by_kind[GONE]]
    assert [path for path, _ in found.bad] == [r.image for r in by_kind[BAD]]
    assert all(reason == "it holds a web page or XML, not a picture" for _, reason in found.bad)
    assert found.expected == 40
    total = len(by_kind[GOOD]) + len(by_kind[BAD])
    assert calls == [(done, total) for done in range(1, total + 1)]
    assert all(str(r.image) in found.notes[1] for r in by_kind[BAD]), "every skipped picture is named"


def test_too_many_bad_pictures_are_refused(tmp_path):
    records = make(tmp_path, [BAD] * 3 + [GOOD] * 38)
    with pytest.raises(ValueError, match=r"3 of 41 pictures cannot be decoded, more than the 5% .*000.png \(it holds a web page"):
        run(records, on_bad_image="skip")
    assert len(run(records[1:], on_bad_image="skip").records) == 38, "2 of 40 are 5 %, not more"


def test_nothing_left_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none of 2 records has a usable picture"):
        run(make(tmp_path, [GONE, GONE]), allow_missing=True)


def test_unknown_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="error or skip; got 'black'"):
        run(make(tmp_path, [GOOD]), on_bad_image="black")


def test_good_pictures_are_decoded_once_and_bad_ones_again(tmp_path):
    paths = [str(r.image) for r in make(tmp_path, [GOOD, BAD, GOOD])]
    assert list(bad_pictures(paths)) == [paths[1]]
    calls: list[tuple[int, int]] = []
    assert list(bad_pictures(paths, advance=lambda *count: calls.append(count))) == [paths[1]]
    assert calls == [(1, 1)]
    time.sleep(0.01)
    Path(paths[0]).write_bytes(b"")  # another size and time
    assert list(bad_pictures(paths)) == [paths[0], paths[1]]


def test_what_was_decoded_before_an_interruption_is_remembered(tmp_path):
    paths = [str(r.image) for r in make(tmp_path, [GOOD] * 5)]

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bad_pictures(paths, advance=stop)
    calls: list[tuple[int, int]] = []
    bad_pictures(paths, advance=lambda *count: calls.append(count))
    assert calls == [(1, 2), (2, 2)]


def test_a_torn_memory_or_none_costs_time_only(tmp_path, monkeypatch):
    paths = [str(r.image) for r in make(tmp_path, [GOOD, BAD])]
    bad_pictures(paths)
    memory = module._memory()
    memory.write_bytes(memory.read_bytes()[:-3])
    assert list(bad_pictures(paths)) == [paths[1]]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "file" / "below"))  # cannot be made
    assert list(bad_pictures(paths)) == [paths[1]]
