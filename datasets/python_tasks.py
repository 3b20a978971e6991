"""Tasks of a Python file, `FILE.py:NAME` in `data`: a list, or a function without arguments that returns one.

("What is 12+34?", "46")                                    question, ground truth
{"level": 3}                                                options of an environment: arguments of its class
{"prompt": [...], "data_source": …, "reward_model": …}      a row with verl's columns
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.agent_loops import LoadError, load_object
from penstock.common import USERS_FAULTS, describe_error, write_atomically
from penstock.datasets.rows import INSTRUCTION, BadSpec, Row


def names_python_tasks(source: str) -> bool:
    return ".py:" in source


def python_rows(source: str) -> list[Row]:
    """Returns the rows of ``FILE.py:NAME``. Raises `BadSpec` naming the file, the task and the fault."""
    try:
        tasks = load_object(source, Path())
        tasks = list(tasks() if callable(tasks) else tasks)
    except LoadError as error:
        raise BadSpec(str(error)) from error
    except USERS_FAULTS as error:
        raise BadSpec(f"{source}: {describe_error(error)}") from error
    if not tasks:
        raise BadSpec(f"{source}: has no tasks")
    name = Path(source.rpartition(":")[0]).stem
    rows = []
    for index, task in enumerate(tasks):
        where = f"{source}, task {index + 1}"
        rows.append(_plain(_row(task, name, index, where), where))
    return rows


def write_python_tasks(source: str, directory: Path) -> Path:
    """Returns the path of the file of `source`, which is written below `directory`. Raises `BadSpec`.

    JSON Lines: a column of Parquet has one type, and ground truths of one list may have several.
    """
    path = directory / f"tasks-{hashlib.sha256(source.encode()).hexdigest()[:12]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [f"{json.dumps(row)}\n".encode() for row in python_rows(source)])
    return path


def _plain(row: Row, where: str) -> Row:
    """Return `row` as JSON has it; scalars and arrays of numpy become numbers and lists. Raises `BadSpec`."""
    try:
        return json.loads(json.dumps(row, default=lambda value: value.tolist()))
    except (AttributeError, TypeError, ValueError) as error:
        kinds = "texts, numbers, lists and dicts; a picture by its path or a data: URL"
        raise BadSpec(f"{where}: {error}; tasks are made of {kinds}") from error


def _row(task: Any, name: str, index: int, where: str) -> Row:
    extra = {"index": index, "seed": index}
    if isinstance(task, Mapping) and "prompt" in task:
        return dict(task)
    if isinstance(task, Mapping):
        prompt = {"role": "system", "content": INSTRUCTION}
        return _columns(name, prompt, "environment", {**extra, "env": dict(task)})
    if isinstance(task, tuple | list) and len(task) == 2 and isinstance(task[0], str):
        return _columns(name, {"role": "user", "content": task[0]}, task[1], extra)
    raise BadSpec(f"{where}: expected (question, answer), options of an environment or a row, found {task!r:.200}")


def _columns(name: str, message: Row, ground_truth: Any, extra: Row) -> Row:
    reward_model = {"style": "rule", "ground_truth": ground_truth}
    return {"data_source": name, "prompt": [message], "reward_model": reward_model, "extra_info": extra}
