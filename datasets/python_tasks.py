"""Tasks of a Python file, `FILE.py:NAME` in `data`: a list, or a function without arguments that returns one.

("What is 12+34?", "46")                                    question, ground truth
{"level": 3}                                                options of an environment: arguments of its class
{"prompt": [...], "data_source": …, "reward_model": …}      a row with verl's columns
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.agent_loops import LoadError, load_object
from penstock.datasets.rows import INSTRUCTION, BadSpec, Row, write_parquet


def names_python_tasks(source: str) -> bool:
    return ".py:" in source


def python_rows(source: str) -> list[Row]:
    """Returns the rows of ``FILE.py:NAME``. Raises `BadSpec` naming the file, the task and the fault."""
    try:
        tasks = load_object(source, Path())
        tasks = list(tasks() if callable(tasks) else tasks)
    except LoadError as error:
        raise BadSpec(str(error)) from error
    except Exception as error:
        raise BadSpec(f"{source}: {type(error).__name__}: {error}") from error
    if not tasks:
        raise BadSpec(f"{source}: has no tasks")
    name = Path(source.rpartition(":")[0]).stem
    return [_row(task, name, index, f"{source}, task {index + 1}") for index, task in enumerate(tasks)]


def write_python_tasks(source: str, directory: Path) -> Path:
    """Returns the path of the Parquet file of `source`, which is written below `directory`. Raises `BadSpec`."""
    path = directory / f"tasks-{hashlib.sha256(source.encode()).hexdigest()[:12]}.parquet"
    write_parquet(python_rows(source), path)
    return path


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
