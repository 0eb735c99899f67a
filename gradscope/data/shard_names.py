"""What a user calls a set of tar files -> its splits, and the shards of each, without opening one.

    data/shards                              a folder: the splits of its shards.json, or its *.tar
    data/shards-{000000..000031}.tar         a pattern: numbers (zeros in front are kept) or words, {a,b}
    one.tar::two.tar                         several of any kind, one after the other
    https://host/shards/shards.json          the manifest that ``gradscope data pack`` writes; also https://host/shards/
    s3://bucket/shards-{000..031}.tar        any address that fsspec knows (the extra gradscope[webdataset]); also a folder there

Splits of tar files without a manifest: folders train/, val/, test/; else names that all hold one split as a word of their own
("train-000.tar", "cc3m-train-0000.tar"); else "all". Order is that of the pattern, or of the names.

How it can mislead: names are ordered as text, so "shard-10.tar" comes before "shard-2.tar"; that changes the shuffle, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscope.data.own_records import usual_split
from gradscope.data.shard_fetch import Shard, is_address, listing, read_text

MANIFEST = "shards.json"
PLAN = ".pack.json"  # in a folder whose pack is not finished
MANIFEST_FORMAT = "gradscope shards 1"
SPLITS = ("train", "val", "test")
#: A pattern that means more shards than this is a mistake in it.
MOST_SHARDS = 1_000_000
_LONGEST_LABEL = 80  # characters
_TAR = re.compile(r"\.(tar|tgz|tar\.(gz|bz2|xz|zst))$", re.IGNORECASE)
_SPLIT_NAME = re.compile(r"(?<![a-z])(train|val|valid|validation|dev|test)(?![a-z])", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class ShardList:
    """Splits in order, each with its shards. ``manifest`` is what ``data pack`` wrote, {} where there is none."""

    splits: Mapping[str, Sequence[Shard]]
    manifest: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def names_shards(name: str) -> bool:
    """Is this what a set of tar files is called? Looks at the name, and into a folder; opens nothing."""
    path = Path(name).expanduser()
    if path.is_dir():
        return (path / MANIFEST).is_file() or _holds_tars(path)
    if path.is_file():
        return path.name == MANIFEST or _TAR.search(path.name) is not None
    return is_address(name) or "::" in name or (name.startswith("pipe:") or _TAR.search(name) is not None)


def _holds_tars(folder: Path) -> bool:
    return any(_tars(place) for place in (folder, *(folder / split for split in SPLITS)) if place.is_dir())


def _tars(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".tar")


def file_label(name: str) -> str:
    """What files about a data set are called: the last part of its name; of tar files without braces, ending and query.

    "s3://b/shards-{000..031}.tar?key=1" is "shards-000-031", "a.tar::b.tar::c.tar" is "a-and-2-more", "." is what the folder is called.
    """
    first, *others = name.split("::")
    if not others and not is_address(name) and Path(name).name == MANIFEST:
        return Path(name).absolute().parent.name
    if not others and not names_shards(name):
        return Path(name).name if Path(name).name not in ("", "..") else Path(name).resolve().name
    stem = first.partition("?")[0].removesuffix(MANIFEST) if is_address(first) else first.removesuffix(MANIFEST)
    last = stem.rstrip("/").rpartition("/")[2]
    base = Path(stem).expanduser().resolve().name if last in ("", ".", "..") else _TAR.sub("", last)
    plain = re.sub(r"\.\.|[,:]", "-", re.sub(r"[{}]", "", base))[:_LONGEST_LABEL]
    return f"{plain}-and-{len(others)}-more" if others else plain


def find_shards(name: str) -> ShardList:
    """Raises ValueError: a pattern that cannot be read, shards that are not there or named twice, or splits that are not clear."""
    found = _find(name)
    times = Counter(shard.where for shards in found.splits.values() for shard in shards)
    twice = next((where for where, count in times.items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"'{name}' names {twice} {times[twice]} times, so its samples would be read as often; name each shard once")
    return found


def _find(name: str) -> ShardList:
    if "::" in name:
        parts = name.split("::")
        if not all(parts):
            raise ValueError(f"'{name}' joins a name with nothing; write one.tar::two.tar")
        return _joined([_find(part) for part in parts])
    if name.startswith("pipe:"):
        raise ValueError(f"'{name}' would run a command; give the address itself (https://, s3://, ...) or a path")
    if is_address(name) and not name.startswith("file://"):
        return _of_address(name)
    path = Path(name.removeprefix("file://")).expanduser()
    if path.is_dir():
        manifest = path / MANIFEST
        if (path / PLAN).is_file() and not manifest.is_file():
            raise ValueError(f"'{path}' holds an unfinished pack; give its `gradscope data pack` command again, or name the tar files")
        return of_manifest(_read_manifest(manifest), str(path)) if manifest.is_file() else _of_folder(path)
    if path.name == MANIFEST and path.is_file():
        return of_manifest(_read_manifest(path), str(path.parent))
    names = [str(path)] if path.exists() else expand(str(path))
    missing = [n for n in names if not Path(n).is_file()]
    if missing and len(names) == 1:
        raise ValueError(f"there is no tar file '{names[0]}'; name one, a pattern (shards-{{000..031}}.tar) or a folder of them")
    if missing:
        raise ValueError(f"{len(missing):,} of {len(names):,} shards of '{name}' do not exist (first: {missing[0]}); mend the pattern")
    return ShardList(splits={"all": [Shard(where=n) for n in names]}, manifest={})


def expand(pattern: str) -> list[str]:
    """Every name a pattern with braces stands for, in order. Raises ValueError: nested or unequal braces, or far too many names."""
    names = [""]
    parts = _BRACES.split(pattern)  # what is outside and inside of braces, in turn
    for number, part in enumerate(parts):
        choices = _choices(part, pattern) if number % 2 else [part]
        if len(names) * len(choices) > MOST_SHARDS:
            raise ValueError(f"'{pattern}' stands for more than {MOST_SHARDS:,} shards; mend the numbers in its braces")
        names = [name + choice for name in names for choice in choices]
    if any(brace in part for part in parts[::2] for brace in "{}"):
        raise ValueError(f"'{pattern}' has a brace inside braces or without its partner; a pattern looks like shards-{{000..031}}.tar")
    return names


def _choices(inside: str, pattern: str) -> list[str]:
    numbers = _NUMBERS.fullmatch(inside)
    if numbers is None:
        return inside.split(",")
    first, last = int(numbers[1]), int(numbers[2])
    if abs(last - first) >= MOST_SHARDS:
        raise ValueError(f"'{pattern}' stands for more than {MOST_SHARDS:,} shards; mend the numbers in its braces")
    padded = any(len(n) > 1 and n.startswith("0") for n in numbers.groups())
    digits = max(map(len, numbers.groups())) if padded else 0
    step = 1 if first <= last else -1
    return [f"{n:0{digits}}" for n in range(first, last + step, step)]


def _of_folder(folder: Path) -> ShardList:
    top = _tars(folder)
    inside = {p.name: _tars(p) for p in sorted(folder.iterdir()) if p.is_dir() and usual_split(p.name) in SPLITS}
    inside = {name: tars for name, tars in inside.items() if tars}
    if not top and not inside:
        raise ValueError(f"'{folder}' holds no tar files; name a folder of them, or a pattern (shards-{{000..031}}.tar)")
    if top and inside:
        inner = ", ".join(f"{name}/" for name in inside)
        raise ValueError(f"'{folder}' has {len(top):,} tar files at its top and more in {inner}; name one of the folders, or a pattern")
    groups, notes = _by_name(top)
    for name, tars in inside.items():
        groups.setdefault(usual_split(name), []).extend(tars)
    ordered = sorted(groups, key=lambda split: SPLITS.index(split) if split in SPLITS else -1)
    return ShardList(splits={split: [Shard(where=str(tar)) for tar in groups[split]] for split in ordered}, manifest={}, notes=notes)


def _by_name(tars: Sequence[Path]) -> tuple[dict[str, list[Path]], tuple[str, ...]]:
    """Split -> tar files, and a note where only some of the names say one."""
    said = [{usual_split(word.lower()) for word in _SPLIT_NAME.findall(tar.name)} for tar in tars]
    if any(len(words) != 1 for words in said):
        named = [tar.name for tar, words in zip(tars, said, strict=True) if words]
        note = (
            f"{len(named):,} of {len(tars):,} tar files have a split in their names ({named[0]}); all are read as one" if named else ""
        )
        return {"all": list(tars)}, (note,) if note else ()
    groups: dict[str, list[Path]] = {}
    for tar, words in zip(tars, said, strict=True):
        groups.setdefault(words.pop(), []).append(tar)
    return groups, ()


def _of_address(name: str) -> ShardList:
    stem = name.split("?")[0]
    if _TAR.search(stem) or "{" in stem:
        return ShardList(splits={"all": [Shard(where=n) for n in expand(name)]}, manifest={})
    if stem.endswith(".json") and not name.endswith(f"/{MANIFEST}"):
        return _of_manifest_address(name, stem.rpartition("/")[0])
    folder = name.removesuffix(MANIFEST).rstrip("/")
    text, notes = read_text(f"{folder}/{MANIFEST}")
    if text is not None:
        found = of_manifest(_parsed(text, f"{folder}/{MANIFEST}"), folder)
        return ShardList(splits=found.splits, manifest=found.manifest, notes=(*found.notes, *notes))
    tars = listing(folder)
    if not tars:
        raise ValueError(f"{folder} has neither a {MANIFEST} nor a *.tar; name the shards with a pattern, {folder}/{{000..031}}.tar")
    return ShardList(splits={"all": [Shard(where=n) for n in tars]}, manifest={})


def _of_manifest_address(name: str, folder: str) -> ShardList:
    """A manifest of another name, or with a query."""
    text, notes = read_text(name)
    if text is None:
        raise ValueError(
            f"{name} does not exist there (404, not found); name the {MANIFEST} that `gradscope data pack` wrote, or the shards with a "
            f"pattern, {folder}/{{000..031}}.tar"
        )
    found = of_manifest(_parsed(text, name), folder)
    return ShardList(splits=found.splits, manifest=found.manifest, notes=(*found.notes, *notes))


def _read_manifest(path: Path) -> Mapping[str, Any]:
    return _parsed(path.read_bytes(), str(path))


def _parsed(text: str | bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"'{where}' is not valid JSON ({error}); pack the data again") from error
    if not isinstance(found, dict) or found.get("format") != MANIFEST_FORMAT or not found.get("splits"):
        raise ValueError(
            f"'{where}' is no list of shards of this version ('{MANIFEST_FORMAT}'); pack the data again, or name the tar files"
        )
    return found


def of_manifest(manifest: Mapping[str, Any], place: str) -> ShardList:
    """Raises ValueError if a shard on this disk is missing or has another size than was written."""
    try:
        splits = {split: [_listed(shard, place) for shard in facts["shards"]] for split, facts in manifest["splits"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the {MANIFEST} of '{place}' is damaged: a split or a shard lacks {error}; copy or pack it again") from error
    listed = [shard for shards in splits.values() for shard in shards]
    if is_address(place):
        return ShardList(splits=splits, manifest=manifest)
    wrong = [s for s in listed if not Path(s.where).is_file() or Path(s.where).stat().st_size != s.size]
    if wrong:
        raise ValueError(
            f"{len(wrong):,} of {len(listed):,} shards of '{place}' are missing or have another size than its {MANIFEST} says (first: "
            f"{Path(wrong[0].where).name}, {wrong[0].size:,} bytes); copy them again"
        )
    known = {Path(s.where).name for s in listed}
    others = [tar.name for tar in sorted(Path(place).glob("*.tar")) if tar.name not in known]
    notes = (f"{len(others):,} tar files in {place} are not in its {MANIFEST} and are not read ({others[0]})",) if others else ()
    return ShardList(splits=splits, manifest=manifest, notes=notes)


def _listed(shard: Mapping[str, Any], place: str) -> Shard:
    return Shard(where=f"{place}/{shard['name']}", size=shard["bytes"], sha256=shard["sha256"], records=shard["records"])


def _joined(lists: Sequence[ShardList]) -> ShardList:
    splits: dict[str, list[Shard]] = {}
    for found in lists:
        for split, shards in found.splits.items():
            splits.setdefault(split, []).extend(shards)
    return ShardList(splits=splits, manifest={}, notes=tuple(note for found in lists for note in found.notes))
