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
    the publisher states none; then the file is checked for being whole only.
    """

    to: str
    url: str = ""
    hub: str = ""
    hub_file: str = ""
    sha256: str | None = None
    size: int | None = None
    unpack: bool = False


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The facts that ``gradscope data info`` shows and that messages about missing files are made of.

    Args:
        layout: lines "path  what it is", relative to the data set's folder, that must be on disk.
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


def data_set_folder(name: str, given: str, markers: tuple[str, ...], info: DataInfo) -> Path:
    """The folder that holds one of ``markers``: ``given``, or ``name`` in it, or in the data folders ($GRADSCOPE_DATA, the cache).

    Raises:
        ValueError: none does; says where it looked, for what, and how to get it.
    """
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
