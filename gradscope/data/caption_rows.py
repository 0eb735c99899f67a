"""Files of every accepted format -> items (where it stands, value), before any meaning is given to them.

JSON (a list of records or strings), JSON lines, tables with a header (separator detected), Parquet and plain lines. Nothing depends
on the locale, nothing in a text file is read as a missing value, and every refusal names the file, the line and what to do.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from gradscope.data.columns import CAPTION_KEYS, Item, folded

_JSON_LINES = (".jsonl", ".jsonlines", ".ndjson")
_TABLES = (".csv", ".tsv")
#: Formats that can name pictures, and those that can be read at all.
RECORD_SUFFIXES = (*_JSON_LINES, ".json", *_TABLES, ".parquet")
SUFFIXES = (".json", *_JSON_LINES, *_TABLES, ".parquet", ".txt")
_SEPARATORS = ("\t", ",", ";", "|")
_SEPARATOR_NAMES = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "pipe"}


def read_items(path: Path, *, caption_key: str = "", encoding: str = "") -> list[Item]:
    """Items of a file in its order: records (dict) or captions (str), each with "FILE line N" for messages.

    Args:
        caption_key: decides between the separators of a table whose caption column has an unusual name.
        encoding: of the text; "" is UTF-8, with or without byte-order mark.

    Raises:
        ValueError: naming the file and the line, for a format, text or syntax that cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"'{path}' ends in '{path.suffix}', which is no caption format; use one of {', '.join(SUFFIXES)}.")
    if suffix == ".parquet":
        from gradscope.data.parquet_rows import parquet_items

        return list(parquet_items(path))
    text = decode(path, encoding)
    if suffix == ".txt":
        lines = text.removesuffix("\n").split("\n") if text else []  # not splitlines: a caption may hold U+2028
        return [(f"{path} line {n}", line.removesuffix("\r")) for n, line in enumerate(lines, start=1)]
    if suffix in _TABLES:
        return list(_table_items(path, text, caption_key))
    return list(_json_lines(path, text) if suffix in _JSON_LINES else _json_items(path, text))


def decode(path: Path, encoding: str = "") -> str:
    """The text of a file. Raises ValueError with the line of the first byte that is not in the encoding."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}.") from error
    utf8 = encoding.lower() in ("", "utf-8", "utf8", "utf_8", "utf-8-sig")
    utf16 = utf8 and content[:2] in (b"\xff\xfe", b"\xfe\xff")
    try:
        if not utf16:
            return content.decode("utf-8-sig" if utf8 else encoding)
        line, reason = 1, "it starts like UTF-16, not UTF-8"
    except LookupError as error:
        raise ValueError(f"unknown text encoding '{encoding}'; use a name Python knows, such as utf-8 or latin-1.") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{content[error.start]:02x} is not {'UTF-8' if utf8 else encoding}"
    raise ValueError(f"{path} line {line}: {reason}; save it as UTF-8, or name its encoding with --encoding (utf-16, latin-1).")


def _json_items(path: Path, text: str) -> Iterator[Item]:
    try:
        items = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        hint = "; one JSON object per line belongs in a .jsonl file" if error.msg == "Extra data" else ""
        raise ValueError(f"{path} line {error.lineno}: not valid JSON ({error.msg}){hint or '; mend the file'}.") from error
    if not isinstance(items, list):
        raise ValueError(f"{path} holds a JSON {type_name(items)} at its top; a list of records or of strings is needed.")
    for number, (line, item) in enumerate(zip(_item_lines(text) if items else [], items, strict=True), start=1):
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


def _json_lines(path: Path, text: str) -> Iterator[Item]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number}: not valid JSON ({error.msg}); each line must be one value.") from error
        yield f"{path} line {number}", item


def _table_items(path: Path, text: str, caption_key: str) -> Iterator[Item]:
    separator = _separator(path, text, caption_key)
    before = csv.field_size_limit(2**31 - 1)  # the default of 131072 refuses a long caption
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        header = [name.strip() for name in next(reader)]
        if len({folded(name) for name in header}) < len(header):
            raise ValueError(f"{path} line 1: two columns have the same name ({', '.join(header)}); rename one.")
        for cells in reader:
            if not cells and len(header) > 1:
                continue
            cells = cells or [""]  # in a table of one column an empty line is an empty caption
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


def _separator(path: Path, text: str, caption_key: str) -> str:
    """The separator under which the header names a caption column, whatever the file is called."""
    header = text.split("\n", 1)[0].strip("\r")
    columns = {s: [c.strip() for c in next(csv.reader([header], delimiter=s), [])] for s in _SEPARATORS}
    if not header.strip():
        raise ValueError(f"{path} has no header: its first line is empty and names no column; the first line must name the columns.")
    wanted = {folded(caption_key)} if caption_key else set(CAPTION_KEYS)
    fitting = [s for s in _SEPARATORS if wanted & {folded(c) for c in columns[s]}]
    if fitting:
        return max(fitting, key=lambda s: len(columns[s]))
    best = max(_SEPARATORS, key=lambda s: len(columns[s]))
    asked = f"'{caption_key}'" if caption_key else " or ".join(CAPTION_KEYS)
    raise ValueError(
        f"{path} has no column {asked}: with the separator {_SEPARATOR_NAMES[best]} its columns are "
        f"{', '.join(columns[best]) or 'none'}; name the caption column with --caption-key."
    )


def type_name(value: object) -> str:
    """What JSON calls it, for messages."""
    names = {dict: "record", list: "list", str: "string", int: "number", float: "number", bool: "true or false"}
    if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
        return "list with entries that are not strings"
    return names.get(type(value), "null")
