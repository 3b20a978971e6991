"""Scores concurrent requests together, in batches.

submit ──► queue ──► collect: `max_rows` or `max_tokens`, at most `wait_s` after the first ──► score ──► futures
              └── past its deadline: dropped unscored
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Sized)
T = TypeVar("T")
CLOSE_DEADLINE_S = 10.0


class Busy(Exception):
    """The queue is full; no row was taken."""


class Late(Exception):
    """The deadline passed before the row was scored."""


@dataclass(eq=False)
class _Waiting:
    row: Any
    deadline: float
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batcher(Generic[R, T]):
    """Rows in, such as token ids, a `T` for each out. The length of a row is its number of tokens.

    `start`, then `submit` from any number of tasks, then `close`, which fails waiting rows with `Late`.
    """

    def __init__(
        self,
        score: Callable[[Sequence[R]], list[T]],
        *,
        max_rows: int = 32,
        max_tokens: int = 16384,
        wait_s: float = 0.01,
        max_waiting: int = 4096,
    ) -> None:
        """`max_tokens` bounds a batch after padding (rows times the longest); a longer row is a batch by itself."""
        self._score = score
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._wait_s, self._max_waiting = wait_s, max_waiting
        self._queue: deque[_Waiting] = deque()
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "classifier")
        self._task: asyncio.Task[None] | None = None
        self.batches = 0
        self.rows = 0

    def __len__(self) -> int:
        """Rows that wait."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="reward batches")

    async def submit(self, rows: Sequence[R], timeout_s: float) -> list[T]:
        """A score per row, in order. Raises `Busy`, `Late`, or the error of `score`."""
        if len(self._queue) + len(rows) > self._max_waiting:
            raise Busy(f"{len(self._queue)} answers wait already")
        deadline = time.monotonic() + timeout_s
        waiting = [_Waiting(row, deadline) for row in rows]
        self._queue.extend(waiting)
        self._came.set()
        try:
            async with asyncio.timeout(timeout_s):
                ended = await asyncio.gather(*(one.done for one in waiting), return_exceptions=True)
        except TimeoutError as error:
            raise Late(f"not scored within {timeout_s:g} s") from error
        finally:
            for one in waiting:
                one.done.cancel()
        scores: list[T] = [score for score in ended if not isinstance(score, BaseException)]
        if len(scores) < len(ended):
            raise next(error for error in ended if isinstance(error, BaseException))
        return scores

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._queue:
            _fail(self._queue.popleft(), Late("the server is ending"))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            if len(self._queue) < self._max_rows:
                await asyncio.sleep(self._wait_s)
            batch = self._collect()
            if batch:
                await self._score_batch(batch)
            if not self._queue:
                self._came.clear()

    def _collect(self) -> list[_Waiting]:
        """The next rows, in order, as many as fit, without those past their deadlines or cancelled."""
        batch: list[_Waiting] = []
        longest = 0
        while self._queue and len(batch) < self._max_rows:
            head = self._queue[0]
            if head.done.done() or head.deadline < time.monotonic():
                _fail(self._queue.popleft(), Late("not scored in time"))
                continue
            longest = max(longest, len(head.row))
            if batch and longest * (len(batch) + 1) > self._max_tokens:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _score_batch(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(self._thread, self._score, [one.row for one in batch])
            if len(scores) != len(batch):
                raise ValueError(f"the model gave {len(scores)} scores for {len(batch)} rows")
            for one, score in zip(batch, scores, strict=True):
                if not one.done.done():
                    one.done.set_result(score)
        except asyncio.CancelledError:
            for one in batch:
                _fail(one, Late("the server is ending"))
            raise
        except Exception as error:  # noqa: BLE001 - goes to the callers; the next batch may succeed
            for one in batch:
                _fail(one, error)
        finally:
            self.batches += 1
            self.rows += len(batch)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)
