"""Programs of ours that answer a JSON line with a JSON line: for work that may hang, or needs a main thread.

ask ──► an idle process, or a new one ──line──► answer in time ──► idle again
                                                no answer, cancelled, process gone ──► killed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

END_DEADLINE_S = 5.0
MAX_ANSWER_BYTES = 1 << 20


class ProcessEnded(Exception):
    """The process died over the question; a negative `code` is the signal that ended it."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the process ended with {code}")
        self.code = code


class LineProcesses:
    """Owner of at most `count` processes of ``python -m module``, started at need. `close` ends them."""

    def __init__(self, module: str, arguments: tuple[str, ...], count: int) -> None:
        self._command = (sys.executable, "-m", module, *arguments)
        self._turns = asyncio.Semaphore(count)
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(self, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises `ProcessEnded`, and `TimeoutError` where no answer came `timeout_s` after its turn did."""
        async with self._turns:
            process = self._take_idle() or await self._start()
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await _exchange(process, question)
            except BaseException:
                # Its next line could be the answer to this question.
                await _end(process)
                raise
            self._idle.append(process)
            return answer

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    def _take_idle(self) -> asyncio.subprocess.Process | None:
        """One that lives: what ended an idle one was not the next question."""
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        return None

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=nowhere, limit=MAX_ANSWER_BYTES
        )


async def _exchange(process: asyncio.subprocess.Process, question: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):  # it is gone: the empty line says so, and its exit code why
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise ProcessEnded(await process.wait())
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    async with asyncio.timeout(END_DEADLINE_S):
        await process.wait()
