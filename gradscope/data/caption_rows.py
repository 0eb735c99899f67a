"""Caption files of every accepted format -> rows of (id, captions), before any policy.

JSON (a list of records or strings), JSON lines, tables with a header (separator detected) and plain lines. Nothing depends on
the locale, nothing is read as a missing value, and every refusal names the file, the line and what to do.
How it can mislead: where a file has several caption columns, the first of CAPTION_KEYS is read unless one is named.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CAPTION_KEYS = ("caption", "captions", "description", "text", "long_caption", "sentence", "title")
ID_KEYS = ("id", "image_id", "example_id", "filename", "file_name", "image", "image_file", "filepath", "path")
_JSON_LINES = (".jsonl", ".jsonlines", ".ndjson")
SUFFIXES = (".json", *_JSON_LINES, ".csv", ".tsv", ".txt")
_SEPARATORS = ("\t", ",", ";", "|")
_SEPARATOR_NAMES = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "pipe"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record of a file, before any policy."""

    id: str
    captions: tuple[str, ...]


def read_rows(
    path: Path, *, caption_key: str | None = None, encoding: str = "utf-8", splits: tuple[str, ...] = ()
) -> tuple[list[Row], str]:
    """Records of a file in its order, and the caption key that was read ("" for plain lines).

    Args:
        caption_key: the key (or column) that holds the captions; None takes the first of CAPTION_KEYS that is there.
        encoding: of the text; UTF-8 is read with or without byte-order mark.
        splits: where records have a key "split", only those with one of these values are taken; () takes all.

    Raises:
        ValueError: naming the file and the line, for text, syntax or types that cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"'{path}' ends in '{path.suffix}', which is no caption format; use one of {', '.join(SUFFIXES)}.")
    text = _decode(path, encoding)
    if suffix == ".txt":
        lines = text.removesuffix("\n").split("\n") if text else []  # not splitlines: a caption may hold U+2028
        if caption_key:
            raise ValueError(f"--caption-key {caption_key} was given, but '{path}' is plain text without keys; leave it out.")
        return [Row(id=str(n), captions=(line.removesuffix("\r"),)) for n, line in enumerate(lines, start=1)], ""
    if suffix in (".csv", ".tsv"):
        items = _table_items(path, text, caption_key)
    else:
        items = _json_lines(path, text) if suffix in _JSON_LINES else _json_items(path, text)
    return _records(items, caption_key, splits)


def _decode(path: Path, encoding: str) -> str:
    content = path.read_bytes()
    utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff") and encoding == "utf-8"
    try:
        if not utf16:
            return content.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
        line, reason = 1, "it starts like UTF-16"
    except LookupError as error:
        raise ValueError(f"unknown text encoding '{encoding}'; use a name Python knows, such as utf-8 or latin-1.") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{content[error.start]:02x} is not valid {encoding}"
    raise ValueError(f"{path} line {line}: {reason}; save it as UTF-8, or name its encoding with --encoding (utf-16, latin-1).")


def _json_items(path: Path, text: str) -> Iterator[tuple[str, object]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; one JSON object per line belongs in a .jsonl file" if error.msg == "Extra data" else ""
        raise ValueError(f"{path} line {error.lineno}: not valid JSON ({error.msg}){hint or '; mend the file'}.") from error
    if not isinstance(items, list):
        raise ValueError(f"{path} holds a JSON {_type(items)} at its top; a list of records or of strings is needed.")
    starts = _item_lines(text)
    for number, (line, item) in enumerate(zip(starts, items, strict=True), start=1):
        yield f"{path} line {line} (record {number})", item


def _item_lines(text: str) -> Iterator[int]:
    """Line on which each item of a valid JSON list starts, so that a message can point at it."""
    decoder, at, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    while True:
        while text[at].isspace() or text[at] == ",":
            at += 1
        if text[at] == "]":
            return
        line += text.count("\n", counted, at)
        counted = at
        yield line
        _, at = decoder.raw_decode(text, at)


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number}: not valid JSON ({error.msg}); each line must be one value.") from error
        yield f"{path} line {number}", item


def _table_items(path: Path, text: str, caption_key: str | None) -> Iterator[tuple[str, object]]:
    separator = _separator(path, text, caption_key)
    before = csv.field_size_limit(2**31 - 1)  # the default of 131072 refuses a long caption
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header = [name.strip() for name in next(reader)]
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{path} line {reader.line_num}: {len(cells)} fields, but the header has {len(header)} "
                    f"(separator: {_SEPARATOR_NAMES[separator]}); put quotes around captions that hold the separator."
                )
            yield f"{path} line {reader.line_num}", dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: {error}; look for an unpaired quote.") from error
    finally:
        csv.field_size_limit(before)


def _separator(path: Path, text: str, caption_key: str | None) -> str:
    """The separator under which the header names a caption column, whatever the file is called."""
    header = text.split("\n", 1)[0].strip("\r")
    columns = {s: [c.strip() for c in next(csv.reader([header], delimiter=s), [])] for s in _SEPARATORS}
    wanted = {caption_key.casefold()} if caption_key else set(CAPTION_KEYS)
    fitting = [s for s in _SEPARATORS if wanted & {c.casefold() for c in columns[s]}]
    if fitting:
        return max(fitting, key=lambda s: len(columns[s]))
    best = max(_SEPARATORS, key=lambda s: len(columns[s]))
    raise ValueError(
        f"{path} has no column {' or '.join(sorted(wanted))}: with the separator {_SEPARATOR_NAMES[best]} its columns are "
        f"{', '.join(columns[best]) or 'none'}; name the caption column with --caption-key."
    )


def _records(items: Iterator[tuple[str, object]], caption_key: str | None, splits: tuple[str, ...]) -> tuple[list[Row], str]:
    rows: list[Row] = []
    key = ""
    for number, (where, item) in enumerate(items, start=1):
        if isinstance(item, str) and not caption_key:
            rows.append(Row(id=str(number), captions=(item,)))
            continue
        if not isinstance(item, dict):
            raise ValueError(f"{where}: a {_type(item)}, but a record (or a string) is needed; mend or remove it.")
        if splits and "split" in item and item["split"] not in splits:
            continue
        key = key if key in item else _key_in(item, where, caption_key)
        rows.append(Row(id=_id_in(item, number), captions=_captions_in(item[key], where, key)))
    return rows, key


def _key_in(item: dict[str, object], where: str, caption_key: str | None) -> str:
    """The record's own spelling of its caption key; keys match without regard to case."""
    spelt = {str(name).casefold(): name for name in reversed(item)}
    for wanted in [caption_key] if caption_key else CAPTION_KEYS:
        if wanted.casefold() in spelt:
            return spelt[wanted.casefold()]
    asked = f"'{caption_key}'" if caption_key else f"any of {', '.join(CAPTION_KEYS)}"
    raise ValueError(f"{where}: no key {asked} among {', '.join(map(str, item)) or 'none'}; name it with --caption-key.")


def _id_in(item: dict[str, object], number: int) -> str:
    spelt = {str(name).casefold(): name for name in reversed(item)}
    found = next((item[spelt[key]] for key in ID_KEYS if key in spelt), None)
    return str(found) if isinstance(found, str | int) and found != "" else str(number)


def _captions_in(value: object, where: str, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(caption, str) for caption in value):
        return tuple(value)
    raise ValueError(f"{where}: '{key}' is a {_type(value)}, but a string or a list of strings is needed; mend or remove it.")


def _type(value: object) -> str:
    names = {dict: "record", list: "list", str: "string", int: "number", float: "number", bool: "true or false"}
    if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
        return "list with entries that are not strings"
    return names.get(type(value), "null")
