"""A session of the backends that have a driver: they differ in how a box starts."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

from penstock.sandbox.frames import Box, BoxEnded, Tell
from penstock.sandbox.one_box import OneBoxSession
from penstock.sandbox.protocol import Output, RunResult, SandboxError, SandboxLost
from penstock.sandbox.streaming import stream_of

GRACE_S = 5.0
"""How much longer than a run's own limit the driver may take; past it the box is ended from outside."""
FILE_DEADLINE_S = 20.0
MAX_FILE_BYTES = 32 << 20


class DriverSession(OneBoxSession[Box]):
    """Every call is a request to the driver in the box."""

    async def run(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> RunResult:
        return await self._run({"do": "run", "argv": argv, "stdin": stdin, "cwd": cwd}, timeout_s)

    def stream(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Output]:
        command = {"do": "run", "argv": argv, "stdin": stdin, "cwd": cwd, "tell": True}
        return stream_of(lambda tell: self._run(command, timeout_s, tell))

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        return await self._run({"do": "python", "code": code}, timeout_s)

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        if "\0" in command:
            return RunResult("", "the command holds a NUL character\n", 1)
        return await self._run({"do": "shell", "command": command}, timeout_s)

    async def write_file(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise OSError(27, f"more than {MAX_FILE_BYTES} bytes in one file", path)
        await self._file({"do": "write", "path": path, "data": base64.b64encode(data).decode("ascii")})

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        answer = await self._file({"do": "read", "path": path, "max_bytes": min(max_bytes, MAX_FILE_BYTES)})
        return base64.b64decode(answer["data"])

    async def _run(self, command: dict[str, Any], timeout_s: float | None, tell: Tell | None = None) -> RunResult:
        limit_s = self._config.run_timeout_s if timeout_s is None else timeout_s
        async with self._turn:
            box = await self._living_box()
            self._losses.began(command["do"])
            result = await self._result(box, {**command, "timeout_s": limit_s}, limit_s, tell)
            return self._losses.told(command["do"], result)

    async def _result(self, box: Box, command: dict[str, Any], limit_s: float, tell: Tell | None) -> RunResult:
        try:
            answer = await self._request(box, command, limit_s + GRACE_S, tell)
        except TimeoutError:
            return RunResult("", "", None, limit="wall", duration_s=limit_s)
        except BoxEnded as error:
            if box.new_oom_kills() > 0:
                return RunResult("", "", None, limit="memory")
            await self.close()  # from inside, nothing but lack of memory can end the driver
            raise SandboxLost(f"the box of session {self.session_id} ended during a run: {error}") from error
        if "errno" in answer:  # no process, descriptor or memory left in the box
            return RunResult("", f"the sandbox has no room for another process: {answer['error']}\n", 1)
        return _to_result(answer, out_of_memory=box.new_oom_kills() > 0)

    async def _file(self, command: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            try:
                answer = await self._request(await self._living_box(), command, FILE_DEADLINE_S)
            except TimeoutError as error:
                raise SandboxError(f"no answer to a file command in {FILE_DEADLINE_S:.0f} s") from error
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"], command["path"])
        return answer

    async def _request(
        self, box: Box, command: dict[str, Any], deadline_s: float, tell: Tell | None = None
    ) -> dict[str, Any]:
        """Any ending but an answer ends the box: its next answer could be the one to this request."""
        try:
            return await box.request(command, deadline_s, tell)
        except BaseException:
            await self._end_box()
            raise


def _to_result(answer: dict[str, Any], out_of_memory: bool) -> RunResult:
    killed = answer["exit_code"] is None or answer["exit_code"] < 0
    return RunResult(
        stdout=answer["stdout"],
        stderr=answer["stderr"],
        exit_code=None if out_of_memory and killed else answer["exit_code"],
        limit="memory" if out_of_memory else answer["limit"],
        duration_s=answer["duration_s"],
        state_lost=answer["state_lost"],
    )
