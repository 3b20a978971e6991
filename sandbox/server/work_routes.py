"""Routes that work in a session's box: code in, output out; files and folders both ways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request, Response
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
BoxPath = Annotated[str, Query(min_length=1, max_length=4096, description="In the box; relative to its /tmp.")]
MaxBytes = Annotated[int, Query(ge=0, le=MAX_FILE_BYTES)]


async def _call(
    server: Parts, entry: Entry, key: str | None, verb: str, work: Callable[[Session], Awaitable[RunResult]]
) -> RunResult:
    with server.metrics.call(verb) as outcome:
        return outcome.note(await server.sessions.use(entry, key, work))


@router.post("/run", response_model=RunResult)
async def run(body: RunRequest, server: ThisServer, entry: ThisSession, key: Key = None) -> RunResult:
    """Run a program to its end."""
    given = {"stdin": body.stdin, "timeout_s": body.timeout_s, "cwd": body.cwd}
    return await _call(server, entry, key, "run", lambda session: session.run(body.argv, **given))  # type: ignore[arg-type]


@router.post("/run_python", response_model=RunResult)
async def run_python(body: RunPythonRequest, server: ThisServer, entry: ThisSession, key: Key = None) -> RunResult:
    """Run code in the session's interpreter: names live on from call to call."""
    return await _call(server, entry, key, "python", lambda it: it.run_python(body.code, timeout_s=body.timeout_s))


@router.post("/run_shell", response_model=RunResult)
async def run_shell(body: RunShellRequest, server: ThisServer, entry: ThisSession, key: Key = None) -> RunResult:
    """Run a command in the session's shell: directory, variables and functions live on from call to call."""
    return await _call(server, entry, key, "shell", lambda it: it.run_shell(body.command, timeout_s=body.timeout_s))


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
async def write_file(path: BoxPath, request: Request, server: ThisServer, entry: ThisSession, key: Key = None) -> None:
    """Replace or make a file."""
    data = await _body(request)
    await server.sessions.use(entry, key, lambda session: session.write_file(path, data))


@router.get("/files", responses=BYTES_OUT, response_class=Response)
async def read_file(
    path: BoxPath, server: ThisServer, entry: ThisSession, max_bytes: MaxBytes = 1 << 20, key: Key = None
) -> Response:
    """At most the first `max_bytes` of a regular file."""
    data = await server.sessions.use(entry, key, lambda session: session.read_file(path, max_bytes))
    return Response(data, media_type="application/octet-stream")


@router.put("/folder", status_code=204, openapi_extra=BYTES_IN)
async def write_folder(path: BoxPath, request: Request, server: ThisServer, entry: ThisSession) -> None:
    """Unpack a tar into a folder of the box."""
    data = await _body(request)
    async with server.sessions.using(entry):
        await put_folder(entry.session, path, data)


@router.get("/folder", responses=BYTES_OUT, response_class=Response)
async def read_folder(
    path: BoxPath, server: ThisServer, entry: ThisSession, max_bytes: MaxBytes = MAX_FILE_BYTES
) -> Response:
    """A folder of the box as a tar; one that is longer than `max_bytes` is an error."""
    async with server.sessions.using(entry):
        data = await get_folder(entry.session, path, max_bytes)
    return Response(data, media_type="application/octet-stream")


async def _body(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_FILE_BYTES:
            raise HTTPException(413, f"more than {MAX_FILE_BYTES} bytes in one file")
    return bytes(data)
