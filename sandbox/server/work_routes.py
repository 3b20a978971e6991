"""Routes that work in a session's box: code in, output out; files and folders both ways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse

from penstock.sandbox.folders import get_folder, put_folder
from penstock.sandbox.protocol import RunResult, Session
from penstock.sandbox.server.openapi import BYTES_IN, BYTES_OUT, NDJSON
from penstock.sandbox.server.parts import Parts
from penstock.sandbox.server.relay import Lines, relay
from penstock.sandbox.server.session_routes import Key, ThisServer, ThisSession
from penstock.sandbox.server.sessions import Entry
from penstock.sandbox.server.views import RunPythonRequest, RunRequest, RunShellRequest
from penstock.sandbox.session import MAX_FILE_BYTES

router = APIRouter(prefix="/sessions/{session_id}")
T = TypeVar("T")
BoxPath = Annotated[str, Query(min_length=1, max_length=4096, description="In the box; relative to its /tmp.")]
MaxBytes = Annotated[int, Query(ge=0, le=MAX_FILE_BYTES)]


@dataclass(frozen=True, slots=True)
class Target:
    """The session of a request, and the request's key where it has one."""

    server: Parts
    entry: Entry
    key: str | None

    async def call(self, verb: str, work: Callable[[Session], Awaitable[RunResult]]) -> RunResult:
        with self.server.metrics.call(verb) as outcome:
            return outcome.note(await self.use(work))

    async def use(self, work: Callable[[Session], Awaitable[T]]) -> T:
        return await self.server.sessions.use(self.entry, self.key, work)


async def target_of(server: ThisServer, entry: ThisSession, key: Key = None) -> Target:
    return Target(server, entry, key)


ThisTarget = Annotated[Target, Depends(target_of)]


@router.post("/run", response_model=RunResult)
async def run(body: RunRequest, target: ThisTarget) -> RunResult:
    """Run a program to its end."""

    async def work(session: Session) -> RunResult:
        return await session.run(body.argv, stdin=body.stdin, timeout_s=body.timeout_s, cwd=body.cwd)

    return await target.call("run", work)


@router.post("/run_python", response_model=RunResult)
async def run_python(body: RunPythonRequest, target: ThisTarget) -> RunResult:
    """Run code in the session's interpreter: names live on from call to call."""
    return await target.call("python", lambda it: it.run_python(body.code, timeout_s=body.timeout_s))


@router.post("/run_shell", response_model=RunResult)
async def run_shell(body: RunShellRequest, target: ThisTarget) -> RunResult:
    """Run a command in the session's shell: directory, variables and functions live on from call to call."""
    return await target.call("shell", lambda it: it.run_shell(body.command, timeout_s=body.timeout_s))


@router.post("/stream", responses=NDJSON, response_class=StreamingResponse)
async def stream(body: RunRequest, server: ThisServer, entry: ThisSession) -> StreamingResponse:
    """`run`, told line by line as it goes on. A reader that leaves does not stop it."""

    async def work(lines: Lines) -> None:
        with server.metrics.call("stream"):
            async with server.sessions.using(entry):
                given = entry.session.stream(body.argv, stdin=body.stdin, timeout_s=body.timeout_s, cwd=body.cwd)
                await relay(given, lines)

    return StreamingResponse(await server.relays.open(work), media_type="application/x-ndjson")


@router.put("/files", status_code=204, openapi_extra=BYTES_IN)
async def write_file(path: BoxPath, request: Request, target: ThisTarget) -> None:
    """Replace or make a file."""
    data = await _body(request)
    await target.use(lambda session: session.write_file(path, data))


@router.get("/files", responses=BYTES_OUT, response_class=Response)
async def read_file(path: BoxPath, target: ThisTarget, max_bytes: MaxBytes = 1 << 20) -> Response:
    """At most the first `max_bytes` of a regular file."""
    data = await target.use(lambda session: session.read_file(path, max_bytes))
    return Response(data, media_type="application/octet-stream")


@router.put("/folder", status_code=204, openapi_extra=BYTES_IN)
async def write_folder(path: BoxPath, request: Request, target: ThisTarget) -> None:
    """Unpack a tar into a folder of the box."""
    data = await _body(request)
    await target.use(lambda session: put_folder(session, path, data))


@router.get("/folder", responses=BYTES_OUT, response_class=Response)
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
