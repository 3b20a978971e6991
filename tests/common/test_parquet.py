"""Columns as pandas, polars, Spark and DuckDB write them: a plain value, or the file, the row and the column."""

from __future__ import annotations

import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from penstock.common.parquet import BadParquet, parquet_rows

NS = 1767225600123456789
MAP = pa.map_(pa.string(), pa.int64())
PLAIN = [
    (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
    (pa.array(["a", "b"], pa.large_string()), ["a", "b"]),
    (pa.array(["a", None], pa.string_view()), ["a", None]),
    (pa.array([[[1]], []], pa.large_list(pa.list_(pa.int8(), 1))), [[[1]], []]),
    (pa.array([2**64 - 1, None], pa.uint64()), [2**64 - 1, None]),
    (pa.array([[{"a": 1}, {"b": None}], None]), [[{"a": 1, "b": None}, {"a": None, "b": None}], None]),
    (pa.array([[("a", 1)], []], MAP), [{"a": 1}, {}]),
    (pa.array([[[("a", 1)]], []], pa.list_(MAP)), [[{"a": 1}], []]),
    (pa.nulls(2), [None, None]),
    (pa.array([0, 1], pa.date32()), [datetime.date(1970, 1, 1), datetime.date(1970, 1, 2)]),
]
FINER_THAN_PYTHON = [  # pandas, where it is installed, has a type for these
    (pa.array([0, NS], pa.timestamp("ns")), "Nanosecond resolution"),
    (pa.array([0, NS], pa.timestamp("ns", "Europe/Berlin")), "Nanosecond resolution temporal"),
    (pa.array([0, 1], pa.duration("ns")), "Nanosecond duration"),
]
NOT_PLAIN = [
    *([] if find_spec("pandas") else FINER_THAN_PYTHON),
    (pa.array([0, 10**18], pa.timestamp("ms")), "too large"),
    (pa.array([[], [("a", 1), ("a", 2)]], MAP), "duplicate key"),
    (pa.array([b"a", b"\xe9"]).view(pa.string()), "'utf-8' codec can't decode"),
]


def write(folder: Path, column: pa.Array) -> Path:
    pyarrow.parquet.write_table(pa.table({"number": [1, 2], "column": column}), folder / "data.parquet")
    return folder / "data.parquet"


@pytest.mark.parametrize(("column", "values"), PLAIN, ids=[str(column.type) for column, _ in PLAIN])
def test_parquet_values_are_plain(tmp_path: Path, column: pa.Array, values: list[Any]) -> None:
    assert [row["column"] for row in parquet_rows(write(tmp_path, column))] == values


def test_parquet_column_that_stands_twice_is_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table([pa.array([1]), pa.array([2])], ["x", "x"]), tmp_path / "data.parquet")
    with pytest.raises(BadParquet, match=r"data\.parquet: two columns are called x"):
        next(parquet_rows(tmp_path / "data.parquet"))


@pytest.mark.parametrize(("column", "cause"), NOT_PLAIN, ids=[cause for _, cause in NOT_PLAIN])
def test_parquet_value_that_is_not_plain_is_named(tmp_path: Path, column: pa.Array, cause: str) -> None:
    rows = parquet_rows(write(tmp_path, column))
    assert next(rows)["number"] == 1
    with pytest.raises(BadParquet, match=rf"data\.parquet, row 2: column has no plain value \(.*{cause}"):
        next(rows)


POLARS_TYPES = (
    "/////6YAAAAEAAAA8v///xQAAAAEAAEAAAAKAAsACAAKAAQA+P///wwAAAAIAAgAAAAEAAIAAAA0AAAABAAAAMD///8gAAAAEAAAAAgAAAABAgAAAAAA"
    "ALj///+AAAAAAQAAAAEAAABuAAAA7P///zgAAAAgAAAAGAAAAAECAAAQABIABAAQABEACAAAAAwAAAAAAPT///9AAAAAAQAAAAgACQAEAAgAAQAAAGEA"
)
"""``ARROW:schema`` of polars' `write_parquet` for the columns a, Int64, and n, Int128."""


def test_columns_of_128_bits_are_named(tmp_path: Path) -> None:
    columns = {"a": pa.array([1, 2]), "n": pa.array([b"x" * 16, None], pa.binary(16))}
    table = pa.table(columns).replace_schema_metadata({"writer:types": POLARS_TYPES})
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(table, path)
    own = path.read_bytes().replace(b"ARROW:schema", b"unused:types")
    path.write_bytes(own.replace(b"writer:types", b"ARROW:schema"))
    with pytest.raises(BadParquet, match=r"data\.parquet: n: integers of 128 bits .* write them as text"):
        list(parquet_rows(path))
