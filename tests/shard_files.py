"""Tar files for tests, made with Python's own library, and pictures to put into them."""

from __future__ import annotations

import io
import secrets
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def tar_of(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def picture(kind: str = "JPEG", side: int = 12) -> bytes:
    """Fresh noise each time."""
    sink = io.BytesIO()
    levels = np.frombuffer(secrets.token_bytes(side * (side + 4) * 3), np.uint8).reshape(side, side + 4, 3)
    Image.fromarray(levels).save(sink, kind)
    return sink.getvalue()


def pair(key: str, caption: str = "", ending: str = "jpg") -> list[tuple[str, bytes]]:
    return [(f"{key}.{ending}", picture()), (f"{key}.txt", (caption or f"caption of {key}").encode())]


def pairs(keys: Iterable[str]) -> list[tuple[str, bytes]]:
    return [member for key in keys for member in pair(key)]
