"""`harbor:FOLDER` in a recipe's data section: the tasks of a folder, as they are, each a row that names its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

from penstock.datasets.rows import Row, write_parquet
from penstock.sandbox.harbor import HarborTask, HarborTaskError, tasks_of

HARBOR = "harbor:"
DATA_SOURCE = "harbor"


class BadFolder(ValueError):
    """The text after `harbor:` is no folder of tasks, or some of them cannot be used: the text names all of these."""


def harbor_rows(folder: Path) -> list[Row]:
    """Raises `BadFolder`."""
    try:
        tasks = tasks_of(folder)
    except HarborTaskError as error:
        raise BadFolder(f"{HARBOR}{folder}: {error}") from error
    return [task_row(task, index) for index, task in enumerate(tasks)]


def task_row(task: HarborTask, index: int) -> Row:
    """The prompt is the instruction alone: an agent gets nothing that Harbor would not give it."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": task.instruction}],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": task.name},
        "extra_info": {"index": index, "instance_id": task.name, "harbor_task": str(task.folder)},
    }


def write_harbor(source: str, directory: Path) -> Path:
    """The Parquet file of `source`, made under `directory`. Raises `BadFolder`."""
    folder = Path(source.removeprefix(HARBOR)).expanduser()
    rows = harbor_rows(folder)
    name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:12]
    path = directory / f"harbor-{name}.parquet"
    write_parquet(rows, path)
    return path
