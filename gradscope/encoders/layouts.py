"""State dicts of any origin -> the names and shapes of open_clip's CLIP, and a report of what became of every key.

    layout        recognised by                                        done
    open_clip     visual.* and text tensors                            nothing
    openai        the same, with input_resolution, context_length,     the three numbers are left out
                  vocab_size beside them
    long-clip     positional_embedding_res beside positional_embedding rows 0-19 of the one, the rest of the other: one table
    hugging-face  text_model.*, vision_model.*                         gradscope.encoders.huggingface

A training checkpoint's ``state_dict`` is taken out first, and the prefixes ``module.`` and ``_orig_mod.`` are stripped in any nesting.
Long-CLIP's two tables: its release freezes the first and trains the second, and its forward pass reads rows 0-19 of the one and rows
20-247 of the other (Zhang et al., 2024, section 3.1), so their merger is the same function.

How it can mislead: weights do not say how many attention heads they were trained with, nor the activation. Heads are taken as 64
wide, or as published for the wider image towers; the activation is the caller's to decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Rows of the first position table that Long-CLIP keeps.
KEPT = 20

#: Numbers that OpenAI's files carry beside the weights.
NOTES = ("input_resolution", "context_length", "vocab_size")

#: Indices that older Hugging Face versions stored; they hold 0, 1, 2, ...
_INDICES = "position_ids"

#: Keys under which training programs keep the weights.
_INSIDE = ("state_dict", "model_state_dict", "model")

#: Width of an image tower -> width of one of its heads, where it is not 64 (ViT-H, ViT-g, ViT-bigG, and 112 for the largest).
_HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104, 1792: 112}


#: Dimensions of the tensors that `infer_config` reads the architecture from.
_DIMENSIONS = {
    "token_embedding.weight": 2,
    "positional_embedding": 2,
    "text_projection": 2,
    "visual.conv1.weight": 4,
    "visual.positional_embedding": 2,
    "visual.transformer.resblocks.0.mlp.c_fc.weight": 2,
    "visual.layer1.0.conv1.weight": 4,
    "visual.attnpool.positional_embedding": 2,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """``state`` has open_clip's names in fp32; ``left_out`` are the keys that hold no weights; ``stored`` counts tensors by dtype."""

    name: str
    state: Mapping[str, Tensor]
    left_out: tuple[str, ...]
    stored: Mapping[str, int]

    @property
    def context(self) -> int | None:
        """Rows of the text position table; None if there is none of the usual name."""
        table = self.state.get("positional_embedding", self.state.get("text.positional_embedding"))
        return None if table is None or table.ndim == 0 else table.shape[0]

    @property
    def quick_gelu(self) -> bool | None:
        """True where the layout is OpenAI's or descends from it alone; None where it does not tell."""
        return True if self.name in ("openai", "long-clip") else None

    @property
    def promoted(self) -> str:
        """ "302 tensors stored as float16", or "" where all were fp32 already."""
        narrow = {kind: count for kind, count in self.stored.items() if kind in ("float16", "bfloat16", "float64")}
        return ", ".join(f"{count} tensors stored as {kind}" for kind, count in sorted(narrow.items()))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of the keys of one file. Nothing but ``matched`` and ``left_out`` may be non-empty for a model to be used."""

    layout: str
    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]  # "name: stored [a, b], model [c, d]", or "name: stored as int8, ..." (quantised, complex)
    left_out: tuple[str, ...]
    stored: Mapping[str, int]

    @property
    def fits(self) -> bool:
        return self.matched > 0 and not (self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        if not self.matched:
            return f"layout {self.layout}: not one key matched; the file begins with {_some(self.unexpected or self.reshaped)}"
        wrong = {"missing": self.missing, "left over": self.unexpected, "of another shape or kind": self.reshaped}
        said = [f"{len(keys)} {word}: {_some(keys)}" for word, keys in wrong.items() if keys]
        return f"layout {self.layout}: {self.matched} keys matched" + "".join(f"; {part}" for part in said)


class DoesNotFit(ValueError):
    """Weights that are not those of the model; ``report`` lists every key."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def recognise(contents: Any, source: str) -> Layout:
    """What `read_weights` returned -> its Layout.

    Raises:
        ValueError: no table of tensors in it, two keys that become one, or names that belong to none of the known layouts.
    """
    state = _bare_names(_table(contents, source), source)
    stored = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in state.values())
    left_out = tuple(sorted(key for key in state if key in NOTES or key.split(".")[-1] == _INDICES))
    openai = "input_resolution" in state
    state = {key: _fp32(tensor) for key, tensor in state.items() if key not in left_out}
    name = "open_clip"
    if any(key.startswith(("text_model.", "vision_model.")) for key in state):
        from gradscope.encoders.huggingface import from_huggingface

        name, state = "hugging-face", from_huggingface(state, source)
    elif "positional_embedding_res" in state:
        name, state = "long-clip", merge_positions(state)
    elif openai:
        name = "openai"
    elif not any(key.startswith("visual.") for key in state):
        raise ValueError(
            f"'{source}' holds none of the layouts that gradscope reads (open_clip, OpenAI, Long-CLIP, Hugging Face CLIPModel); "
            f"its keys: {_some(tuple(sorted(state)))}"
        )
    return Layout(name=name, state=state, left_out=left_out, stored=dict(stored))


def merge_positions(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One table of positions: rows 0-19 of ``positional_embedding``, the rest of ``positional_embedding_res``."""
    merged = dict(state)
    trained = merged.pop("positional_embedding_res")
    kept = merged.get("positional_embedding")
    if kept is None or kept.shape != trained.shape:
        raise ValueError(
            f"Long-CLIP's two position tables must have one shape; positional_embedding has "
            f"{'none' if kept is None else list(kept.shape)}, positional_embedding_res {list(trained.shape)}"
        )
    merged["positional_embedding"] = torch.cat([kept[:KEPT], trained[KEPT:]])
    return merged


def infer_config(layout: Layout, source: str) -> dict[str, Any]:
    """open_clip's ``model_cfg`` of a ViT or ResNet CLIP from the shapes of its weights; see above for what shapes do not tell.

    Raises:
        ValueError: not a plain CLIP, or widths that no head of 64 divides; the message asks for an architecture.
    """
    state = layout.state
    advice = f"name the architecture: ARCH:{source}"
    _check_dimensions(state, source)
    needed = ("token_embedding.weight", "positional_embedding", "text_projection", "ln_final.weight")
    absent = [key for key in needed if key not in state]
    if absent:
        raise ValueError(f"the architecture of '{source}' cannot be told from its weights ({_some(tuple(absent))} missing); {advice}")
    vocabulary, width = state["token_embedding.weight"].shape
    text = {"context_length": layout.context, "vocab_size": vocabulary, "width": width, "heads": width // 64}
    text["layers"] = _layers(state, "transformer.resblocks.")
    vision = _vit(state, source, advice) if "visual.class_embedding" in state else _resnet(state, source, advice)
    if width % 64:
        raise ValueError(f"the text tower of '{source}' is {width} wide, which no heads of 64 make up; {advice}")
    return {"embed_dim": state["text_projection"].shape[1], "vision_cfg": vision, "text_cfg": text}


def _check_dimensions(state: Mapping[str, Tensor], source: str) -> None:
    """The tensors whose shapes are read must have the usual number of dimensions, none of them empty."""
    for key, dimensions in _DIMENSIONS.items():
        if key in state and (state[key].ndim != dimensions or 0 in state[key].shape):
            raise ValueError(
                f"'{source}' is not a CLIP: its '{key}' has the shape {list(state[key].shape)}, "
                f"where {dimensions} dimensions belong, none of them 0"
            )


def fit(model: nn.Module, layout: Layout, source: str) -> Report:
    """Loads ``layout`` into ``model``, whole or not at all.

    Raises:
        DoesNotFit: any key missing, left over or of another shape, or none matched.
    """
    state = _as_model(layout.state, model)
    wanted = model.state_dict()
    shared = [key for key in wanted if key in state]
    reshaped = tuple(
        f"{key}: stored {list(state[key].shape)}, model {list(wanted[key].shape)}"
        for key in shared
        if state[key].shape != wanted[key].shape
    ) + tuple(
        f"{key}: stored as {str(state[key].dtype).removeprefix('torch.')}, which holds no plain weights"
        for key in shared
        if state[key].shape == wanted[key].shape and wanted[key].is_floating_point() and not state[key].is_floating_point()
    )
    report = Report(
        layout=layout.name,
        matched=len(shared) - len(reshaped),
        missing=tuple(sorted(wanted.keys() - state.keys())),
        unexpected=tuple(sorted(state.keys() - wanted.keys())),
        reshaped=reshaped,
        left_out=layout.left_out,
        stored=layout.stored,
    )
    if not report.fits:
        raise DoesNotFit(f"the weights in '{source}' do not fit the model ({report}); nothing was loaded", report)
    model.load_state_dict(state)
    return report


def _table(contents: Any, source: str) -> dict[str, Tensor]:
    """The table of tensors by name, however deep a training program wrapped it."""
    while isinstance(contents, Mapping):
        inside = next((key for key in _INSIDE if isinstance(contents.get(key), Mapping)), None)
        if inside is None:
            break
        contents = contents[inside]
    if not isinstance(contents, Mapping) or not contents:
        raise ValueError(f"'{source}' holds no table of tensors by name; expected a state_dict")
    odd = [str(key) for key, value in contents.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(f"'{source}' is not a state_dict: {_some(tuple(odd))} hold no tensors")
    nameless = [repr(key) for key in contents if not isinstance(key, str)]
    if nameless:
        raise ValueError(f"'{source}' is not a state_dict: {_some(tuple(nameless))} are no names of tensors")
    return dict(contents)


def _bare_names(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Names without the prefixes of wrappers, wherever in a name they stand."""
    bare: dict[str, Tensor] = {}
    for key, value in state.items():
        name = re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", key)
        if name in bare:
            raise ValueError(f"'{source}' holds '{name}' twice, with and without the prefix of a wrapper; keep one of them")
        bare[name] = value
    return bare


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _as_model(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Harmless differences between versions of one layout: the text tower under ``text.``, and the scale as [] or [1]."""
    from open_clip.model import convert_to_custom_text_state_dict

    named = dict(state)
    parameters = dict(model.named_parameters())
    if "positional_embedding" in named and "text.positional_embedding" in parameters:
        named = convert_to_custom_text_state_dict(named)
    if "text.positional_embedding" in named and "positional_embedding" in parameters:
        named = {key.removeprefix("text."): value for key, value in named.items()}
    for key in ("logit_scale", "logit_bias"):
        if key in named and key in parameters and named[key].numel() == 1:
            named[key] = named[key].reshape(parameters[key].shape)
    return named


def _vit(state: Mapping[str, Tensor], source: str, advice: str) -> dict[str, Any]:
    if "visual.conv1.weight" not in state or "visual.positional_embedding" not in state:
        raise ValueError(f"the image tower of '{source}' is no plain ViT; {advice}")
    width, _, patch, _ = state["visual.conv1.weight"].shape
    side = round((state["visual.positional_embedding"].shape[0] - 1) ** 0.5)
    head = _HEAD_WIDTHS.get(width, 64)
    if width % head:
        raise ValueError(f"the image tower of '{source}' is {width} wide, which no heads of {head} make up; {advice}")
    vision = {"image_size": patch * side, "layers": _layers(state, "visual.transformer.resblocks."), "width": width}
    vision |= {"patch_size": patch, "head_width": head}
    hidden = state.get("visual.transformer.resblocks.0.mlp.c_fc.weight")
    if hidden is not None and hidden.shape[0] != 4 * width:
        vision["mlp_ratio"] = hidden.shape[0] / width
    return vision


def _resnet(state: Mapping[str, Tensor], source: str, advice: str) -> dict[str, Any]:
    """CLIP's own ResNet: blocks per stage, width of the first stage, and the grid of its attention pooling."""
    stem, grid = state.get("visual.layer1.0.conv1.weight"), state.get("visual.attnpool.positional_embedding")
    if stem is None or grid is None:
        raise ValueError(f"the image tower of '{source}' is neither a plain ViT nor CLIP's ResNet; {advice}")
    blocks = [_layers(state, f"visual.layer{stage}.") for stage in (1, 2, 3, 4)]
    return {"image_size": 32 * round((grid.shape[0] - 1) ** 0.5), "layers": blocks, "width": stem.shape[0], "patch_size": None}


def _layers(state: Mapping[str, Tensor], prefix: str) -> int:
    return len({key.removeprefix(prefix).split(".")[0] for key in state if key.startswith(prefix)})


def _some(keys: tuple[str, ...], most: int = 5) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return f"{', '.join(keys[:most]) or 'nothing'}{more}"
