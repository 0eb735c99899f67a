"""The embedded data set: deterministic, true to its pictures, without leakage, with controlled near-twins."""

from __future__ import annotations

import json
import multiprocessing
import secrets
from collections import defaultdict
from itertools import combinations
from random import Random

import numpy as np
import pytest
from PIL import Image

from gradscope.data import scenes_words as words
from gradscope.data.scenes import describe, make_family, make_scene, materialise, render
from gradscope.data.scenes_grammar import ATTRIBUTES, SKY_THING, STREAMS, scenes_of_split

SMALL = {"train": 24, "val": 6, "test": 10}


def fresh() -> Random:
    seed = secrets.randbits(32)
    print("seed", seed)
    return Random(seed)


def test_full_size_splits_share_no_signature_and_no_layout():
    signatures, layouts, families = defaultdict(set), defaultdict(set), 0
    for split, count in {"train": 4000, "val": 400, "test": 2000}.items():
        rows = list(scenes_of_split(0, split, count))
        signatures[split] = {scene.signature() for _, scene in rows}
        layouts[split] = {scene.layout_key() for _, scene in rows}
        assert len(signatures[split]) == len(rows) == count
        families += len({family for family, _ in rows})
    rng = fresh()
    pretrain = [make_scene(rng) for _ in range(3000)]
    signatures["pretrain"] = {scene.signature() for scene in pretrain}
    layouts["pretrain"] = {scene.layout_key() for scene in pretrain}
    for a, b in combinations(signatures, 2):
        assert not signatures[a] & signatures[b]
        assert not layouts[a] & layouts[b]
    assert families == 6400 / 4


@pytest.mark.parametrize("stream", STREAMS)
def test_members_of_a_family_differ_in_one_or_two_attributes_of_one_object(stream):
    rng = fresh()
    for _ in range(20):
        family = make_family(rng, stream=stream)
        assert {scene.stream() for scene in family} == {stream}
        assert len({scene.layout_key() for scene in family}) == 1
        for a, b in combinations(family, 2):
            pairs = zip(a.things, b.things, strict=True)
            changed = [[n for n in ATTRIBUTES if getattr(x, n) != getattr(y, n)] for x, y in pairs if x != y]
            assert len(changed) == 1
            assert len(changed[0]) in (1, 2)
            assert a.signature() != b.signature()


def test_every_attribute_is_said_in_every_caption():
    rng = fresh()
    for _ in range(100):
        scene = make_scene(rng)
        caption = describe(scene, rng)
        sentences = [s.strip().lower() for s in caption.split(".") if s.strip()]
        assert words.MIN_WORDS <= words.count_words(caption) <= words.MAX_WORDS
        for thing in scene.things:
            row, side = thing.place
            said = [s for s in sentences if _says(s, words.ROW_WORDS[row]) and _says(s, words.SIDE_WORDS[side])]
            assert len(said) == 1, caption
            assert _says(said[0], words.KIND_WORDS[thing.kind])
            assert _says(said[0], words.COLOUR_WORDS[thing.colour])
            assert _says(said[0], words.SIZE_WORDS[thing.size])
            for pattern, frames in words.PATTERN_FRAMES.items():
                marks = ("plain", "without") if pattern == "plain" else (pattern, frames[1].split("{kind} ")[1])
                assert _says(said[0], marks) == (pattern == thing.pattern)
        for options in (words.SETTING_FRAMES[scene.setting], words.WEATHER_FRAMES[scene.weather]):
            assert _says(caption.lower(), options)
        assert SKY_THING[scene.weather] in caption.lower()


def test_relations_agree_with_coordinates():
    rng = fresh()
    seen = 0
    for _ in range(300):
        scene = make_scene(rng)
        for sentence in words._relations(scene, rng):
            for a in scene.things:
                for b in scene.things:
                    if a is not b and _named(sentence, a, first=True) and _named(sentence, b, first=False):
                        seen += 1
                        assert _true(sentence, a, b), sentence
    assert seen > 300


def _says(text: str, options: tuple[str, ...]) -> bool:
    return any(option in text for option in options)


def _named(sentence: str, thing, *, first: bool) -> bool:
    for link in (" is to the left of ", " is to the right of ", " is behind ", " is in front of "):
        if link in sentence:
            half = sentence.lower().rstrip(".").split(link)[0 if first else 1]
            names = [f"the {c} {k}" for c in words.COLOUR_WORDS[thing.colour] for k in words.KIND_WORDS[thing.kind]]
            return half in names
    raise AssertionError(sentence)


def _true(sentence: str, a, b) -> bool:
    column = {"left": 0, "middle": 1, "right": 2}
    x = column[a.place[1]] - column[b.place[1]]
    if "left of" in sentence:
        return x < 0
    if "right of" in sentence:
        return x > 0
    behind = a.place[0] == "back" and b.place[0] == "front"
    return x == 0 and (behind if " is behind " in sentence else a.place[0] == "front" and b.place[0] == "back")


def test_pixels_follow_from_the_scene_and_twins_look_different():
    rng = fresh()
    for _ in range(10):
        a, b = make_family(rng, stream="test", size=2)
        assert np.array_equal(np.asarray(render(a)), np.asarray(render(a)))
        assert render(a).size == (96, 96)
        same_jitter = type(b)(**{**vars(b), "jitter": a.jitter})
        assert (np.asarray(render(a)) != np.asarray(render(same_jitter))).any(axis=-1).sum() > 8


def test_same_seed_same_bytes_other_seed_other_scenes(tmp_path):
    seed = fresh().getrandbits(20)
    calls = []
    one = materialise(tmp_path / "a", seed=seed, progress=lambda done, total: calls.append((done, total)), **SMALL)
    two = materialise(tmp_path / "b", seed=seed, **SMALL)
    other = materialise(tmp_path / "a", seed=seed + 1, **SMALL)
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(two) for p in two.rglob("*") if p.is_file())
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert (one / "train.jsonl").read_bytes() != (other / "train.jsonl").read_bytes()
    assert calls == [(i, 40) for i in range(1, 41)]
    for split, size in SMALL.items():
        records = [json.loads(line) for line in (one / f"{split}.jsonl").read_text().splitlines()]
        assert len(records) == size
        for record in records:
            assert set(record) == {"id", "image", "captions", "aux"}
            assert Image.open(one / record["image"]).size == (96, 96)


def test_present_folder_is_returned_at_once_and_nothing_else_is_left(tmp_path):
    folder = materialise(tmp_path, seed=5, **SMALL)
    before = folder.stat().st_mtime_ns
    assert materialise(tmp_path, seed=5, **SMALL, progress=lambda *_: pytest.fail("made again")) == folder
    assert folder.stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [folder.name]


def test_interrupted_generation_leaves_no_folder(tmp_path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        materialise(tmp_path, seed=5, progress=stop, **SMALL)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def _job(root):
    return materialise(root, seed=9, **SMALL)


def test_two_processes_at_once_agree(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(_job, [tmp_path, tmp_path])
    assert first == second
    assert len((first / "train.jsonl").read_text().splitlines()) == SMALL["train"]


def test_bad_requests_are_answered_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"'val' needs at least 1"):
        materialise(tmp_path, val=0)
    with pytest.raises(ValueError, match="choose one of"):
        make_scene(Random(0), stream="dev")
    with pytest.raises(ValueError, match="1 to 8"):
        make_family(Random(0), stream="test", size=9)
