"""Ids from the file are the tokenizer's own, whatever happened to the file, to the captions or to the tokenizer meanwhile."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from hf_tokenizers import FRAMES, WORDS, model_config, write_tokenizer
from open_clip.tokenizer import SimpleTokenizer

from gradscope.encoders import token_cache, tokenizer
from gradscope.encoders.load import load_encoder
from gradscope.encoders.token_cache import tokenize_once
from gradscope.encoders.tokenizer import Tokenizer, make_tokenizer, wrapped


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr(token_cache, "WORTHWHILE", 3)
    return tmp_path / "tokens"


def captions(count: int = 20) -> list[str]:
    random = Random(secrets.randbits(32))
    return [" ".join(random.choices(WORDS, k=random.randint(0, 40))) for _ in range(count)]


def clip(context: int = 16) -> Tokenizer:
    return make_tokenizer({"text_cfg": {"context_length": context}})


def assert_right(found: tokenizer.Tokenized, source: Tokenizer, texts: list[str]) -> None:
    plain = source.tokenize(texts)
    assert torch.equal(found.ids, plain.ids)
    assert torch.equal(found.lengths, plain.lengths)
    assert (found.ids.dtype, found.lengths.dtype) == (torch.int64, torch.int64)
    assert found.truncated() == plain.truncated()


def never(*_: object) -> None:
    raise AssertionError("tokenized again")


@pytest.mark.parametrize("family", ["clip", *FRAMES])
def test_the_second_time_is_read(family, folder, tmp_path, monkeypatch):
    if family == "clip":
        source = clip()
    else:
        write_tokenizer(tmp_path / family, FRAMES[family])
        source = make_tokenizer(model_config(FRAMES[family], 16), tmp_path / family)
    texts = captions()
    plain = source.tokenize(texts)
    assert_right(tokenize_once(source, texts), source, texts)
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(type(source), "contents", never)
    again = tokenize_once(source, texts)
    assert torch.equal(again.ids, plain.ids)
    assert torch.equal(again.lengths, plain.lengths)


def test_large_ids_and_giant_lengths_survive(folder, monkeypatch):
    source = clip(8)
    texts = ["a " * 100_000, "b", "c"]
    monkeypatch.setattr(type(source), "contents", lambda self, given: [[70_000] * (9 * len(text)) for text in given])
    for _ in range(2):
        assert_right(tokenize_once(source, texts), source, texts)


def test_few_captions_leave_no_file(folder):
    source, texts = clip(), captions(2)
    assert_right(tokenize_once(source, texts), source, texts)
    assert not folder.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda texts: [*texts[1:], texts[0]],
        lambda texts: texts[:-1],
        lambda texts: [texts[0] + texts[1], "", *texts[2:]],
        lambda texts: [texts[0] + " ", *texts[1:]],
        lambda texts: ["\ud7ff", *texts[1:]],
    ],
)
def test_other_captions_are_other_entries(folder, change):
    source, texts = clip(), ["red", "ball", "fish", "dog"]
    tokenize_once(source, texts)
    assert_right(tokenize_once(source, change(texts)), source, change(texts))
    assert len(list(folder.iterdir())) == 2


def test_other_tokenizers_are_other_entries(folder, tmp_path):
    texts = captions()
    write_tokenizer(tmp_path / "bert", FRAMES["bert"])
    sources = [
        clip(16),
        clip(17),
        wrapped(SimpleTokenizer(context_length=16, clean="whitespace")),
        wrapped(SimpleTokenizer(context_length=16, additional_special_tokens=["<mark>"])),
        load_encoder("tiny").tokenizer,
        make_tokenizer(model_config(FRAMES["bert"], 16), tmp_path / "bert"),
        make_tokenizer(model_config(FRAMES["bert"], 12), tmp_path / "bert"),
    ]
    for number, source in enumerate(sources, start=1):
        assert_right(tokenize_once(source, texts), source, texts)
        assert len(list(folder.iterdir())) == number
    assert clip(16).identity == sources[0].identity, "the same in another object"


def test_a_new_version_is_another_entry(folder, monkeypatch):
    texts = captions()
    tokenize_once(clip(), texts)
    monkeypatch.setattr(tokenizer, "RULES", 999)
    tokenize_once(clip(), texts)
    monkeypatch.setattr(tokenizer, "version", lambda name: "0.0")
    tokenize_once(clip(), texts)
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "other", "text"])
def test_a_damaged_entry_is_made_anew_and_said(folder, damage, capsys):
    source, texts = clip(), captions()
    tokenize_once(source, texts)
    (entry,) = folder.iterdir()
    good = entry.read_bytes()
    bad = {
        "cut": good[:-7],
        "empty": b"",
        "bit": good[:-20] + bytes([good[-20] ^ 1]) + good[-19:],
        "text": b"hello" * 50,
    }
    if damage == "other":
        tokenize_once(source, texts[:9])
        bad["other"] = next(path for path in folder.iterdir() if path != entry).read_bytes()
    entry.write_bytes(bad[damage])
    capsys.readouterr()
    assert_right(tokenize_once(source, texts), source, texts)
    assert "damaged" in capsys.readouterr().err
    assert entry.read_bytes() == good
    assert_right(tokenize_once(source, texts), source, texts)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kinds", [("U16", "I16"), ("U16", "F16"), ("I64", "F64"), ("I64", "U64")])
def test_another_kind_of_number_is_damage(folder, kinds, capsys):
    """Bytes that pass their checksum and mean something else."""
    source, texts = clip(), captions()
    tokenize_once(source, texts)
    (entry,) = folder.iterdir()
    good = entry.read_bytes()
    assert kinds[0].encode() in good
    entry.write_bytes(good.replace(kinds[0].encode(), kinds[1].encode()))
    assert_right(tokenize_once(source, texts), source, texts)
    assert "damaged" in capsys.readouterr().err
    assert entry.read_bytes() == good


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    source, texts = clip(), captions()
    monkeypatch.setattr(Path, "replace", full)
    assert_right(tokenize_once(source, texts), source, texts)
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert not list(folder.iterdir())


def test_what_a_killed_process_left_goes_after_an_hour(folder):
    folder.mkdir()
    old, new = folder / "old.part", folder / "new.part"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    tokenize_once(clip(), captions())
    assert not old.exists()
    assert new.exists(), "another process may be writing it"


def test_entries_that_another_process_removes_meanwhile(folder, monkeypatch, capsys):
    """Listed, and gone when it is looked at."""
    gone = folder / "gone.safetensors"
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [*listed(self, pattern), gone])
    source, texts = clip(), captions()
    assert_right(tokenize_once(source, texts), source, texts)
    assert capsys.readouterr().err == ""


def test_no_folder_to_write_to_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "tokens").write_text("a file where the folder should be")
    source, texts = clip(), captions()
    assert_right(tokenize_once(source, texts), source, texts)
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_that_may_only_be_read_serves(folder, monkeypatch, capsys):
    source, texts = clip(), captions()
    plain = tokenize_once(source, texts)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(token_cache.os, "utime", refuse)
    monkeypatch.setattr(type(source), "contents", never)
    assert torch.equal(tokenize_once(source, texts).ids, plain.ids)
    assert capsys.readouterr().err == ""


def test_the_entries_used_longest_ago_go(folder, monkeypatch):
    source = clip()
    sets = [captions() for _ in range(3)]
    entries = []
    for age, texts in enumerate(sets):
        tokenize_once(source, texts)
        (new,) = set(folder.iterdir()) - set(entries)
        entries.append(new)
        os.utime(new, (1000 + age, 1000 + age))
    tokenize_once(source, sets[0])  # used now
    monkeypatch.setattr(token_cache, "ROOM", sum(entry.stat().st_size for entry in entries))
    tokenize_once(source, captions())
    assert entries[0].exists()
    assert not entries[1].exists()
    monkeypatch.setattr(token_cache, "ROOM", 1)
    texts = captions()
    tokenize_once(source, texts)
    assert len(list(folder.iterdir())) == 1, "the newest stays, however large"


def test_a_training_set_is_tokenized_once(folder, scenes_folder, small_encoder, monkeypatch):
    from gradscope.data.batching import Batches
    from gradscope.data.source import open_data

    records = open_data(str(scenes_folder)).records("train")
    first = Batches(records=records, encoder=load_encoder(str(small_encoder)), batch_size=8, accumulate=1, seed=0).tokenized
    encoder = load_encoder(str(small_encoder))
    monkeypatch.setattr(type(encoder.tokenizer), "contents", never)
    again = Batches(records=records, encoder=encoder, batch_size=8, accumulate=1, seed=0).tokenized
    assert torch.equal(first.ids, again.ids)


def test_several_at_once(folder):
    """All write the same entry and read it while others write; nothing else is left behind."""
    texts = captions(400)
    sources = [clip() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda source: tokenize_once(source, texts), sources))
            for each in found:
                assert_right(each, sources[0], texts)
            (entry,) = folder.iterdir()
            entry.unlink()
