"""What a file calls its pictures -> paths on this disk, and which of two paths are the same picture.

A list made elsewhere has paths of that place ("C:\\photos\\a.jpg", "/path/to/your/directory/images/a.jpg"). Where a path as given does
not exist under the root, its leading folders are dropped one by one until one does. How it can mislead: a shorter path may be another
picture of the same name; so a file that two different paths would lead to is given to neither, and how many were found is noted.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path


def picture_paths(given: Sequence[str], root: Path) -> tuple[list[str], list[str]]:
    """Paths in the same order (whether or not they exist), and notes with counts."""
    joined = {name: str(root / name) for name in dict.fromkeys(given)}
    tails = _Tails(root)
    for name, path in joined.items():
        if "\\" in name and not os.path.exists(path):  # noqa: PTH110
            joined[name] = str(root / name.replace("\\", "/"))
    absent = [name for name, path in joined.items() if not os.path.exists(path)]  # noqa: PTH110 - a million times
    shorter = {name: found for name in absent if (found := tails.find(name))}
    claims: defaultdict[str, set[str]] = defaultdict(set)
    for name in joined if shorter else ():
        claims[os.path.normpath(shorter.get(name, joined[name]))].add(os.path.normpath(name.replace("\\", "/")))
    disputed = {name for name, path in shorter.items() if len(claims[os.path.normpath(path)]) > 1}
    paths = {name: path if name in disputed else shorter.get(name, path) for name, path in joined.items()}
    notes = []
    if len(shorter) > len(disputed):
        notes.append(f"{len(shorter) - len(disputed):,} pictures found under {root} without the leading folders of their paths")
    if disputed:
        notes.append(f"{len(disputed):,} pictures not looked for by file name, because several paths end in the same name")
    return [paths[name] for name in given], notes


class _Tails:
    """Files under the root whose path is the end of a path given. The folders of each path given are looked for once."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._folders: dict[str, list[str]] = {}

    def find(self, name: str) -> str | None:
        """The longest end of the path that exists under the root."""
        folder, file = os.path.split(name.replace("\\", "/"))
        if not folder or not file:
            return None
        if folder not in self._folders:
            self._folders[folder] = self._there(folder)
        ends = (os.path.join(place, file) for place in self._folders[folder])  # noqa: PTH118
        return next((end for end in ends if os.path.isfile(end)), None)  # noqa: PTH113

    def _there(self, folder: str) -> list[str]:
        parts = [part for part in folder.split("/") if part not in ("", ".")]
        ends = (parts[start:] for start in range(len(parts) + 1) if ".." not in parts[start:])
        return [place for end in ends if (place := str(Path(self._root, *end))) and Path(place).is_dir()]


class Identities:
    """Path -> what two names of one picture have in common: the real path, links and "./" resolved."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        folder, name = os.path.split(os.path.normpath(path.replace("\\", "/")))
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        whole = os.path.join(self._folders[folder], name)  # noqa: PTH118 - a million times
        return os.path.realpath(whole) if os.path.islink(whole) else whole  # noqa: PTH114


def short_names(paths: Sequence[str], root: Path) -> dict[str, str]:
    """Path -> a name for the picture: its stem, longer where pictures share it (its path below the root, without suffix, then with)."""
    names: dict[str, str] = {}
    rest = {path: _below(os.path.normpath(path.replace("\\", "/")), os.path.normpath(root)) for path in dict.fromkeys(paths)}
    for shorten in (_stem, _without_suffix, str):
        groups: defaultdict[str, set[str]] = defaultdict(set)
        for below in rest.values():
            groups[shorten(below)].add(below)
        names |= {path: shorten(below) for path, below in rest.items() if len(groups[shorten(below)]) == 1}
        rest = {path: below for path, below in rest.items() if path not in names}
    return names


def _below(path: str, root: str) -> str:
    return path.removeprefix(root.rstrip("/") + "/") if root != "." else path


def _without_suffix(path: str) -> str:
    return os.path.splitext(path)[0]  # noqa: PTH122


def _stem(path: str) -> str:
    return os.path.basename(_without_suffix(path))  # noqa: PTH119
