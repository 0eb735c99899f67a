"""Where data and weights are looked for and where generated data are kept. No variable here changes a number."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """$GRADSCOPE_CACHE, else the user's cache folder."""
    given = os.environ.get("GRADSCOPE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradscope"


def data_folders(given: Path | None = None) -> list[Path]:
    """Folders searched for data and weights, in order: ``given`` (--data-dir), $GRADSCOPE_DATA, the cache's data folder."""
    folders = [given] if given else []
    if os.environ.get("GRADSCOPE_DATA"):
        folders.append(Path(os.environ["GRADSCOPE_DATA"]))
    return [*folders, cache_folder() / "data"]


def shown_name(name: str) -> str:
    """A name of data for people and files: addresses without their query, which may hold a token."""
    return "::".join(re.sub(r"(\w://[^?]*)\?.*", r"\1", part) for part in name.split("::"))


def search(name: str, given: Path | None = None) -> Path | None:
    """The first file or folder called ``name`` in ``data_folders``, or None."""
    return next((folder / name for folder in data_folders(given) if (folder / name).exists()), None)


def check_writable(*paths: Path | None) -> None:
    """Raises ValueError if a file cannot be written there: before the work, not after it. Makes the folders."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"'{path}' is a folder; give the name of a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(f"'{path}' cannot be written ({error.strerror}); give another name or folder") from error
