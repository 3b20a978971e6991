"""``POST /run_code``: one program in a fresh box, in the shape of SandboxFusion's API.

Shape: github.com/bytedance/SandboxFusion, sandbox/server/sandbox_api.py (RunCodeRequest, RunCodeResponse) and
sandbox/runners/types.py (CommandRunResult). ``Success``: it ended with 0. ``Failed``: any other end, a limit among
them. ``SandboxError``: the sandbox failed, which says nothing about the code.
"""

from __future__ import annotations

import base64
import posixpath
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.common import HttpError
from penstock.sandbox.protocol import RunResult, SandboxBusy, SandboxError, Session
from penstock.sandbox.server.routes import ServerState, ThisCaller, ThisServer
from penstock.sandbox.server.sessions import SessionRequest
from penstock.sandbox.server.views import MAX_TEXT_CHARS, MAX_TIMEOUT_S, WireRequest
from penstock.sandbox.session import MAX_FILE_BYTES

router = APIRouter()
PROGRAMS = {"python": ("main.py", "python3"), "bash": ("main.sh", "bash")}
"""Language → file that the code is written to, program that runs it."""
FOLDER = "run"
"""Folder in the box's /tmp with code and files, in which the code runs."""


def _known(language: str) -> str:
    if language not in PROGRAMS:
        raise ValueError(f"languages here are {' and '.join(PROGRAMS)}, not {language[:40]!r}")
    return language


class RunCodeRequest(WireRequest):
    model_config = ConfigDict(extra="forbid", strict=True)
    code: str = Field(max_length=MAX_TEXT_CHARS)
    language: Annotated[str, AfterValidator(_known)] = Field(
        description="`python` or `bash`.", json_schema_extra={"enum": list(PROGRAMS)}
    )
    stdin: str | None = Field(None, max_length=MAX_TEXT_CHARS)
    run_timeout: float = Field(10.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False, description="Seconds.")
    compile_timeout: float = Field(10.0, gt=0, allow_inf_nan=False, description="Of compiled languages: none here.")
    memory_limit_MB: int = Field(-1, ge=-1, le=1 << 20, description="Below the box's own: address space per process.")
    files: dict[str, str | None] = Field(default_factory=dict, max_length=256, description="Path → base64 content.")
    fetch_files: list[str] = Field(default_factory=list, max_length=256, description="Paths to answer with.")
    args: list[str] = Field(default_factory=list, max_length=0, description="Of pytest, which is not run here.")


class CommandRunResult(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = Field(default_factory=dict)


@router.post("/run_code", response_model=RunCodeResponse)
async def run_code(body: RunCodeRequest, server: ThisServer, caller: ThisCaller) -> RunCodeResponse:
    """Run a program in a fresh box, which ends with it."""
    files = _decoded(body)
    wait_s = server.config.server.queue_timeout_s
    with server.metrics.call("run_code") as outcome, server.quotas.call(caller):
        try:
            entry = await server.sessions.start(SessionRequest(caller, "run_code", None, MAX_TIMEOUT_S + 60.0), wait_s)
            try:
                result, fetched = await _run(entry.session, body, files, server)
                outcome.note(result)
            finally:
                await server.sessions.end(entry)
        except SandboxBusy:
            raise
        except SandboxError as error:
            outcome.name = "failed"
            return RunCodeResponse(status="SandboxError", message=str(error))
    return _answer(result, fetched)


def _decoded(body: RunCodeRequest) -> dict[str, bytes]:
    """Path in the box → content; null is left out, as SandboxFusion does."""
    decoded = {}
    for path, text in body.files.items():
        if text is None:
            continue
        try:
            decoded[_inside(path)] = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise HttpError(422, "body.files", f"{path[:100]!r} is not base64: {error}") from error
    return decoded


def _inside(path: str) -> str:
    return posixpath.join(FOLDER, path)


async def _run(
    session: Session, body: RunCodeRequest, files: dict[str, bytes], server: ServerState
) -> tuple[RunResult, dict[str, str]]:
    name, program = PROGRAMS[body.language]
    await _place(session, {**files, _inside(name): body.code.encode("utf-8", "replace")})
    argv = [program, name]
    if 0 < body.memory_limit_MB < server.config.memory_mb:
        argv = ["sh", "-c", f'ulimit -v {body.memory_limit_MB << 10}; exec "$@"', "sh", *argv]
    result = await session.run(argv, stdin=body.stdin or "", timeout_s=body.run_timeout, cwd=FOLDER)
    return result, await _fetch(session, body.fetch_files)


async def _place(session: Session, files: dict[str, bytes]) -> None:
    folders = sorted({posixpath.dirname(path) for path in files})
    await session.run(["mkdir", "-p", "--", *folders], timeout_s=10.0)
    for path, data in files.items():
        try:
            await session.write_file(path, data)
        except OSError as error:
            raise HttpError(422, "body.files", f"{path[:100]!r}: {error.strerror}") from error


async def _fetch(session: Session, paths: list[str]) -> dict[str, str]:
    """Returns the files that exist, base64. Raises `HttpError` if they are longer together than one file may be."""
    fetched: dict[str, str] = {}
    room = MAX_FILE_BYTES
    for path in paths:
        try:
            data = await session.read_file(_inside(path), MAX_FILE_BYTES)
        except OSError:
            continue
        room -= len(data)
        if room < 0:
            raise HttpError(422, "body.fetch_files", f"more than {MAX_FILE_BYTES} bytes together, at {path[:100]!r}")
        fetched[path] = base64.b64encode(data).decode("ascii")
    return fetched


def _answer(result: RunResult, files: dict[str, str]) -> RunCodeResponse:
    timed_out = result.limit in ("wall", "cpu") and result.exit_code is None
    # 137: a limit other than time ended the program, as a shell reports it
    run = CommandRunResult(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=result.duration_s,
        return_code=None if timed_out else 137 if result.exit_code is None else result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
    )
    status: Literal["Success", "Failed"] = "Success" if run.return_code == 0 else "Failed"
    message = f"limit: {result.limit}" if result.limit and not timed_out else ""
    return RunCodeResponse(status=status, message=message, run_result=run, files=files)
