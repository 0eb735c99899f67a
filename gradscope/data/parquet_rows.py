"""Parquet -> items, one record a row. Columns of pictures' bytes are not read: records name pictures by path.

How it can mislead: a null is an empty text here, as an empty cell of a table is; it is dropped as an empty caption and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradscope.data.columns import IMAGE_KEYS, Item, folded


def parquet_items(path: Path) -> Iterator[Item]:
    """Raises ValueError if pyarrow is not installed, the file is no Parquet, or its pictures are inside it."""
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise ValueError(f"'{path}' needs a Parquet reader: pip install 'gradscope[parquet]'") from error
    try:
        file = parquet.ParquetFile(path)
        columns = [name for field in file.schema_arrow for name in _wanted(field, path)]
        rows = (row for batch in file.iter_batches(columns=columns) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"{path} row {number}", {key: _plain(value) for key, value in row.items()}
    except (ArrowException, OSError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"'{path}' cannot be read as Parquet ({first}); write it again, or check that it is whole.") from error


def _wanted(field: Any, path: Path) -> list[str]:
    """The column, its path alone where it is a picture feature {"bytes", "path"}, or nothing for raw bytes."""
    from pyarrow import types

    if types.is_struct(field.type) and {"bytes", "path"} <= {child.name for child in field.type}:
        return [f"{field.name}.path"]
    binary = types.is_binary(field.type) or types.is_large_binary(field.type)
    if binary and folded(field.name) in IMAGE_KEYS:
        raise ValueError(f"'{path}' holds the pictures themselves in column '{field.name}'; save them as files and give their paths.")
    return [] if binary else [field.name]


def _plain(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, dict) and set(value) == {"path"}:
        return value["path"]
    return value
