"""What is known about a public data set beside its records: licence, citation, what it needs on disk and how to get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradscope.paths import data_folders


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file to fetch: by HTTP(S), or from the Hugging Face hub when ``hub`` names a data-set repository.

    ``to`` is relative to the data set's folder; an archive is unpacked beside itself. ``sha256`` and ``size`` (bytes) are None where
    the publisher states none; then the file is checked for being whole only. ``makes`` is the path (relative to the data set's
    folder) that unpacking leaves: where it is there already, put there by hand, nothing is fetched.
    """

    to: str
    url: str = ""
    hub: str = ""
    hub_file: str = ""
    sha256: str | None = None
    size: int | None = None
    unpack: bool = False
    makes: str = ""


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The facts that ``gradscope data info`` shows and that messages about missing files are made of.

    Args:
        layout: lines "path  what it is" (two spaces), relative to the data set's folder, that must be on disk; a path may hold *, and
            several paths are joined with ", ". A line that begins with "or " is an alternative to the line above, one that begins
            with "also " is welcome and not needed, and one without two spaces is a remark.
        how: one sentence that says how to get what ``downloads`` cannot fetch; "" if they fetch everything.
        counts: published number of records by split.
        default_split: what evaluation and geometry use when no split is named.
    """

    title: str
    homepage: str
    licence: str
    citation: str
    layout: tuple[str, ...]
    how: str
    counts: Mapping[str, int] = field(default_factory=dict)
    default_split: str = "test"
    downloads: tuple[Download, ...] = ()

    def needs(self) -> list[tuple[str, ...]]:
        """What must be on disk by ``layout``: for each need its alternatives, each one path or several joined with ", "."""
        needs: list[tuple[str, ...]] = []
        for line in self.layout:
            path, gap, _ = line.partition("  ")
            if not gap or path.startswith("also "):
                continue
            if path.startswith("or ") and needs:
                needs[-1] = (*needs[-1], path.removeprefix("or "))
            else:
                needs.append((path,))
        return needs


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """Where a data set was found and which of its needs are met. ``folder`` is None where nothing of it was found."""

    folder: Path | None
    present: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def state(self) -> str:
        return "no" if self.folder is None else "partly" if self.missing else "yes"


def on_disk(name: str, info: DataInfo, given: Path | None = None) -> OnDisk:
    """The most complete of the folders in which ``data_set_folder`` looks. A folder not called ``name`` counts only if whole.

    How it can mislead: paths are looked for, not opened; ``gradscope data check`` reads them.
    """
    needs = info.needs()
    best = OnDisk(folder=None, present=(), missing=tuple(" or ".join(need) for need in needs))
    for root in data_folders(given.expanduser() if given else None):
        for folder in (root / name, root):
            met = [any(is_there(folder, paths) for paths in need) for need in needs]
            named = list(zip((" or ".join(need) for need in needs), met, strict=True))
            if sum(met) > len(best.present) and (all(met) or folder != root):
                present, missing = (tuple(n for n, there in named if there == wanted) for wanted in (True, False))
                best = OnDisk(folder=folder, present=present, missing=missing)
    return best


def is_there(folder: Path, paths: str) -> bool:
    """Are all of the paths, joined with ", " and perhaps with *, in ``folder``?"""
    return all(next(folder.glob(path), None) is not None for path in paths.split(", "))


def data_set_folder(name: str, given: str, markers: tuple[str, ...], info: DataInfo) -> Path:
    """The folder that holds one of ``markers``: ``given``, or ``name`` in it, or in the data folders ($GRADSCOPE_DATA, the cache).

    Raises:
        ValueError: none does; says where it looked, for what, and how to get it.
    """
    if given and not Path(given).expanduser().is_dir():
        raise ValueError(f"--data-dir {given} is no folder; give the one that holds '{name}', or leave it out")
    roots = data_folders(Path(given).expanduser() if given else None)
    for root in roots:
        for folder in (root / name, root):
            if any((folder / marker).exists() for marker in markers):
                return folder
    where = ", ".join(str(root / name) for root in roots)
    fetch = f"`gradscope data fetch {name}` gets it" if info.downloads and not info.how else info.how
    raise ValueError(
        f"data set '{name}' is not on disk: looked for {' or '.join(markers)} in {where} (and one folder up); {fetch}. "
        f"Put it there, or name its folder with --data-dir. `gradscope data info {name}` says more."
    )
