"""Sessions: one box each, restarted after a run that brought it down, and an account of the state lost with it.

    DriverSession / ExecSession ─► OneBoxSession (turn, start, end) ─► box
                                        └─ StateLoss (reported once, in the next result)

`OneBoxSession` is common to all backends; `DriverSession` serves those that have a driver in the box. `put_folder` and
`get_folder` work on any session.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from penstock.common import cancel_and_wait
from penstock.sandbox.box import Box, BoxEnded, OnOutput
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import Accept, Output, RunResult, SandboxError, SandboxLost, Session


class StateLoss:
    """One session's account. The driver reports what is lost inside a living box; this, what was lost with a box."""

    def __init__(self) -> None:
        self._in_use: set[str] = set()
        """Kinds of calls that may have left state in the box that lives now."""
        self._unreported: set[str] = set()
        self._files = False

    def record_start(self, kind: str) -> None:
        self._in_use |= {"python", "shell"} & {kind}

    def record_end(self) -> None:
        self._unreported |= self._in_use
        self._in_use.clear()
        self._files = True

    def report(self, kind: str, result: RunResult) -> RunResult:
        """`result` of a call of `kind`, completed with the losses not reported yet."""
        lost = result.state_lost or self._files or kind in self._unreported
        report = replace(result, state_lost=lost, files_lost=self._files)
        self._unreported.discard(kind)
        self._files = False
        return report


async def stream_of(call: Callable[[OnOutput], Awaitable[RunResult]]) -> AsyncIterator[Output]:
    """Pieces of output from `call`, its result last. The queue between is bounded by what a run may write."""
    pieces: asyncio.Queue[Output | None] = asyncio.Queue()

    def on_output(stream: str, text: str) -> None:
        pieces.put_nowait(Output("stderr" if stream == "stderr" else "stdout", text))

    task = asyncio.ensure_future(call(on_output))
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        yield Output("stdout", "", await task)
    finally:
        await cancel_and_wait([task])  # the reader left early


class Endable(Protocol):
    @property
    def alive(self) -> bool: ...

    async def end(self) -> None:
        """Everything in the box is gone afterwards."""


B = TypeVar("B", bound=Endable)
T = TypeVar("T")


class OneBoxSession(Generic[B]):
    """Calls queue up in `_turn`: one runs at a time."""

    def __init__(
        self,
        session_id: str,
        config: SandboxConfig,
        box: B,
        launch: Callable[[], Awaitable[B]],
        on_closed: Callable[[], None],
    ) -> None:
        self.session_id = session_id
        self._config = config
        self._launch = launch
        self._on_closed = on_closed
        self._box: B | None = box
        self._state_loss = StateLoss()
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def hold(self, work: Callable[[B], Awaitable[T]]) -> T:
        """Returns the result of `work` on the living box, between two calls. Raises `SandboxError` too."""
        async with self._turn:
            return await work(await self._living_box())

    async def leave(self) -> None:
        """Closes the box, which cannot outlive this process."""
        await self.close()

    async def close(self) -> None:
        """Completes also where the caller is cancelled: `on_closed` gives the box's slot to the next one."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        """Waits for a box that is starting: it would otherwise appear after the end, in a slot reused by then."""
        try:
            if self._starting is not None:
                await asyncio.wait([self._starting])
            await self._end_box()
        finally:
            self._on_closed()

    async def _living_box(self) -> B:
        if self._closing is not None:
            raise SandboxLost(f"session {self.session_id} is closed")
        if self._box is None:
            if self._ending is not None:
                await asyncio.shield(self._ending)  # the new box takes over its slot
            self._starting = asyncio.create_task(self._start())
            try:
                await self._starting
            finally:
                self._starting = None
        if self._closing is not None:
            raise SandboxLost(f"session {self.session_id} is closed")
        assert self._box is not None
        if not self._box.alive:
            await self.close()
            raise SandboxLost(f"the box of session {self.session_id} ended between two calls")
        return self._box

    async def _start(self) -> None:
        """Start in a separate task, so that `close` can wait for it; the launch has its own deadlines."""
        self._box = await self._launch()

    async def _end_box(self) -> None:
        if self._box is not None:
            self._state_loss.record_end()
            self._ending = asyncio.create_task(self._box.end())
            self._box = None
        if self._ending is not None:
            await asyncio.shield(self._ending)


GRACE_S = 30.0
"""Time that the driver may take beyond a run's limit; then the box is ended from outside."""
FILE_DEADLINE_S = 20.0
MAX_FILE_BYTES = 32 << 20
Served = tuple[Accept, asyncio.Event | None]
"""The taker of a served run's connections, and the event that stops the run."""


class DriverSession(OneBoxSession[Box]):
    """Every call is a request to the driver in the box."""

    async def run(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> RunResult:
        return await self._run({"do": "run", "argv": argv, "stdin": stdin, "cwd": cwd}, timeout_s)

    def stream(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Output]:
        command = {"do": "run", "argv": argv, "stdin": stdin, "cwd": cwd, "stream": True}
        return stream_of(lambda on_output: self._run(command, timeout_s, on_output))

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        return await self._run({"do": "python", "code": code}, timeout_s)

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        if "\0" in command:
            return RunResult("", "the command holds a NUL character\n", 1)
        return await self._run({"do": "shell", "command": command}, timeout_s)

    async def open_port(self) -> int:
        async with self._turn:
            box = await self._living_box()
            try:
                answer = await self._request(box, {"do": "listen"}, FILE_DEADLINE_S)
            except TimeoutError as error:
                raise SandboxError(f"the box opened no port in {FILE_DEADLINE_S:.0f} s") from error
            if "errno" in answer:
                raise SandboxError(f"the box can open no port: {answer['error']}")
            box.port = int(answer["port"])
            return box.port

    async def run_served(
        self,
        argv: list[str],
        accept: Accept,
        *,
        stop: asyncio.Event | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
        cwd: str | None = None,
    ) -> RunResult:
        command = {"do": "run", "argv": argv, "stdin": stdin, "cwd": cwd, "serve": True}
        return await self._run(command, timeout_s, served=(accept, stop))

    async def write_file(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"more than {MAX_FILE_BYTES} bytes in one file", path)
        await self._file({"do": "write", "path": path, "data": base64.b64encode(data).decode("ascii")})

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        answer = await self._file({"do": "read", "path": path, "max_bytes": min(max_bytes, MAX_FILE_BYTES)})
        return base64.b64decode(answer["data"])

    async def _run(
        self,
        command: dict[str, Any],
        timeout_s: float | None,
        on_output: OnOutput | None = None,
        served: Served | None = None,
    ) -> RunResult:
        limit_s = self._config.run_timeout_s if timeout_s is None else timeout_s
        async with self._turn:
            box = await self._living_box()
            if served is not None and box.port is None:
                raise SandboxError("no port is open in this box: `open_port` opens one, and a new box needs another")
            self._state_loss.record_start(command["do"])
            result = await self._result(box, {**command, "timeout_s": limit_s}, on_output, served)
            return self._state_loss.report(command["do"], result)

    async def _result(
        self, box: Box, command: dict[str, Any], on_output: OnOutput | None, served: Served | None
    ) -> RunResult:
        limit_s = command["timeout_s"]
        try:
            answer = await self._request(box, command, limit_s + GRACE_S, on_output, served)
        except TimeoutError:
            return RunResult("", "", None, limit="wall", duration_s=limit_s)
        except BoxEnded as error:
            if box.broken_limit is not None:
                return RunResult("", "", None, limit=box.broken_limit)
            if box.new_oom_kills() > 0:
                return RunResult("", "", None, limit="memory")
            await self.close()  # from inside, nothing else can end the driver
            raise SandboxLost(f"the box of session {self.session_id} ended during a run: {error}") from error
        if "errno" in answer:  # no process, descriptor or memory left in the box
            return RunResult("", f"the sandbox has no room for another process: {answer['error']}\n", 1)
        if answer.get("box_full"):  # files leave no room for a program: every later call would end at once
            await self._end_box()
        return _to_result(answer, out_of_memory=box.new_oom_kills() > 0)

    async def _file(self, command: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            box = await self._living_box()
            try:
                answer = await self._request(box, command, FILE_DEADLINE_S)
            except TimeoutError as error:
                raise SandboxError(f"no answer to a file command in {FILE_DEADLINE_S:.0f} s") from error
            except BoxEnded as error:
                if box.broken_limit is None:
                    raise
                raise OSError(
                    errno.EIO, f"the box was ended by its code ({box.broken_limit})", command["path"]
                ) from error
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"], command["path"])
        return answer

    async def _request(
        self,
        box: Box,
        command: dict[str, Any],
        deadline_s: float,
        on_output: OnOutput | None = None,
        served: Served | None = None,
    ) -> dict[str, Any]:
        """Any ending but an answer ends the box: its next answer could be the one to this request."""
        try:
            if served is not None:
                return await box.request_served(command, deadline_s, *served)
            return await box.request(command, deadline_s, on_output)
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


TIMEOUT_S = 60.0


async def put_folder(session: Session, path: str, tar: bytes) -> None:
    """Unpack `tar` (GNU tar takes it compressed too) into the folder `path`, which is made if it is missing.

    Unpacked inside the box: a name with ``..`` leads only where the box's own code could go. Raises `OSError` if it
    does not unpack or is too large, and `SandboxError`.
    """
    async with _archive(session) as archive:
        await session.write_file(archive, tar)
        await _run_script(session, 'mkdir -p -- "$2" && tar -x -f "$1" -C "$2"', archive, path)


async def get_folder(session: Session, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The folder `path` as a tar without compression, names relative to it.

    Untrusted code wrote it: unpack it with ``tarfile``'s ``filter="data"``.
    Raises `OSError` if the folder is missing or its tar is longer than `max_bytes`, and `SandboxError`.
    """
    async with _archive(session) as archive:
        await _run_script(session, 'tar -c -f "$1" -C "$2" --exclude="./$1" .', archive, path)
        data = await session.read_file(archive, max_bytes)
    if len(data) == max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes as a tar", path)
    return data


@contextlib.asynccontextmanager
async def _archive(session: Session) -> AsyncIterator[str]:
    """The name of a file in the box, which is removed at the end."""
    archive = f".penstock-{secrets.token_hex(8)}.tar"
    try:
        yield archive
    finally:
        await session.run(["rm", "-f", "--", archive], timeout_s=TIMEOUT_S)


async def _run_script(session: Session, script: str, archive: str, path: str) -> None:
    result = await session.run(["sh", "-c", script, "sh", archive, path], timeout_s=TIMEOUT_S)
    if result.exit_code == 0:
        return
    words = result.stderr.strip().splitlines()
    reason = words[-1] if words else f"stopped ({result.limit})" if result.limit else f"exit {result.exit_code}"
    code = (
        errno.ENOENT if "No such file" in result.stderr or "can't change directory" in result.stderr else errno.EINVAL
    )
    raise OSError(code, reason, path)
