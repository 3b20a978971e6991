"""Rows: those of other people's datasets, with errors that name the field, and ours with verl's columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.common import write_atomically
from penstock.common.parquet import BadParquet, parquet_rows
from penstock.datasets.rows import Row, write_parquet
from penstock.sandbox.swe import SweTask, SweTaskError

Raw = Mapping[str, Any]


class BadRow(ValueError):
    """A row that no task can be made of; the text names the field."""


class BadFile(ValueError):
    """A file that is not a dataset of this kind; the text names it, and the row."""


def raw_rows(path: Path) -> Iterator[tuple[str, Raw]]:
    """(where, row) of a Parquet, JSONL or JSON file, or of all such files of a folder, in order. Raises `BadFile`."""
    files = sorted(one for one in path.rglob("*") if one.suffix in _READERS) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise BadFile(f"--input {path}: no such file, nor a folder with .parquet, .jsonl or .json files")
    for file in files:
        if file.suffix not in _READERS:
            raise BadFile(f"{file}: unknown kind {file.suffix!r}; give .parquet, .jsonl or .json")
        for number, row in enumerate(_READERS[file.suffix](file), start=1):
            if not isinstance(row, dict):
                raise BadFile(f"{file}, row {number}: expected an object, found {type(row).__name__}")
            yield f"{file}, row {number}", row


def _parquet(path: Path) -> Iterator[Any]:
    try:
        yield from parquet_rows(path, batch_size=64)  # rows of R2E hold megabytes
    except BadParquet as error:
        raise BadFile(str(error)) from error


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json(line, f"{path}, row {number}")


def _json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadFile(f"{where}: not JSON: {error}") from error


def _whole(path: Path) -> Iterator[Any]:
    rows = _json(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise BadFile(f"{path}: expected a list of rows, found {type(rows).__name__}")
    yield from rows


_READERS = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _whole}


# ---- fields
def _value(row: Raw, field: str) -> Any:
    value = row.get(field)
    if value is None:
        raise BadRow(f"field {field!r} is missing; found {', '.join(sorted(row))}")
    return value


def text(row: Raw, field: str, *, may_be_empty: bool = False) -> str:
    """Raises `BadRow`."""
    value = _value(row, field)
    if not isinstance(value, str):
        raise BadRow(f"field {field!r} must be text, found {type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise BadRow(f"field {field!r} is empty")
    return value


def texts(row: Raw, field: str, *, may_be_empty: bool = False) -> list[str]:
    """A list of texts, or one written as JSON. Raises `BadRow`."""
    value = _decoded(row, field)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BadRow(f"field {field!r} must be a list of texts, or such a list as JSON text")
    if not value and not may_be_empty:
        raise BadRow(f"field {field!r} is empty")
    return value


def mapping(row: Raw, field: str) -> dict[str, Any]:
    """An object, or one written as JSON. Raises `BadRow`."""
    value = _decoded(row, field)
    if not isinstance(value, dict):
        raise BadRow(f"field {field!r} must be an object, or one as JSON text, found {type(value).__name__}")
    return value


def _decoded(row: Raw, field: str) -> Any:
    value = _value(row, field)
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRow(f"field {field!r} is not JSON: {error}") from error


DATA_SOURCE = "swe"
INSTRUCTION = (
    "The repository in your working directory has a bug. Find it and repair it in the source, not in the tests. "
    "Hidden tests decide. Call submit when you are done.\n\n"
)
Fields = dict[str, Any]
"""The fields that `SweTask.from_row` reads."""


def dataset_row(fields: Fields, split: str, index: int) -> Row:
    """`fields` checked as the task that they will be. Raises `SweTaskError` naming the field."""
    task = SweTask.from_row(fields)
    if not task.problem_statement.strip():
        raise SweTaskError(f"task {task.instance_id}: problem_statement is empty: it must say what to repair")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": INSTRUCTION + task.problem_statement}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": task.instance_id},
        "extra_info": {"split": split, "index": index, **fields},
    }


def write_split(tasks: Sequence[Fields], out: Path, split: str) -> Path:
    """``SPLIT.parquet`` to train on, ``SPLIT.jsonl`` with the same tasks for `load_tasks`. Raises `SweTaskError`."""
    rows = [dataset_row(fields, split, index) for index, fields in enumerate(tasks)]
    path = out / f"{split}.parquet"
    write_parquet(rows, path)
    write_atomically(out / f"{split}.jsonl", "".join(json.dumps(fields, sort_keys=True) + "\n" for fields in tasks))
    return path
