"""Dataset rows with verl's columns → tasks → the queue.

Every row is checked when the file is opened; errors name its number (from 1). The feeder keeps the queue filled a
little beyond what admission can take, so that rollout never waits for data.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import xxhash

from penstock.common.parquet import BadParquet, parquet_rows
from penstock.trainer.data.image_column import COLUMN, BadImages, with_pictures
from penstock.trainer.data.messages import BadMessages, from_json_text, read_messages, text_of
from penstock.transfer_queue import BadPayload, DataCursor, Limits, Status, StepError, Task, TransferQueue, check_task

NEEDED = ("prompt", "data_source", "reward_model")
PLAIN = (type(None), bool, int, float, str, bytes)


class DataError(ValueError):
    """The dataset cannot be used; the message names the file, the row and the column."""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One checked dataset row, ready to become a task of any split."""

    messages: Sequence[Mapping[str, Any]]
    data_source: str
    ground_truth: Any
    agent_name: str | None
    extra_info: Mapping[str, Any]
    group_size: int | None = None
    """Episodes of its task in training; None: as many as the run's tasks have."""

    @property
    def has_images(self) -> bool:
        """Pictures stand in its prompt."""
        contents = (message.get("content") for message in self.messages)
        parts = [part for content in contents if not isinstance(content, str) for part in content or ()]
        return any(str(part.get("type", "")).startswith("image") for part in parts)

    def task(self, task_id: str, split: str, sampling: Mapping[str, Any] | None = None, min_version: int = 0) -> Task:
        return Task(
            task_id=task_id,
            split=split,
            messages=self.messages,
            data_source=self.data_source,
            ground_truth=self.ground_truth,
            agent_name=self.agent_name,
            extra_info=self.extra_info,
            sampling=sampling or {},
            min_version=min_version,
            group_size=self.group_size,
        )


def load_rows(path: str | Path, limit: int = 0) -> list[DatasetRow]:
    """The rows of a ``.parquet`` or ``.jsonl`` file, or of a folder of them in the order of their names (the first
    `limit`, where not 0). Raises `DataError`."""
    path, rows = Path(path), []
    for file in _files_of(path):
        for number, raw in enumerate(READERS[file.suffix](file), start=1):
            rows.append(_check_row(raw, f"dataset {file}, row {number}", file))
            if len(rows) == limit:
                return rows
    if not rows:
        raise DataError(f"dataset {path} has no rows")
    return rows


def dataset_digest(path: str | Path) -> str:
    """Return the xxh3 of all files that `load_rows` reads, in its order. Raises `DataError`, and `OSError`."""
    digest = xxhash.xxh3_64()
    for file in _files_of(Path(path)):
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"dataset {path}: no such file")
    if not path.is_dir():
        if path.suffix not in READERS:
            raise DataError(f"dataset {path}: unknown kind {path.suffix!r}; give a .parquet or .jsonl file")
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in READERS)
    if all(file.name.endswith(".check.jsonl") for file in files) and any(path.glob("*/task.toml")):
        raise DataError(f"dataset {path}: it holds tasks of Harbor; did you mean harbor:{path}?")
    if not files:
        raise DataError(f"dataset {path}: a folder without .parquet, .jsonl or .ndjson files")
    # ``-00003-of-00010`` of a shard's name, Spark's ``-00003-c000``, or a number at its end.
    splits = sorted({re.sub(r"(?<=^part)-\d+.*|[-_.]?\d+([-_.]of[-_.]\d+)?$", "", file.stem) for file in files})
    if len(splits) > 1:
        raise DataError(f"dataset {path} holds files of {' and '.join(splits[:3])}: give one of them a separate folder")
    return files


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from parquet_rows(path)
    except BadParquet as error:
        raise DataError(f"dataset {error}") from error


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _jsonl_row(line, f"dataset {path}, row {number}")
    except OSError as error:
        raise DataError(f"dataset {path} cannot be read: {error.strerror}") from error


def _jsonl_row(line: bytes, where: str) -> dict[str, Any]:
    if not line.strip():
        raise DataError(f"{where}: the line is empty")
    try:
        raw = from_json_text(text_of(line), "the line")
    except BadMessages as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected an object, found {type(raw).__name__}")
    return raw


READERS = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows}


def _check_row(raw: Mapping[str, Any], where: str, path: Path) -> DatasetRow:
    """verl's extra_info gets the other columns, too; a key that it has stays. Paths of pictures are relative to the
    folder of `path`, the dataset."""
    for name in NEEDED:
        if name not in raw:
            raise DataError(f"{where}: column {name!r} is missing; found {', '.join(sorted(raw)) or 'none'}")
    if not isinstance(raw["data_source"], str) or not raw["data_source"]:
        raise DataError(f"{where}: data_source must be a name, found {raw['data_source']!r}")
    agent_name = raw.get("agent_name")
    if not (agent_name is None or isinstance(agent_name, str)):
        raise DataError(f"{where}: agent_name must be text, found {agent_name!r}")
    messages = _check_messages(raw["prompt"], where, parquet=path.suffix == ".parquet")
    if raw.get("videos"):
        raise DataError(f"{where}: column 'videos' has some, and only images are read")
    if raw.get(COLUMN) is not None:
        try:
            messages = with_pictures(messages, raw[COLUMN], path.parent)
        except BadImages as error:
            raise DataError(f"{where}: {error}") from error
    own = raw.get("extra_info") or {}
    if not isinstance(own, Mapping):
        raise DataError(f"{where}: extra_info must be a mapping, found {own!r}")
    others = {key: value for key, value in raw.items() if key not in (*NEEDED, "extra_info", "agent_name", COLUMN)}
    row = DatasetRow(
        messages=messages,
        data_source=raw["data_source"],
        ground_truth=_ground_truth(raw["reward_model"], where),
        agent_name=agent_name,
        extra_info=_check_plain({**others, **own}, f"{where}: extra_info"),
    )
    try:
        check_task(row.task("row", "train"))
    except BadPayload as error:
        raise DataError(f"{where}: {_with_column(str(error).removeprefix('task row: '))}") from error
    return row


def _ground_truth(reward_model: Any, where: str) -> Any:
    if isinstance(reward_model, str):
        raise DataError(
            f"{where}: reward_model is text, an object is needed: json.loads the column; {reward_model!r:.80}"
        )
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise DataError(f"{where}: reward_model.ground_truth is missing; found {reward_model!r}")
    truth = _check_plain(reward_model["ground_truth"], f"{where}: reward_model.ground_truth")
    if place := _place_of_nan(truth, "reward_model.ground_truth"):
        raise DataError(f"{where}: {place} is NaN, which equals no answer: an empty cell of a table?")
    return truth


def _place_of_nan(value: Any, place: str) -> str:
    """Return where NaN is in plain data, at any depth; empty if nowhere."""
    waiting = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float) and math.isnan(value):
            return place
        if isinstance(value, list):
            waiting += ((f"{place}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            waiting += ((f"{place}.{key}", item) for key, item in value.items())
    return ""


def _with_column(problem: str) -> str:
    """`problem`, which begins with a field of `Task`, with the dataset's name of it."""
    for field, column in (("messages", "prompt"), ("ground_truth", "reward_model.ground_truth")):
        if problem.startswith(field):
            return column + problem.removeprefix(field)
    return problem


def _check_messages(prompt: Any, where: str, *, parquet: bool) -> list[dict[str, Any]]:
    try:
        messages = read_messages(prompt, "prompt", parquet=parquet)
    except BadMessages as error:
        raise DataError(f"{where}: {error}") from error
    except RecursionError:
        raise DataError(f"{where}: prompt: nested too deeply") from None
    for index, message in enumerate(messages):
        if message.get("content") in ("", []) and not message.get("tool_calls"):
            raise DataError(f"{where}: prompt[{index}].content is empty, found {message!r:.80}")
        if not (message.get("content") or message.get("tool_calls")):
            raise DataError(f"{where}: prompt[{index}] must be {{'role', 'content'}}, found {message!r}")
    return messages


def _check_plain(value: Any, where: str) -> Any:
    try:
        return _plain(value, where)
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise DataError(f"{where}: {type(value).__name__} is not plain data: {value!r}")


class DataStream:
    """An endless order over `count` rows, epoch after epoch, the same after a restart.

    Where the dataset changed between restarts, the epoch continues at its index in the order of the new rows; an index
    that the epoch no longer has is the start of the next one.
    """

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        self._count = count

        @lru_cache(maxsize=2)
        def order_of(epoch: int) -> list[int]:
            order = list(range(count))
            if shuffle:
                random.Random(f"{seed}/{epoch}").shuffle(order)
            return order

        self._order = order_of

    def places(self, start: DataCursor, count: int) -> list[DataCursor]:
        """`count` places in order, the first at or after `start`."""
        places = []
        for _ in range(count):
            places.append(start := self._existing(start))
            start = self.after(start)
        return places

    def after(self, place: DataCursor) -> DataCursor:
        """The next place."""
        return self._existing(DataCursor(place.epoch, place.index + 1))

    def row_index(self, place: DataCursor) -> int:
        """Which row lies at a place that the stream has."""
        return self._order(place.epoch)[place.index]

    def _existing(self, place: DataCursor) -> DataCursor:
        return place if place.index < self._count else DataCursor(place.epoch + 1, 0)


class TaskOrder(Protocol):
    """Which training tasks come next, see `order`."""

    def begin(self, step: int) -> None:
        """Before the first task of a trainer that continues with `step`."""

    def next(self, start: DataCursor, count: int) -> tuple[list[Task], DataCursor]:
        """`count` ≥ 1 tasks from the place `start` on, and the place after them."""

    def observe(self, step: int, rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Records the rewards of a trained step, by task id. Returns numbers for the step's metrics."""


class Feeder:
    """Submits training tasks in order. Only rank 0 feeds.

    The cursor is the queue's own: tasks that were submitted once stay there over a restart of the trainer, and
    `submit(tasks, cursor)` is a no-op for a place that the queue has passed.
    """

    def __init__(self, queue: TransferQueue, limits: Limits, order: TaskOrder, steps: int) -> None:
        self._queue = queue
        self._limits = limits
        self._order = order
        self._steps = steps
        self.cursor = DataCursor()
        """Place in the data stream after the last submitted task."""

    async def start(self, step: int = 0) -> None:
        """`step`: the first that will be trained."""
        await asyncio.to_thread(self._order.begin, step)
        self.cursor = await self._queue.cursor()
        await self.fill()

    async def fill(self) -> int:
        """Submit what is missing; returns how many groups. Groups that were dropped or died are replaced here."""
        count = missing_groups(await self._queue.status(), self._limits, self._steps)
        if count > 0:
            await self._submit(*self._order.next(self.cursor, count))
        return max(count, 0)

    def observe(self, step: int, rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """See `TaskOrder.observe`."""
        return self._order.observe(step, rewards)

    async def _submit(self, tasks: Sequence[Task], end: DataCursor) -> None:
        try:
            await self._queue.submit(tasks, cursor=end, after=self.cursor)
        except StepError:
            # It has lost its newest tasks with its machine: they come first.
            self.cursor = await self._queue.cursor()
        except BadPayload as error:
            raise DataError(str(error)) from error  # a restart would submit the same
        else:
            self.cursor = end


def missing_groups(status: Status, limits: Limits, steps: int) -> int:
    """Groups to submit: (max_staleness + 2) steps ahead of consumption, never more than the run can still train."""
    # Parked groups cannot be admitted before others ship: were they counted, a backlog of a source at its quota would
    # take all the room and a step could never be filled.
    waiting = sum(status.groups.get(state, 0) for state in ("queued", "admitted", "ready")) - status.parked
    ahead = (limits.max_staleness + 2) * limits.groups_per_step
    still_needed = (steps - status.version) * limits.groups_per_step - status.groups.get("shipped", 0)
    return min(ahead, still_needed) - waiting
