"""Rows of Parquet files that others wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_PLAIN_VALUE = (ValueError, ArithmeticError, LookupError)
"""Arrow's errors for text that is not UTF-8, times finer than a microsecond or after the year 9999, unknown time
zones, and repeated keys of a map."""


class BadParquet(ValueError):
    """The file cannot be read; the message names it, and the row and the column if one of them is at fault."""


def parquet_rows(path: Path, batch_size: int = 1024) -> Iterator[dict[str, Any]]:
    """Rows in order, maps as objects. Raises `BadParquet`."""
    import pyarrow
    import pyarrow.parquet

    done = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadParquet(f"{path}: two columns are called {twice}: rename one of them")
        for batch in file.iter_batches(batch_size):
            try:
                rows = batch.to_pylist(maps_as_pydicts="strict")
            except NO_PLAIN_VALUE:
                rows = (_row(batch.slice(at, 1), f"{path}, row {done + at + 1}") for at in range(batch.num_rows))
            yield from rows
            done += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if wide := _wide_integers(path):
            columns = ", ".join(wide)
            raise BadParquet(f"{path}: {columns}: integers of 128 bits cannot be read: write them as text") from error
        raise BadParquet(f"{path} is not readable as Parquet: {error}") from error


def _wide_integers(path: Path) -> list[str]:
    """Columns of polars' 128-bit integers, 16 bytes that Parquet has no type for: pyarrow opens no such file while its
    footer names the writer's types (https://parquet.apache.org/docs/file-format). Empty if there are none."""
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            file.seek(-8, os.SEEK_END)
            file.seek(-8 - int.from_bytes(file.read(4), "little"), os.SEEK_END)
            footer = file.read().replace(b"ARROW:schema", b"writer:types")
        schema = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(b"PAR1" + footer)).schema
    except (pyarrow.ArrowException, OSError):
        return []
    columns = map(schema.column, range(len(schema)))
    return [one.path for one in columns if one.length == 16 and one.logical_type.type == "NONE"]


def _row(batch: Any, where: str) -> dict[str, Any]:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[0].as_py(maps_as_pydicts="strict")
        except NO_PLAIN_VALUE as error:
            raise BadParquet(f"{where}: {name} has no plain value ({error}): write it as text") from error
    return row
