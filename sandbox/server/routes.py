"""Routes of sessions: open, show, end; run code in the box; files and folders in both directions.

Streamed runs belong to their session; the HTTP response only listens:

    session.stream ─► task of the relay (to the end of the run) ─► queue ─► lines of the response (may be cut off)

A reader that disconnects does not stop the run: the next one to attach finds the session as if `run` had been called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse

from penstock.common import cancel_and_wait
from penstock.sandbox.config import DEFAULT_IMAGE, SandboxConfig
from penstock.sandbox.idempotency import HEADER
from penstock.sandbox.managed import follow_costs
from penstock.sandbox.protocol import Output, RunResult, Sandbox, SandboxError, SandboxLost, Session
from penstock.sandbox.server.callers import Caller, Quotas
from penstock.sandbox.server.metrics import SandboxMetrics
from penstock.sandbox.server.pool import BoxPool
from penstock.sandbox.server.sessions import SessionEntry, SessionRequest, Sessions
from penstock.sandbox.server.views import (
    BYTES_IN,
    BYTES_OUT,
    NDJSON,
    Ended,
    RunPythonRequest,
    RunRequest,
    RunShellRequest,
    SessionView,
    StartRequest,
    StreamedOutput,
    StreamEnd,
    StreamError,
)
from penstock.sandbox.session import MAX_FILE_BYTES, get_folder, put_folder

T = TypeVar("T")
Lines = asyncio.Queue[bytes | None]


class Relays:
    """The runs in progress; `stop` cancels them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        await cancel_and_wait(self._tasks)

    async def open(self, run: Callable[[Lines], Awaitable[None]]) -> AsyncIterator[bytes]:
        """Yields the JSON lines of `run`.

        Raises what `run` raises before its first line: the response has no status yet and can still be a refusal.
        """
        lines: Lines = asyncio.Queue()
        task = asyncio.ensure_future(run(lines))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(task, lines))
        first = await lines.get()
        if first is None:
            await task
        return _all(first, lines)

    def _ended(self, task: asyncio.Task[None], lines: Lines) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # reported by its last line, or raised by `open`
        lines.put_nowait(None)


@dataclass(frozen=True, slots=True)
class ServerState:
    config: SandboxConfig
    sandbox: Sandbox
    pool: BoxPool
    quotas: Quotas
    sessions: Sessions
    metrics: SandboxMetrics
    relays: Relays = field(default_factory=Relays)

    @classmethod
    def of(cls, sandbox: Sandbox, config: SandboxConfig) -> ServerState:
        targets = {None if image == DEFAULT_IMAGE else image: n for image, n in config.server.warm.items()}
        pool, quotas, metrics = BoxPool(sandbox, config.max_boxes, targets), Quotas(), SandboxMetrics()
        follow_costs(sandbox, metrics.costs)
        return cls(config, sandbox, pool, quotas, Sessions(pool, quotas, metrics), metrics)

    def usual_image(self, image: str | None) -> str | None:
        """None where `image` is the default one, by whatever name: one warm pool serves both."""
        own = self.config.image if self.config.backend == "docker" else "host"  # bwrap: the machine's own system
        return None if image in (DEFAULT_IMAGE, own) else image

    async def stop(self) -> None:
        """Every box is gone afterwards."""
        await self.relays.stop()
        await self.sessions.end_all()
        await self.pool.stop()
        await self.sandbox.close()

    def measure(self) -> None:
        """Bring the gauges up to now."""
        self.metrics.boxes.labels("given_out").set(len(self.sessions.entries))
        self.metrics.boxes.labels("warm").set(self.pool.warm)
        self.metrics.waiting.set(self.pool.slots.waiting)
        self.metrics.count_boxes(self.pool.counts)


async def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


router = APIRouter()


async def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


ThisServer = Annotated[ServerState, Depends(state_of)]
ThisCaller = Annotated[Caller, Depends(caller_of)]


async def entry_of(session_id: str, server: ThisServer, caller: ThisCaller) -> SessionEntry:
    return server.sessions.get(session_id, caller)


ThisSession = Annotated[SessionEntry, Depends(entry_of)]
Key = Annotated[
    str | None,
    Header(
        alias=HEADER,
        min_length=8,
        max_length=128,
        description="A request with a key that was used before returns the first result; it is not carried out again.",
    ),
]
LabelStart = Annotated[str, Query(max_length=256, description="Only sessions whose label has this prefix.")]


@router.post("/sessions", response_model=SessionView)
async def start(
    body: StartRequest, request: Request, server: ThisServer, caller: ThisCaller, key: Key = None
) -> SessionView:
    """Open a session: a warm box of that image, a fresh one, or one that another session gives back."""
    longest_s = server.config.server.queue_timeout_s
    wait_s = longest_s if body.wait_s is None else min(body.wait_s, longest_s)
    needs = body.needs.to_needs() if body.needs is not None else None
    session_request = SessionRequest(caller, body.label, server.usual_image(body.image), body.ttl_s, needs)
    with server.metrics.call("start"):
        entry = await server.sessions.start(session_request, wait_s, key)
    if (
        key is None and await request.is_disconnected()
    ):  # its id is unknown to any client; under a key it can be requested again
        await server.sessions.end(entry)
    return _view(entry)


@router.get("/sessions", response_model=list[SessionView])
async def list_sessions(server: ThisServer, caller: ThisCaller, label: LabelStart = "") -> list[SessionView]:
    """This caller's sessions."""
    return [_view(entry) for entry in server.sessions.of(caller, label)]


@router.delete("/sessions", response_model=Ended)
async def end_sessions(server: ThisServer, caller: ThisCaller, label: LabelStart) -> Ended:
    """End all of this caller's sessions whose label has this prefix, for example those left by a finished run."""
    entries = server.sessions.of(caller, label)
    for entry in entries:
        await server.sessions.end(entry)
    return Ended(ended=len(entries))


@router.get("/sessions/{session_id}", response_model=SessionView)
async def show(entry: ThisSession) -> SessionView:
    """Return the session's state. This counts as a use: the time without use starts anew."""
    entry.touch()
    return _view(entry)


@router.delete("/sessions/{session_id}", status_code=204)
async def end(session_id: str, server: ThisServer, caller: ThisCaller) -> None:
    """End the box and everything in it. A session that is gone already is not an error."""
    entry = server.sessions.entries.get(session_id)
    if entry is not None and entry.caller is caller:
        await server.sessions.end(entry)


def _view(entry: SessionEntry) -> SessionView:
    return SessionView(
        session_id=entry.session.session_id,
        label=entry.label,
        image=entry.image,
        ttl_s=entry.ttl_s,
        idle_s=entry.idle_s,
        age_s=entry.age_s,
    )


work_router = APIRouter(prefix="/sessions/{session_id}")
BoxPath = Annotated[str, Query(min_length=1, max_length=4096, description="In the box; relative to its /tmp.")]
MaxBytes = Annotated[int, Query(ge=0, le=MAX_FILE_BYTES)]


@dataclass(frozen=True, slots=True)
class SessionTarget:
    """The session of a request, and the request's key if it has one."""

    server: ServerState
    entry: SessionEntry
    key: str | None

    async def call(self, verb: str, work: Callable[[Session], Awaitable[RunResult]]) -> RunResult:
        with self.server.metrics.call(verb) as outcome:
            return outcome.note(await self.use(work))

    async def use(self, work: Callable[[Session], Awaitable[T]]) -> T:
        return await self.server.sessions.use(self.entry, self.key, work)


async def target_of(server: ThisServer, entry: ThisSession, key: Key = None) -> SessionTarget:
    return SessionTarget(server, entry, key)


ThisTarget = Annotated[SessionTarget, Depends(target_of)]


@work_router.post("/run", response_model=RunResult)
async def run(body: RunRequest, target: ThisTarget) -> RunResult:
    """Run a program to its end."""

    async def work(session: Session) -> RunResult:
        return await session.run(body.argv, stdin=body.stdin, timeout_s=body.timeout_s, cwd=body.cwd)

    return await target.call("run", work)


@work_router.post("/run_python", response_model=RunResult)
async def run_python(body: RunPythonRequest, target: ThisTarget) -> RunResult:
    """Run code in the session's interpreter, whose names persist from call to call."""
    return await target.call("python", lambda it: it.run_python(body.code, timeout_s=body.timeout_s))


@work_router.post("/run_shell", response_model=RunResult)
async def run_shell(body: RunShellRequest, target: ThisTarget) -> RunResult:
    """Run a command in the session's shell: directory, variables and functions live on from call to call."""
    return await target.call("shell", lambda it: it.run_shell(body.command, timeout_s=body.timeout_s))


@work_router.post("/stream", responses=NDJSON, response_class=StreamingResponse)
async def stream(body: RunRequest, server: ThisServer, entry: ThisSession) -> StreamingResponse:
    """`run`, streamed line by line. A reader that disconnects does not stop it."""

    async def work(lines: Lines) -> None:
        with server.metrics.call("stream"):
            async with server.sessions.using(entry):
                output = entry.session.stream(body.argv, stdin=body.stdin, timeout_s=body.timeout_s, cwd=body.cwd)
                await relay(output, lines)

    return StreamingResponse(await server.relays.open(work), media_type="application/x-ndjson")


@work_router.put("/files", status_code=204, openapi_extra=BYTES_IN)
async def write_file(path: BoxPath, request: Request, target: ThisTarget) -> None:
    """Replace or make a file."""
    data = await _body(request)
    await target.use(lambda session: session.write_file(path, data))


@work_router.get("/files", responses=BYTES_OUT, response_class=Response)
async def read_file(path: BoxPath, target: ThisTarget, max_bytes: MaxBytes = 1 << 20) -> Response:
    """At most the first `max_bytes` of a regular file."""
    data = await target.use(lambda session: session.read_file(path, max_bytes))
    return Response(data, media_type="application/octet-stream")


@work_router.put("/folder", status_code=204, openapi_extra=BYTES_IN)
async def write_folder(path: BoxPath, request: Request, target: ThisTarget) -> None:
    """Unpack a tar into a folder of the box."""
    data = await _body(request)
    await target.use(lambda session: put_folder(session, path, data))


@work_router.get("/folder", responses=BYTES_OUT, response_class=Response)
async def read_folder(path: BoxPath, target: ThisTarget, max_bytes: MaxBytes = MAX_FILE_BYTES) -> Response:
    """A folder of the box as a tar; one that is longer than `max_bytes` is an error."""
    data = await target.use(lambda session: get_folder(session, path, max_bytes))
    return Response(data, media_type="application/octet-stream")


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_FILE_BYTES:
            raise HTTPException(413, f"more than {MAX_FILE_BYTES} bytes in one file")
    return bytes(data)


async def _all(first: bytes | None, lines: Lines) -> AsyncIterator[bytes]:
    line = first
    while line is not None:
        yield line
        line = await lines.get()


async def relay(stream: AsyncIterator[Output], lines: Lines) -> None:
    """Writes one line per piece; the last has the result, or the failure of the sandbox, which is raised too."""
    begun = False
    try:
        async for piece in stream:
            lines.put_nowait(_line(piece))
            begun = True
    except SandboxError as error:
        if begun:
            failure = StreamError(message=str(error), lost=isinstance(error, SandboxLost))
            lines.put_nowait(StreamEnd(error=failure).model_dump_json(exclude_none=True).encode() + b"\n")
        raise


def _line(piece: Output) -> bytes:
    if piece.result is not None:
        return StreamEnd(result=piece.result).model_dump_json(exclude={"error"}).encode() + b"\n"
    return StreamedOutput(stream=piece.stream, data=piece.data).model_dump_json().encode() + b"\n"
