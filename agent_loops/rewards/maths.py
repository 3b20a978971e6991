r"""Mathematical answers, compared by the library math-verify: ``0.5``, ``1/2`` and ``\frac{1}{2}`` are one answer.

The library runs in separate processes. Its own time limits are signals, which fail outside a main thread; here the
operating system ends a process that uses too much CPU time or memory. The answer caused that, not the machine: it is
wrong, and counted. A process that is late or ends for another reason is a failure.

ask ──► an idle process, or a new one ──line──► answer in time ──► idle again
                                                no answer, cancelled, process gone ──► killed
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import signal
import sys
from collections.abc import Mapping
from typing import Any

from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.rewards.base import Answer, BaseReward, Value
from penstock.common import environment_without_secrets
from penstock.sandbox import Sandbox

TAIL_CHARS = 4000
"""The answer is looked for in the last part of the text."""
WALL_DEADLINE_S = 50.0
"""Under the CPU limit a process answers or dies by itself; past this the machine is not well."""
PROGRAM = "penstock.agent_loops.rewards.maths_process"
END_DEADLINE_S = 5.0
MAX_ANSWER_BYTES = 1 << 20


class Maths(BaseReward):
    """`right` or `wrong`; metrics `unreadable` (no answer was found) and `too_costly`."""

    journaled = False

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        right: float = 1.0,
        wrong: float = 0.0,
        processes: int = 2,
        cpu_s: float = 5.0,
        memory_mb: int = 2048,
    ) -> None:
        """Raises `ValueError` where math-verify is not installed.

        Args:
            processes: graders of this worker; each holds about 90 MB.
            cpu_s: of one answer, rounded up to whole seconds.
            memory_mb: address space of a grader.
        """
        super().__init__(sandbox)
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("it needs the package math-verify: pip install 'penstock[math]'")
        self._right, self._wrong = right, wrong
        self._graders = LineProcesses(PROGRAM, (str(math.ceil(cpu_s)), str(memory_mb)), processes)

    async def score(self, answer: Answer) -> Value:
        question = {"reference": str(answer.ground_truth), "solution": answer.solution[-TAIL_CHARS:]}
        try:
            verdict = await self._graders.ask(question, WALL_DEADLINE_S)
        except ProcessEnded as error:
            if error.code != -signal.SIGXCPU:
                raise InfraFailure("reward", f"maths: a grader ended with {error.code}") from error
            verdict = {"too_costly": True}
        if verdict.get("bad_reference"):
            raise InfraFailure("reward", f"maths: no answer in the ground truth {str(answer.ground_truth)[:200]!r}")
        unreadable, costly = float(verdict.get("unreadable", False)), float(verdict.get("too_costly", False))
        score = self._right if verdict.get("equal") else self._wrong
        return {"score": score, "unreadable": unreadable, "too_costly": costly}

    async def close(self) -> None:
        await self._graders.close()


class ProcessEnded(Exception):
    """The process died over the question; a negative `code` is the signal that ended it."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the process ended with {code}")
        self.code = code


class LineProcesses:
    """At most `count` processes of ``python -m module``, started on demand; JSON line in, JSON line out."""

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
        """A live idle process; dead ones are dropped: the next question did not end them."""
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        return None

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=nowhere,
            limit=MAX_ANSWER_BYTES,
            env=environment_without_secrets(),
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
