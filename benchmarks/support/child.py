"""A Python module as a separate process that answers questions: one JSON line in, one JSON line out.

    benchmark ── {"do": …} ──► stdin   child
              ◄── {…} ───────── stdout      (what it prints goes to stderr)

The child ends when its stdin does, so it outlives no benchmark, however that one dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
LINE_LIMIT = 64 << 20
STOP_S = 90.0


def stop_run(process: subprocess.Popen[bytes]) -> None:
    """End a `penstock` command and wait for it. It stops what it started; if it is killed, the kernel does."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ChildError(Exception):
    """The child ended or refused; the message ends with its last words."""


class Child:
    """The benchmark's end. `start` returns once the process runs; `stop` ends it and its process group."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes], name: str) -> None:
        self._process = process
        self._log = log
        self._name = name

    @classmethod
    async def module(cls, name: str, *arguments: str, env: Mapping[str, str]) -> Child:
        """A module of this repository, in this environment. `env` is added to this process's."""
        paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return await cls.start(
            sys.executable, "-m", name, *arguments, env={"PYTHONPATH": os.pathsep.join(paths), **env}
        )

    @classmethod
    async def start(cls, *command: str, env: Mapping[str, str], cwd: Path | None = None) -> Child:
        log = tempfile.TemporaryFile(prefix="penstock-bench-")  # noqa: SIM115 - `stop` closes it
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **env},
            cwd=cwd,
            start_new_session=True,
            limit=LINE_LIMIT,
        )
        return cls(process, log, " ".join(command[1:]))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, question: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Raises `ChildError` where no answer comes within `timeout_s`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except (TimeoutError, OSError) as error:
            raise ChildError(f"{self._name}: no answer to {question}: {error!r}{self._last_words()}") from error
        if not line:
            raise ChildError(f"{self._name} ended over {question}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def tell(self, what: Mapping[str, Any]) -> None:
        """A line that nobody answers, to a child that reads on while it works."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        await self._process.stdin.drain()

    async def stop(self, timeout_s: float = 60.0) -> None:
        """Close its stdin, wait, and kill what is left of its process group. Twice is harmless."""
        if self._log.closed:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        finally:
            with suppress(ProcessLookupError):  # nobody of its group is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "".join(f"\n    {line}" for line in lines[-15:])


def own_stdout() -> IO[str]:
    """The child's first act: what it prints, and what its children inherit, is stderr from now on.

    Else the benchmark would wait for a dead child's answer for as long as a child of that one holds the pipe.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def answer_questions(replies: IO[str], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's end: answer until stdin ends."""
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
