"""Tasks of a run are found again by their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer_support import write_rows

from penstock.trainer import DataConfig, DataError, load_rows, tasks_again
from penstock.trainer.data.curriculum import CurriculumConfig
from penstock.trainer.data.order import CurriculumTasks, StreamedTasks
from penstock.trainer.data.rows import DataStream
from penstock.transfer_queue import DataCursor


@pytest.mark.parametrize("is_curriculum", [False, True])
def test_tasks_of_two_epochs_are_the_same_again(tmp_path: Path, is_curriculum: bool) -> None:
    data = DataConfig(train=write_rows(tmp_path / "train.jsonl"))
    rows = load_rows(data.train)
    streamed = StreamedTasks(rows, DataStream(len(rows), 5, data.shuffle))
    drawn = CurriculumTasks(rows, CurriculumConfig(), tmp_path, 5)
    tasks, _ = (drawn if is_curriculum else streamed).next(DataCursor(), 2 * len(rows))
    assert tasks_again(data, 5, [task.task_id for task in tasks]) == {task.task_id: task for task in tasks}


def test_a_row_that_the_data_lost_is_named(tmp_path: Path) -> None:
    file = Path(write_rows(tmp_path / "train.jsonl"))
    data, lines = DataConfig(train=str(file)), file.read_text().splitlines()
    file.write_text("\n".join(lines[:4]) + "\n")
    assert json.loads(lines[0])
    for name in ("train/0000/00000004", "train/0000/00000000/4"):
        with pytest.raises(DataError, match=f"{name}: .* has only 4 rows now"):
            tasks_again(data, 0, [name])
