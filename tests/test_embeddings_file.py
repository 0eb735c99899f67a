"""Stored embeddings: the same rows and the same numbers, and a clear word about everything else that ends in .safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradscope.embeddings_file import is_embeddings_file, load_embeddings, save_embeddings
from gradscope.evaluate import Embedded, details, score
from gradscope.protocol import Protocol, read_protocol

Tamper = Callable[[dict[str, torch.Tensor], dict[str, str]], None]


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def embedded(n: int = 9, m: int = 20, dim: int = 6) -> Embedded:
    owner = torch.cat([torch.arange(n), torch.randint(n, (m - n,))])[torch.randperm(m)]
    return Embedded(
        ids=tuple(f"bild-ä\n{i}" for i in range(n)),  # ids may hold anything
        image=unit(n, dim),
        text=unit(m, dim),
        image_of_text=owner,
        truncated=3,
        digests=tuple(f"{j:064x}" for j in range(m)),
        captions=tuple(f"caption {j}" for j in range(m)),
        context=77,
        preprocessing="pixels 16 x 16",
    )


def protocol(of: Embedded, **changed: Any) -> Protocol:
    plain = Protocol(
        encoder="enc", data="d", split="test", sha256="0" * 64, images=len(of.ids), captions=len(of.text), expected=len(of.ids) + 1,
        missing=1, bad=0, context=of.context, truncated=of.truncated, preprocessing=of.preprocessing, precision=of.precision,
        notes=("one note",),
    )  # fmt: skip
    return replace(plain, **changed)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    before = embedded()
    path = tmp_path / "new" / "e.safetensors"
    save_embeddings(path, before, protocol(before))
    after, facts = load_embeddings(path)
    assert facts == protocol(before)
    assert (after.ids, after.digests, after.captions, after.truncated) == (before.ids, before.digests, (), 3)
    for name in ("image", "text", "image_of_text"):
        assert torch.equal(getattr(after, name), getattr(before, name))
    one, other = score(before, resamples=50), score(after, resamples=50)
    assert one.dicts() == other.dicts()
    assert details(before, one) == details(after, other)
    assert {row.metric for row in one.rows} >= {"R@1", "true R@1", "MRR"}
    assert [p.name for p in path.parent.iterdir()] == ["e.safetensors"]
    assert load_file(path)["text"].dtype == torch.float32, "any safetensors reader opens it"


def test_only_files_of_embeddings_count_as_such(tmp_path: Path) -> None:
    before = embedded()
    save_embeddings(tmp_path / "e.safetensors", before, protocol(before))
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"<html>")
    (tmp_path / "folder.safetensors").mkdir()
    names = ("e.safetensors", "weights.safetensors", "damaged.safetensors", "folder.safetensors", "missing.safetensors")
    assert [is_embeddings_file(str(tmp_path / name)) for name in names] == [True, False, True, False, False]
    assert not is_embeddings_file("ViT-B-16:openai")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    before = embedded()
    whole = tmp_path / "e.safetensors"
    save_embeddings(whole, before, protocol(before))
    content = whole.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for damage in (content[:-7], content[: len(content) // 2], content[:20], b"", b"<html></html>", b"\xff" * 64):
        bad.write_bytes(damage)
        with pytest.raises(ValueError, match=r"bad.safetensors' is damaged or no safetensors file"):
            load_embeddings(bad)
    save_file({"weight": torch.zeros(2)}, bad)
    with pytest.raises(ValueError, match="no embeddings of gradscope"):
        load_embeddings(bad)
    with pytest.raises(ValueError, match="does not exist; make it with"):
        load_embeddings(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"ends in .safetensors"):
        save_embeddings(tmp_path / "e.npz", before, protocol(before))


def set_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tamper:
    def tamper(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return tamper


def set_fact(name: str, value: object) -> Tamper:
    def tamper(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        metadata["protocol"] = json.dumps({**json.loads(metadata["protocol"]), name: value})

    return tamper


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda t, m: t.pop("text"), "no tensor 'text'"),
        (lambda t, m: m.update(version="9"), "layout has version 9"),
        (lambda t, m: m.pop("protocol"), "not JSON"),
        (lambda t, m: m.update(protocol="[1]"), "not a table"),
        (set_tensor("image", lambda t: t.double()), "float64 with 2 dimensions"),
        (set_tensor("image", lambda t: t.flatten()), "float32 with 1 dimensions"),
        (set_tensor("image", lambda t: t[1:]), "8 images, 9 ids"),
        (set_tensor("text", lambda t: t[:, 1:]), "one D"),
        (set_tensor("text", lambda t: t[1:]), "19 captions, 20 digests"),
        (set_tensor("captions", lambda t: t[:, :8]), "20 digests"),
        (set_tensor("image_of_text", lambda t: t + 1), "must hold image rows"),
        (set_tensor("image_of_text", lambda t: t - 5), "must hold image rows"),
        (set_tensor("image_of_text", lambda t: t * 0), "have no caption"),
        (set_tensor("ids", lambda t: t[:-1]), "not JSON"),
        (set_tensor("ids", lambda t: t * 0 + 255), "not JSON"),
        (set_fact("images", 8), "a protocol of 8 and 20"),
        (set_fact("images", 0), "counts no images"),
        (set_fact("images", "9"), "no proper 'images'"),
        (set_fact("truncated", True), "no proper 'truncated'"),
        (set_fact("encoder", None), "no proper 'encoder'"),
        (set_fact("notes", 3), "no proper 'notes'"),
    ],
)
def test_contents_that_do_not_belong_together_are_refused(tmp_path: Path, tamper: Tamper, message: str) -> None:
    before = embedded()
    path = tmp_path / "e.safetensors"
    save_embeddings(path, before, protocol(before))
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    tamper(tensors, metadata)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match=message) as caught:
        load_embeddings(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_protocol_says_everything_in_words() -> None:
    facts = protocol(embedded())
    assert read_protocol(json.loads(json.dumps(facts.facts()))) == facts
    text = "; ".join(facts.sentences())
    for words in (
        "9 images, 20 captions (hit if any caption", "of 10 records (1 without a picture, 0 with a bad one left out)",
        "ties in random order",
        "context 77 tokens, 3 captions cut (15.0%)", "pixels 16 x 16", "float64 scores", "one note",
    ):  # fmt: skip
        assert words in text
    assert "one caption each" in replace(facts, captions=9).sentences()[0]


def test_pairs_of_any_two_towers_are_read_by_the_commands(tmp_path):
    import torch

    from gradscope.embeddings_file import load_embeddings, save_pairs

    image, text = torch.randn(5, 4), 3 * torch.randn(5, 4)
    save_pairs(tmp_path / "mine.safetensors", image, text, encoder="mine")
    embedded, protocol = load_embeddings(tmp_path / "mine.safetensors")
    assert protocol.encoder == "mine"
    assert torch.allclose(embedded.text, torch.nn.functional.normalize(text, dim=1))
    assert embedded.image_of_text.tolist() == [0, 1, 2, 3, 4]
    for wrong in ((image, text[:3]), (image, text[:, :2]), (image[0], text)):
        with pytest.raises(ValueError, match=r"pair up|shapes"):
            save_pairs(tmp_path / "wrong.safetensors", *wrong)
