"""A file of weights -> its contents, without running anything that the file brings along.

safetensors is read by its own library; everything else by torch's safe loader (tensors, numbers and containers only). A pickle that
needs code is refused. A TorchScript archive (OpenAI's CLIP releases) is a program: it is opened only to take its tensors, never
called, and only if its SHA-256 is one that OpenAI's download addresses name, or the caller trusts it.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

#: Files of these endings are weights.
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

#: SHA-256 of OpenAI's CLIP archives, the sums that stand in their download addresses.
OPENAI = {
    "afeb0e10f9e5a86da6080e35cf09123aca3b358a0c3e3b6c78a7b63bc04b6762": "RN50",
    "8fa8567bab74a42d41c5915025a8e4538c3bdbe8804a470a72f30b0d94fab599": "RN101",
    "7e526bd135e493cef0776de27d5f42653e6b4c8bf9e0f653bb11773263205fdd": "RN50x4",
    "52378b407f34354e150460fe41077663dd5b39c54cd0bfd2b27167a4a06ec9aa": "RN50x16",
    "be1cfb55d75a9666199fb2206c106743da0f6468c9d327f3e0d0a543a9919d9c": "RN50x64",
    "40d365715913c9da98579312b702a82c18be219cc2a73407c4526f58eba950af": "ViT-B-32",
    "5806e77cd80f8b59890b7e101eabd078d9fb84e6937f9e85e4ecb61988df416f": "ViT-B-16",
    "b8cca3fd41ae0c99ba7e8951adf17d267cdb84cd88be6f7c2e0eca1737a03836": "ViT-L-14",
    "3035c92b350959924f9f00213499208652fc7ea050643e8b385c2dac08641f02": "ViT-L-14-336",
}

_HEAD = 512  # bytes enough to tell a text file


def read_weights(path: Path, *, trust_archive: bool = False) -> Any:
    """What the file holds, on the CPU in its stored dtypes: usually a table of tensors by name, perhaps inside another.

    ``trust_archive`` opens a TorchScript archive whatever its SHA-256.

    Raises:
        ValueError: not weights at all, damaged, in need of code, or an archive that nobody vouches for.
    """
    _refuse_text(path)
    if _is_safetensors(path):
        return _safetensors(path)
    if is_torchscript(path):
        return _torchscript(path, trust_archive)
    try:
        with warnings.catch_warnings(), path.open("rb") as file:  # opened here: of a path, torch would go by the suffix
            warnings.simplefilter("ignore", UserWarning)  # of another pickle protocol: it is read, or refused below
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"\bGLOBAL ([\w.]+)", str(error))
        if found is None:
            raise ValueError(_damaged(path, error)) from error
        raise ValueError(
            f"'{path}' was not opened: beside tensors it wants to load '{found[1]}', and that may run code which the file brings "
            "along. Where it was written, save the bare state_dict (or safetensors) instead"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(_damaged(path, error)) from error


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_torchscript(path: Path) -> bool:
    """A zip with a program in it: ``code/`` and ``constants.pkl`` beside the tensors."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") or "/code/" in name for name in archive.namelist())


def _is_safetensors(path: Path) -> bool:
    """By what the file is, for files get renamed: the length of a header (8 bytes), then the header, which is JSON."""
    with path.open("rb") as file:
        head = file.read(9)
    if head[4:] == b"\0\0\0\0{":
        return True
    return path.suffix == ".safetensors" and not head.startswith((b"PK", b"\x80"))  # neither zip nor pickle: a damaged one


def find_weights(folder: Path) -> list[Path]:
    """The weights of a folder: open_clip's or Hugging Face's usual names first, all shards of a split file.

    Raises:
        ValueError: none, or several of which none has a usual name.
    """
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            shards = _shards(folder / index)
            absent = [name for name in shards if not (folder / name).is_file()]
            if absent:
                raise ValueError(f"'{folder}' lacks {', '.join(absent)}, which its {index} names; fetch the missing files")
            return [folder / name for name in shards]
    usual = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
    for stem in usual:
        for path in (folder / f"{stem}{suffix}" for suffix in SUFFIXES):
            if path.is_file():
                return [path]
    others = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if len(others) == 1:
        return others
    names = ", ".join(path.name for path in others)
    raise ValueError(
        f"'{folder}' holds {f'several weights files ({names})' if others else 'no weights file'}; "
        "expected open_clip_model.safetensors or model.safetensors"
    )


def _shards(index: Path) -> list[str]:
    """File names in an index of shards; only files beside it count."""
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        shards = []
    if not shards or any(not isinstance(name, str) or Path(name).name != name for name in shards):
        raise ValueError(f"'{index}' is not an index of weights files beside it; fetch it again")
    return shards


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(_damaged(path, error)) from error


def _torchscript(path: Path, trusted: bool) -> Any:
    digest = sha256(path)
    if digest not in OPENAI and not trusted:
        raise ValueError(
            f"'{path}' is a TorchScript archive, that is a program, and its SHA-256 {digest} is not one of OpenAI's CLIP files; "
            "if you know where it comes from, give --trust-archive (its tensors are taken, it is never called)"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch asks for another format; OpenAI's files are what they are
            return dict(torch.jit.load(path, map_location="cpu").state_dict())
    except RuntimeError as error:
        raise ValueError(_damaged(path, error)) from error


def _refuse_text(path: Path) -> None:
    """An error page or a pointer under the name of weights."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        raise ValueError(f"'{path}' is empty; fetch it again")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"'{path}' is a Git LFS pointer, not the weights themselves; run git lfs pull, or fetch the file itself")
    if all(byte in b"\t\n\r\f" or 32 <= byte < 127 for byte in head):
        start = " ".join(head.decode().split())[:40]
        raise ValueError(
            f"'{path}' is a text file (it begins '{start}'), not weights; probably an error page was saved: fetch it again"
        )


def _damaged(path: Path, error: BaseException) -> str:
    said = str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines()
    return (
        f"'{path}' ({path.stat().st_size:,} bytes) is not a readable weights file, or was cut short "
        f"({said[0][:120] if said else type(error).__name__}); fetch it again and compare its SHA-256"
    )
