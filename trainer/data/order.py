"""Sources of training tasks: an endless shuffled stream of the dataset, or a curriculum.

A task's name holds its place in the stream, so no name is given twice over restarts. Under a curriculum it ends with
the row as well, ``train/0000/00000017/42``: a group's result is that of its row, for any submitter.

A curriculum survives its trainer: ``curriculum.jsonl`` has what each step said about its rows, and is cut to the
checkpoint that a restarted trainer continues from, as ``steps.jsonl`` is. Weights that were changed while the run
trained are in ``curriculum.json``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from penstock.common import append_jsonl, iter_jsonl, rewrite_jsonl, write_atomically
from penstock.trainer.data.config import DataConfig
from penstock.trainer.data.curriculum import Curriculum, CurriculumConfig, CurriculumWeights
from penstock.trainer.data.rows import DataError, DatasetRow, DataStream, load_rows
from penstock.transfer_queue import DataCursor, Task

WEIGHTS_FILE = "curriculum.json"
logger = logging.getLogger(__name__)


class StreamedTasks:
    """Epoch after epoch, each row once; a `TaskOrder`."""

    def __init__(
        self, rows: Sequence[DatasetRow], stream: DataStream, sampling: Mapping[str, Any] | None = None
    ) -> None:
        """`sampling` is that of every task."""
        self._rows = rows
        self._stream = stream
        self._sampling = sampling

    def begin(self, step: int) -> None:
        """Does nothing: the order does not depend on steps."""

    def next(self, start: DataCursor, count: int) -> tuple[list[Task], DataCursor]:
        places = self._stream.places(start, count)
        rows = [self._rows[self._stream.row_index(place)] for place in places]
        tasks = [
            row.task(_name(place), "train", sampling=self._sampling) for row, place in zip(rows, places, strict=True)
        ]
        return tasks, self._stream.after(places[-1])

    def observe(self, step: int, rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
        return {}


class CurriculumTasks:
    """Tasks as a `Curriculum` draws them; a `TaskOrder`. Its methods are called one at a time."""

    def __init__(
        self,
        rows: Sequence[DatasetRow],
        config: CurriculumConfig,
        run_dir: Path,
        seed: int,
        *,
        shuffle: bool = True,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `ValueError` where the weights fit no source of the rows."""
        self._rows = rows
        self._sampling = sampling
        self._new = lambda: Curriculum([row.data_source for row in rows], config, seed, shuffle=shuffle)
        self._curriculum = self._new()
        self._results = run_dir / "curriculum.jsonl"
        self._digest = _digest(rows)
        self._weights = WeightsFile(run_dir, [row.data_source for row in rows])

    def begin(self, step: int) -> None:
        """Forget what `step` and later ones said: they are trained again."""
        earlier = [line for line in iter_jsonl(self._results) if line["step"] < step]
        if any(line["data"] != self._digest for line in earlier):
            logger.warning("%s is about other rows than the data has now: pass rates begin anew", self._results)
            earlier = []
        rewrite_jsonl(self._results, earlier)
        self._curriculum = self._new()
        for line in earlier:
            self._see(line["passed"])

    def next(self, start: DataCursor, count: int) -> tuple[list[Task], DataCursor]:
        self._curriculum.weights = self._weights.newest(self._curriculum.weights)
        places = [DataCursor(start.epoch, start.index + number) for number in range(count)]
        rows = [self._curriculum.draw() for _ in places]
        tasks = [
            self._rows[row].task(f"{_name(place)}/{row}", "train", sampling=self._sampling)
            for place, row in zip(places, rows, strict=True)
        ]
        return tasks, DataCursor(start.epoch, start.index + count)

    def observe(self, step: int, rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
        passed = {
            task_id: sum(map(self._curriculum.has_passed, values)) / len(values) for task_id, values in rewards.items()
        }
        append_jsonl(self._results, [{"step": step, "data": self._digest, "passed": passed}])
        self._see(passed)
        return self._curriculum.numbers()

    def _see(self, passed: Mapping[str, float]) -> None:
        for task_id, share in passed.items():
            # Tasks of a run that had no curriculum before are still on their way: they name no row.
            if (row := row_of(task_id)) is not None:
                self._curriculum.observe(row, share)


class WeightsFile:
    """``curriculum.json`` of a run: weights in place of the recipe's, as long as the file is there."""

    def __init__(self, run_dir: Path, data_sources: Sequence[str]) -> None:
        self._path = run_dir / WEIGHTS_FILE
        self._data_sources = data_sources
        self._seen: tuple[int, int] | None = None

    def newest(self, now: CurriculumWeights) -> CurriculumWeights:
        """`now` where the file is not there, was read before, or cannot be used, which is logged."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return now
        if self._seen == (stat.st_mtime_ns, stat.st_ino):
            return now
        self._seen = (stat.st_mtime_ns, stat.st_ino)
        try:
            weights = read_weights(self._path)
            weights.check(self._data_sources)
        except (OSError, ValueError) as error:
            logger.error("%s is left out, the weights stay as they are: %s", self._path, error)
            return now
        logger.info("weights of the curriculum are now %s", weights.model_dump_json())
        return weights


def read_weights(path: Path) -> CurriculumWeights:
    """Raises `OSError`, and `ValueError` naming the key that is wrong."""
    try:
        return CurriculumWeights.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or path.name}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(problems)) from None


def write_weights(run_dir: Path, weights: CurriculumWeights) -> None:
    """The run's trainer takes them with the next tasks that it submits."""
    write_atomically(run_dir / WEIGHTS_FILE, weights.model_dump_json(indent=1) + "\n")


def row_of(task_id: str) -> int | None:
    """Return the row of a task that a curriculum drew; None for another one."""
    parts = task_id.split("/")
    return int(parts[3]) if len(parts) == 4 and parts[3].isdecimal() else None


def tasks_again(data: DataConfig, seed: int, names: Iterable[str]) -> dict[str, Task]:
    """Return the tasks that a run of these settings had under these names. Raises `DataError`."""
    rows = load_rows(data.train)
    stream, tasks = DataStream(len(rows), seed, data.shuffle), {}
    for name in names:
        row = row_of(name)
        if row is None:
            epoch, index = map(int, name.split("/")[1:])
            row = stream.row_index(DataCursor(epoch, index)) if index < len(rows) else len(rows)
        if row >= len(rows):
            raise DataError(f"{name}: dataset {data.train} has only {len(rows)} rows now")
        tasks[name] = rows[row].task(name, "train")
    return tasks


def _name(place: DataCursor) -> str:
    return f"train/{place.epoch:04d}/{place.index:08d}"


def _digest(rows: Sequence[DatasetRow]) -> str:
    digest = xxhash.xxh3_64()
    for row in rows:
        digest.update(repr((row.data_source, row.messages, row.ground_truth)).encode())
    return digest.hexdigest()
