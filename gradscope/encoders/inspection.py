"""What an encoder is, what could be wrong with it, and which names there are to load.

How it can mislead: a check looks at the weights and at embeddings of random pictures and made-up captions. It finds what is broken, not
what is badly trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradscope.encoders import archives, huggingface
from gradscope.encoders.dual import DualEncoder, evaluating
from gradscope.encoders.layouts import Report
from gradscope.encoders.load import LONGCLIP, Loaded, load_encoder
from gradscope.paths import data_folders, search

#: Largest distance of a unit row's norm from 1, and of an embedding from itself after reloading.
TOLERANCE = 1e-5
RELOADED = 1e-6

#: Longer than any context, and alike only in their length.
_CAPTIONS = tuple(" ".join(f"{word} number {i}" for i in range(400)) for word in ("a red ball", "two dogs", "the old house"))
_SHORT = ("a photo of a cat", "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at; ``detail`` says what was seen."""

    name: str
    good: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One name that ``load_encoder`` takes."""

    name: str
    kind: str
    note: str


def describe(loaded: Loaded) -> dict[str, str]:
    """What the encoder is, in words, in the order to be read."""
    encoder, config = loaded.encoder, loaded.encoder.config
    model, record = config["model_cfg"], config["gradscope"]
    parameters = sum(p.numel() for p in encoder.model.parameters())
    kept = record.get("frozen_positions")
    facts = {
        "image tower": _tower(model["vision_cfg"], "timm_model_name"),
        "text tower": _tower(model["text_cfg"], "hf_model_name"),
        "activation": "QuickGELU" if model.get("quick_gelu") else "plain GELU (or the tower's own)",
        "context": f"{encoder.context} tokens" + (f", the first {kept} positions frozen" if kept else ""),
        "embedding": f"{model['embed_dim']} wide; unit rows in float32",
        "scale": f"{float(encoder.scale().detach()):.4g}",
        "parameters": f"{parameters:,}",
        "tokenizer": f"{encoder.tokenizer.name}, {encoder.tokenizer.vocab_size:,} tokens",
        "preprocessing": _preprocessing(config["preprocess_cfg"]),
        "first loaded as": str(record["source"]),
        "layout": loaded.report.layout if loaded.report else str(record["layout"]),
    }
    stored = loaded.report.stored if loaded.report else record["stored"]
    facts["stored as"] = ", ".join(f"{kind} ({count} tensors)" for kind, count in sorted(stored.items())) or "not known"
    return facts


def check_encoder(loaded: Loaded) -> list[Finding]:
    """Keys, finite weights, and the embeddings of random pictures and long captions."""
    encoder = loaded.encoder
    with evaluating(encoder):
        rows = {"image": encoder.embed_image(random_pixels(encoder, 3)), "text": encoder.embed_text(encoder.tokenize(_CAPTIONS).ids)}
    return [
        _keys(loaded),
        _finite_weights(encoder),
        _scale(encoder),
        *(finding for tower, embedded in rows.items() for finding in _rows(tower, embedded)),
        _end_of_text(encoder),
    ]


def keys_of(report: Report) -> Iterator[tuple[str, str]]:
    """Every key that did not simply match: (what became of it, key)."""
    for became, keys in {
        "missing": report.missing,
        "left over": report.unexpected,
        "of another shape or kind": report.reshaped,
        "no weights, left out": report.left_out,
    }.items():
        yield from ((became, key) for key in keys)


def difference_after_reload(encoder: DualEncoder, folder: Path) -> float:
    """Largest difference of an embedding from that of the saved copy, read by gradscope and by open_clip alone.

    Raises:
        ValueError: the saved tokenizer makes other ids.
    """
    import open_clip

    captions = [*_CAPTIONS, *_SHORT]
    pixels, ids = random_pixels(encoder, 3), encoder.tokenize(captions).ids
    again = load_encoder(str(folder))
    if not torch.equal(again.tokenize(captions).ids, ids):
        raise ValueError(f"the tokenizer saved in '{folder}' makes other tokens than the one it was saved from")
    try:
        plain: Any = open_clip.create_model(f"local-dir:{folder}", require_pretrained=True).eval()
    except Exception as error:
        raise ValueError(f"open_clip alone cannot load the copy: {str(error).strip().splitlines()[0]}") from error
    with evaluating(encoder), torch.no_grad():
        image, text = encoder.embed_image(pixels), encoder.embed_text(ids)
        copies = [(again.embed_image(pixels), again.embed_text(ids))]
        copies += [(plain.encode_image(pixels, normalize=True), plain.encode_text(ids, normalize=True))]
    return max(float((new - old).abs().max()) for copy in copies for new, old in zip(copy, (image, text), strict=True))


def random_pixels(encoder: DualEncoder, count: int) -> Tensor:
    """Normal noise [count, 3, H, W] of the encoder's picture size, the same in every call."""
    size = encoder.config["preprocess_cfg"]["size"]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def catalogue(containing: str = "") -> list[Entry]:
    """The names that can be loaded here: embedded, on disk in the data folders, and open_clip's. ``containing`` narrows them."""
    import open_clip

    entries = [Entry(name="tiny", kind="embedded", note="knows scenes only")]
    for name in LONGCLIP:
        entries.append(Entry(name=name, kind="Long-CLIP", note=str(search(f"{name}.pt") or f"not on disk: needs {name}.pt")))
    for folder in data_folders():
        entries += _on_disk(folder)
    tags: dict[str, list[str]] = {name: [] for name in open_clip.list_models()}
    for name, tag in open_clip.list_pretrained():
        tags.setdefault(name, []).append(tag)
    entries += [Entry(name=name, kind="open_clip", note=", ".join(found) or "no weights") for name, found in sorted(tags.items())]
    wanted = containing.lower()
    return [entry for entry in entries if wanted in f"{entry.name} {entry.kind} {entry.note}".lower()]


def _on_disk(folder: Path) -> list[Entry]:
    """Weights files and encoder folders directly in a data folder."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in archives.SUFFIXES and path.is_file() and path.stem not in LONGCLIP:
            found.append(Entry(name=str(path), kind="weights file", note=f"{path.stat().st_size / 1e6:,.0f} MB"))
        elif (path / "open_clip_config.json").is_file() or (path.is_dir() and huggingface.is_clip_folder(path)):
            found.append(Entry(name=str(path), kind="folder", note="open_clip or Hugging Face CLIPModel"))
    return found


def _tower(settings: dict[str, Any], foreign: str) -> str:
    if settings.get(foreign):
        return str(settings[foreign])
    words = [f"{settings.get('layers', 12)} layers", f"{settings.get('width', 768 if foreign.startswith('timm') else 512)} wide"]
    if settings.get("heads"):
        words.append(f"{settings['heads']} heads")
    if settings.get("patch_size"):
        words.append(f"patches of {settings['patch_size']} in {settings.get('image_size', 224)} pixels")
    return ", ".join(words)


def _preprocessing(settings: dict[str, Any]) -> str:
    mean, std = ([round(float(x), 4) for x in settings[key]] for key in ("mean", "std"))
    return f"{settings['size']} pixels, {settings['interpolation']}, {settings['resize_mode']}; mean {mean}, std {std}"


def _keys(loaded: Loaded) -> Finding:
    if loaded.report is None:
        random = loaded.encoder.config["gradscope"]["layout"] == "RANDOM weights"
        return Finding(name="keys", good=not random, detail="RANDOM weights: no tag was given" if random else "all matched (open_clip)")
    return Finding(name="keys", good=loaded.report.fits, detail=str(loaded.report))


def _finite_weights(encoder: DualEncoder) -> Finding:
    state = encoder.model.state_dict()
    bad = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
    said = f"{len(bad)} of {len(state)} tensors are not finite: {', '.join(bad[:5])}" if bad else f"{len(state)} tensors, all finite"
    return Finding(name="weights", good=not bad, detail=said)


def _scale(encoder: DualEncoder) -> Finding:
    scale = float(encoder.scale().detach())
    return Finding(name="scale", good=math.isfinite(scale) and scale > 0, detail=f"{scale:.4g} (CLIP's is at most 100)")


def _rows(tower: str, embedded: Tensor) -> list[Finding]:
    """Finite, of length 1, and not all one and the same."""
    finite = bool(torch.isfinite(embedded).all())
    off = float((embedded.double().norm(dim=1) - 1).abs().max())
    cosine = float((embedded @ embedded.T)[0, 1:].max())
    return [
        Finding(name=f"{tower} embeddings", good=finite, detail="all finite" if finite else "not all finite"),
        Finding(name=f"{tower} norms", good=off < TOLERANCE, detail=f"largest distance from 1: {off:.1e}"),
        Finding(
            name=f"{tower} inputs told apart", good=cosine < 1 - RELOADED, detail=f"largest cosine of different inputs: {cosine:.6f}"
        ),
    ]


def _end_of_text(encoder: DualEncoder) -> Finding:
    """Over-long captions must still carry the mark that pooling reads."""
    tokenizer = encoder.tokenizer
    if not tokenizer.suffix:
        return Finding(name="end-of-text", good=True, detail=f"{tokenizer.name} has none")
    tokens = tokenizer.tokenize(_CAPTIONS)
    cut = tokens.lengths > encoder.context
    ends = tokenizer.ends(tokens.ids) - len(tokenizer.suffix) + 1
    kept = tokens.ids.gather(1, ends.unsqueeze(1)).squeeze(1) == tokenizer.suffix[0]
    said = f"kept in {int((kept & cut).sum())} of {int(cut.sum())} captions that are too long for {encoder.context} tokens"
    return Finding(name="end-of-text", good=bool(kept.all()), detail=said)
