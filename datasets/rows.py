"""Rows with verl's columns, and their Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.common import atomic_path
from penstock.datasets.arithmetic import evaluate, in_range

Row = dict[str, Any]
INSTRUCTION = "You act in an environment. Each message tells what you observe; each of your answers is one action."
"""System prompt of rows whose environment makes the rest."""


class BadSpec(ValueError):
    """The source names no generator, split, task, folder or option that exists."""


def arithmetic_row(expression: str, data_source: str, split: str, index: int) -> Row:
    """One task: what is `expression`? The ground truth is its value in full precision, as text."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question(expression)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": repr(evaluate(expression))},
        "extra_info": {"split": split, "index": index, "expression": expression, "in_range": in_range(expression)},
    }


def question(expression: str) -> str:
    """The one wording of the task: the base model knows no other."""
    return f"What is {expression}?"


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write `rows` to `path`, whole or not at all: a killed run leaves no half file under its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        pq.write_table(pa.Table.from_pylist(list(rows)), partial)
