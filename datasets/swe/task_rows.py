"""A repository to repair as a dataset row: verl's columns, the task's own fields in `extra_info`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.datasets.rows import Row, write_parquet
from penstock.sandbox.swe import SweTask, SweTaskError

DATA_SOURCE = "swe"
INSTRUCTION = (
    "The repository in your working directory has a bug. Find it and repair it in the source, not in the tests. "
    "Hidden tests decide. Call submit when you are done.\n\n"
)
Fields = dict[str, Any]
"""What `SweTask.from_row` reads."""


def dataset_row(fields: Fields, split: str, index: int) -> Row:
    """`fields` checked as the task that they will be. Raises `SweTaskError` naming the field."""
    task = SweTask.from_row(fields)
    if not task.problem_statement.strip():
        raise SweTaskError(f"task {task.instance_id}: problem_statement is empty: nobody could tell what to repair")
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
    partial = out / f".{split}.jsonl.partial"
    partial.write_text("".join(json.dumps(fields, sort_keys=True) + "\n" for fields in tasks), encoding="utf-8")
    partial.replace(out / f"{split}.jsonl")
    return path
