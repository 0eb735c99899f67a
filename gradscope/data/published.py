"""What the readers of public data sets share: whole files, fields checked with their place named, and honest paths.

Paths in published files are kept as they are, but for backslashes, which become slashes. Lists that were written on another machine
carry that machine's folders; their pictures are looked for by file name. How it can mislead: two pictures of one file name in
different folders would be one then, so only data sets whose file names are unique are read that way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gradscope.registry import unknown_name


def read_text(path: Path) -> str:
    """A UTF-8 file (byte-order mark or not). Raises ValueError naming the file if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError(f"'{path}' does not exist; it is part of the data set") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8 (byte {error.start}); it is damaged, fetch it again") from error


def read_json(path: Path) -> Any:
    """Raises ValueError naming file and line if the file is missing or not JSON."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"'{path}' line {error.lineno} is not JSON ({error.msg}); it is damaged, fetch it again") from error


def read_json_list(path: Path) -> list[Any]:
    items = read_json(path)
    if not isinstance(items, list):
        raise ValueError(f"'{path}' holds no JSON list at its top, which a list of records needs; fetch it again")
    return items


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of each line that is not blank."""
    for number, line in enumerate(read_text(path).split("\n"), 1):  # not splitlines: a caption may hold other line separators
        if not line.strip():
            continue
        try:
            yield f"'{path}' line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"'{path}' line {number} is not JSON ({error.msg}); it is damaged, fetch it again") from error


def text_in(item: Any, key: str, where: str) -> str:
    """The string under ``key``; ValueError naming the place if there is none."""
    value = item.get(key) if isinstance(item, Mapping) else None
    if not isinstance(value, str):
        there = ", ".join(map(str, item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"
        raise ValueError(f"{where}: a string under '{key}' is needed; it holds {there or 'nothing'}")
    return value


def slashed(name: str) -> str:
    """A path of a published file with slashes, whatever machine it was written on."""
    return name.replace("\\", "/")


def base_name(name: str) -> str:
    """The file's name without its folders."""
    return PurePosixPath(slashed(name)).name


def first_there(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of ``names`` that exists in ``folder``."""
    return next((folder / name for name in names if (folder / name).exists()), None)


def root_folder(given: str, otherwise: Path) -> Path:
    """The folder of the pictures: the setting ``image_root`` if it was given. Raises ValueError if that is not a folder."""
    if not given:
        return otherwise
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--image-root '{given}' is not a folder; name the folder that holds the pictures")
    return folder


def check_choice(data_set: str, setting: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError naming what is allowed."""
    if value not in allowed:
        raise ValueError(unknown_name(f"{setting} of data set '{data_set}'", value, list(allowed)))


def dropped_empty(count: int, what: str = "empty captions") -> list[str]:
    """The note on records left out, or none."""
    return [f"{count:,} records left out: {what}"] if count else []
