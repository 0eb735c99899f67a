"""Small Hugging Face tokenizers, made on the spot: the frames (start, end, padding) of the families that open_clip uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = ["red", "blue", "green", "small", "large", "ball", "left", "right", "above", "below"]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Special tokens in the order of their ids, the template around the words, and which of them pads."""

    special: tuple[str, ...]
    template: str
    roles: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)  # text_cfg entries


FRAMES = {
    "siglip": Frame(
        special=("<unk>", "</s>"),
        template="$A </s>",
        roles={"pad_token": "</s>", "eos_token": "</s>", "unk_token": "<unk>"},
        settings={"tokenizer_kwargs": {"clean": "canonicalize"}},
    ),
    "mt5": Frame(special=("<pad>", "</s>", "<unk>"), template="$A </s>", roles={"pad_token": "<pad>", "eos_token": "</s>"}),
    "bert": Frame(
        special=("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
        template="[CLS] $A [SEP]",
        roles={"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    ),
    "clipa": Frame(
        special=("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
        template="[CLS] $A [SEP]",
        roles={"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
        settings={"tokenizer_kwargs": {"strip_sep_token": True}},
    ),
    "roberta": Frame(
        special=("<s>", "<pad>", "</s>", "<unk>"),
        template="<s> $A </s>",
        roles={"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "nllb": Frame(
        special=("<s>", "<pad>", "</s>", "<unk>", "eng_Latn"),
        template="eng_Latn $A </s>",
        roles={"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "clips": Frame(
        special=("[PAD]", "<s>", "</s>", "[CLS]", "[UNK]"),
        template="$A",
        roles={"pad_token": "[PAD]", "bos_token": "<s>", "eos_token": "</s>", "cls_token": "[CLS]", "unk_token": "[UNK]"},
        settings={"tokenizer_mode": "clips"},
    ),
    "endless": Frame(special=("<pad>", "<unk>"), template="$A", roles={"pad_token": "<pad>", "unk_token": "<unk>"}),
}


def write_tokenizer(folder: Path, frame: Frame, **more: Any) -> None:
    """Byte-level pairs: every text has ids; each of WORDS, with the space before it, is one token."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*frame.special, *letters])}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        built = "Ġ"
        for letter in word:
            if built + letter not in vocab:
                merges.append((built, letter))
                vocab[built + letter] = len(vocab)
            built += letter
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.add_special_tokens([AddedToken(token, special=True) for token in frame.special])
    used = [token for token in frame.special if token in frame.template]
    if used:
        inner.post_processor = processors.TemplateProcessing(single=frame.template, special_tokens=[(t, vocab[t]) for t in used])
    PreTrainedTokenizerFast(tokenizer_object=inner, **frame.roles, **more).save_pretrained(folder)


def model_config(frame: Frame, context: int) -> dict[str, Any]:
    return {"model_cfg": {"text_cfg": {"context_length": context, "hf_tokenizer_name": "some/name", **frame.settings}}}
