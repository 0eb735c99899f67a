"""Captions -> token ids, for every family: CLIP's byte pairs, and the Hugging Face tokenizers of SigLIP, CLIPA and other text towers.

One row is ``prefix + words + suffix + padding (+ tail)``: CLIP has start and end-of-text; SigLIP only an end (and pads with that same
id); BERT [CLS] and [SEP]; the "clips" mode ends each row with a class token. A caption that does not fit loses words from its end,
never the suffix. ``lengths`` count every token but padding BEFORE that cut, so ``lengths > context`` marks what was cut.

Which positions hold words is read from the position of end-of-text, never from ids that are not zero: id 0 is "!" in CLIP and
padding elsewhere, and some families pad with end-of-text itself. A caption in which someone wrote the end marker ("<end_of_text>")
ends there for the model, here as in open_clip.

Ids equal open_clip's own tokenizer, faster and in bounded time (see `gradscope.encoders.byte_pairs`). Captions are taken some
thousands at a time, so that no more than those are held as lists.

How it can mislead: ``lengths`` of two families do not compare; SigLIP's has no start token.
"""

from __future__ import annotations

import gzip
import hashlib
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradscope.encoders.byte_pairs import BytePairs

#: Size of CLIP's stock vocabulary: its merges need no copy.
STOCK_VOCABULARY = 49408
#: Files of which a folder with a Hugging Face tokenizer has at least one.
HF_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")

#: Counts up when this file or ``byte_pairs`` gives other ids than before.
RULES = 1
#: Captions whose ids are held as lists at a time.
AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """ids int64 [N, L], padded, end-of-text kept under truncation; lengths int64 [N] before truncation."""

    ids: Tensor
    lengths: Tensor

    def truncated(self) -> int:
        return int((self.lengths > self.ids.shape[1]).sum())


@dataclass(frozen=True, kw_only=True)
class Tokenizer(ABC):
    """What all families share: the frame around the words, truncation, and where the words are.

    ``source`` is open_clip's own tokenizer object. ``suffix[0]`` marks end-of-text; ``tail`` stands in the last positions of a row.
    """

    name: str
    source: Any
    context: int
    vocab_size: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    tail: tuple[int, ...] = ()
    pad: int = 0

    def __post_init__(self) -> None:
        frame = len(self.prefix) + len(self.suffix) + len(self.tail)
        if self.context <= frame:
            raise ValueError(f"a context of {self.context} tokens leaves no room for words; '{self.name}' itself needs {frame}")

    @abstractmethod
    def contents(self, captions: Sequence[str]) -> list[list[int]]:
        """The ids of each caption without the frame."""

    @abstractmethod
    def vocabulary(self) -> str | None:
        """All that decides ``contents`` and is no version of a library, as text; None where it cannot be told."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what ``make_tokenizer(config, folder)`` and open_clip's ``local-dir:`` need beside the configuration."""

    @cached_property
    def identity(self) -> str | None:
        """The same for two tokenizers only if they give the same ids; None where that cannot be told."""
        words = self.vocabulary()
        if words is None:
            return None
        frame = (self.context, self.prefix, self.suffix, self.tail, self.pad, _cleaning(self.source.clean_fn))
        return hashlib.sha256(repr((RULES, frame, _versions())).encode() + words.encode("utf-8", "surrogatepass")).hexdigest()

    def tokenize(self, captions: Sequence[str]) -> Tokenized:
        """Captions -> padded ids and true lengths."""
        ids = np.full((len(captions), self.context), self.pad, dtype=np.int64)
        lengths = np.empty(len(captions), dtype=np.int64)
        for start in range(0, len(captions), AT_ONCE):
            piece = slice(start, start + AT_ONCE)
            self._fill(ids[piece], lengths[piece], self.contents(captions[piece]))
        return Tokenized(ids=torch.from_numpy(ids), lengths=torch.from_numpy(lengths))

    def _fill(self, ids: Any, lengths: Any, contents: Sequence[Sequence[int]]) -> None:
        frame = len(self.prefix) + len(self.suffix) + len(self.tail)
        room = self.context - frame
        lengths[:] = np.fromiter(map(len, contents), np.int64, len(contents)) + frame
        taken = np.minimum(lengths, self.context) - len(self.tail)
        kept = chain.from_iterable((*self.prefix, *words[:room], *self.suffix) for words in contents)
        ids[np.arange(self.context) < taken[:, None]] = np.fromiter(kept, np.int64, int(taken.sum()))
        if self.tail:
            ids[:, -len(self.tail) :] = self.tail

    def ends(self, ids: Tensor) -> Tensor:
        """[B, L] -> int64 [B], the position of end-of-text: its first occurrence behind the prefix; without one, the last word's."""
        position = torch.arange(ids.shape[1], device=ids.device)
        if self.suffix:
            marks = (ids == self.suffix[0]) & (position >= len(self.prefix))
            return torch.where(marks.any(1), marks.int().argmax(1), ids.shape[1] - 1 - len(self.tail)) + len(self.suffix) - 1
        return torch.where(ids != self.pad, position, 0).amax(1)

    def valid(self, ids: Tensor) -> Tensor:
        """[B, L] -> bool [B, L]: words and end-of-text; the prefix, padding and the tail are left out."""
        position = torch.arange(ids.shape[1], device=ids.device)
        return (position >= len(self.prefix)) & (position <= self.ends(ids)[:, None])


@dataclass(frozen=True, kw_only=True)
class ClipTokenizer(Tokenizer):
    """CLIP's byte pairs: open_clip's ``SimpleTokenizer`` with remembered words and a merge that long words cannot stall."""

    pairs: BytePairs = field(repr=False, compare=False)

    @classmethod
    def of(cls, source: Any) -> ClipTokenizer:
        if source.reduction_fn is not None:
            raise ValueError("this tokenizer drops words of long captions at random (reduction_mask); remove it from tokenizer_kwargs")
        return cls(
            name="CLIP byte pairs",
            source=source,
            context=int(source.context_length),
            vocab_size=source.vocab_size,
            prefix=(source.sot_token_id,),
            suffix=(source.eot_token_id,),
            pairs=BytePairs(source),
        )

    def contents(self, captions: Sequence[str]) -> list[list[int]]:
        return [self.pairs.encode(caption) for caption in captions]

    def vocabulary(self) -> str:
        return repr((self.source.encoder, self.source.bpe_ranks, self.source.all_special_ids, self.source.pat.pattern))

    def save(self, folder: Path) -> None:
        """``bpe.txt.gz``, unless the merges are CLIP's stock ones."""
        if self.vocab_size == STOCK_VOCABULARY:
            return
        merges = "\n".join(" ".join(pair) for pair in self.source.bpe_ranks)
        with gzip.GzipFile(folder / "bpe.txt.gz", "wb", mtime=0) as file:
            file.write(f"merges of this encoder's tokenizer\n{merges}".encode())


@dataclass(frozen=True, kw_only=True)
class HFTokenizer(Tokenizer):
    """A Hugging Face tokenizer as open_clip's ``HFTokenizer`` uses it: same cleaning, frame, padding and stripped separators."""

    @classmethod
    def of(cls, source: Any) -> HFTokenizer:
        inner, name = source.tokenizer, str(source.tokenizer.name_or_path)
        if inner.padding_side != "right" or inner.truncation_side != "right":
            raise ValueError(f"tokenizer '{name}' pads or cuts on the left; gradscope reads tokenizers that do both on the right")
        clips = source.tokenizer_mode == "clips"
        prefix, suffix = ((inner.bos_token_id,), (inner.eos_token_id,)) if clips else _frame(inner)
        pad = inner.pad_token_id
        if pad is None:
            raise ValueError(f"tokenizer '{name}' has no padding token, which captions of different lengths need")
        if source.strip_sep_token:
            suffix = tuple(0 if token == inner.sep_token_id else token for token in suffix)
        return cls(
            name=name,
            source=source,
            context=int(source.context_length),
            vocab_size=len(inner),
            prefix=prefix,
            suffix=suffix,
            tail=(inner.cls_token_id,) if clips else (),
            pad=pad,
        )

    def contents(self, captions: Sequence[str]) -> list[list[int]]:
        cleaned = [self.source.clean_fn(caption) for caption in captions]
        rows = self.source.tokenizer(cleaned, add_special_tokens=False, verbose=False)["input_ids"] if cleaned else []
        if not self.source.strip_sep_token:
            return list(rows)
        separator = self.source.tokenizer.sep_token_id
        return [[0 if token == separator else token for token in row] for row in rows]

    def vocabulary(self) -> str | None:
        backend = getattr(self.source.tokenizer, "backend_tokenizer", None)  # the slow ones have none
        return None if backend is None else f"{self.source.strip_sep_token}{backend.to_str()}"

    def save(self, folder: Path) -> None:
        """The tokenizer's own files."""
        self.source.save_pretrained(str(folder))


def _cleaning(clean: Any) -> str:
    """A name for one of open_clip's cleaning functions; they may be partial."""
    inner = getattr(clean, "func", clean)
    return f"{inner.__module__}.{inner.__qualname__} {getattr(clean, 'args', '')} {getattr(clean, 'keywords', '')}"


def _versions() -> dict[str, str]:
    """Of everything that turns a caption into ids, as far as it is installed."""
    found = {"unicode": unicodedata.unidata_version}
    for name in ("open_clip_torch", "ftfy", "regex", "transformers", "tokenizers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def wrapped(tokenizer: Any) -> Tokenizer:
    """One of open_clip's tokenizers (or one of these) -> one of these.

    Raises:
        ValueError: a tokenizer that pads or cuts on the left, has no padding token, or drops words at random.
    """
    from open_clip import tokenizer as theirs

    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, theirs.SimpleTokenizer):
        return ClipTokenizer.of(tokenizer)
    if isinstance(tokenizer, theirs.HFTokenizer):
        return HFTokenizer.of(tokenizer)
    raise ValueError(f"a tokenizer of open_clip is needed (SimpleTokenizer or HFTokenizer), got {type(tokenizer).__name__}")


def make_tokenizer(config: Mapping[str, Any], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of an open_clip configuration.

    Args:
        config: ``{"model_cfg": {"text_cfg": ...}}`` or a ``model_cfg`` alone; ``hf_tokenizer_name`` in it means Hugging Face.
        folder: where the model's own files may be: ``bpe.txt.gz``, or a Hugging Face tokenizer's. Without them CLIP's stock merges,
            or the tokenizer of that name on the hub, are used.

    Raises:
        ValueError: the tokenizer cannot be read or is of a kind that ``wrapped`` refuses.
    """
    from open_clip import tokenizer as theirs

    text = config.get("model_cfg", config)["text_cfg"]
    context = int(text.get("context_length", theirs.DEFAULT_CONTEXT_LENGTH))
    settings = dict(text.get("tokenizer_kwargs") or {})
    name = text.get("hf_tokenizer_name")
    if not name:
        merges = folder / "bpe.txt.gz" if folder is not None else None
        own = {"bpe_path": str(merges)} if merges is not None and merges.is_file() else {}
        return ClipTokenizer.of(_read("CLIP's merges", theirs.SimpleTokenizer, context_length=context, **own, **settings))
    if folder is not None and any((folder / file).is_file() for file in HF_FILES):
        name = str(folder)
    mode = text.get("tokenizer_mode")
    return HFTokenizer.of(_read(name, theirs.HFTokenizer, name, context_length=context, tokenizer_mode=mode, **settings))


def _read(name: str, build: Any, *positional: Any, **settings: Any) -> Any:
    try:
        return build(*positional, **settings)
    except Exception as error:  # transformers raises whatever its many readers raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the tokenizer '{name}' could not be read ({first}); put its files beside open_clip_config.json, "
            "or let it be fetched from the hub"
        ) from error


def _frame(inner: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that a Hugging Face tokenizer puts before and behind the words, read off one caption."""
    bare = inner("a", add_special_tokens=False)["input_ids"]
    full = inner("a")["input_ids"]
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return tuple(full[:start]), tuple(full[start + len(bare) :])
