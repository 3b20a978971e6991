"""E2B's API as its SDK speaks it: REST for sandboxes, Connect for processes (`envd`), with real programs in boxes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from tests.sandbox.managed.replica import Replica, ReplicaBox, never

KEY = "e2b_0123456789"
TEMPLATES = {"base"}


class E2BReplica(Replica):
    """`app` answers for api.e2b.app and for the boxes themselves; a header names the box."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by_key: dict[str, ReplicaBox] = {}
        self.processes = Processes(self)
        self.app = Starlette(
            routes=[
                Route("/v2/sandboxes", self.create, methods=["POST"]),
                Route("/v2/sandboxes", self.list, methods=["GET"]),
                Route("/v2/sandboxes/{box_id}/connect", self.connect, methods=["POST"]),
                Route("/sandboxes/{box_id}", self.kill, methods=["DELETE"]),
                Route("/health", self.health),
                Mount("/", ProcessASGIApplication(self.processes)),
            ]
        )

    async def create(self, request: Request) -> Response:
        if refused := _unauthorized(request):
            return refused
        fault = self.create_faults.next()
        if refused := await self.refused(fault, _error):
            return refused
        body = await request.json()
        if body["templateID"] not in TEMPLATES:
            return _error(404, f"template '{body['templateID']}' not found")
        key = request.headers.get("Idempotency-Key", "")
        if not key or key not in self.made_by_key:
            self.made_by_key[key] = self.make(body["metadata"], body["templateID"], body)
        if fault == "lost":
            await never()
        return JSONResponse(_sandbox(self.made_by_key[key]), 201)

    async def list(self, request: Request) -> Response:
        if refused := _unauthorized(request):
            return refused
        labels = {unquote(k): unquote(v) for k, v in parse_qsl(request.query_params.get("metadata", ""))}
        boxes, more = self.page(labels, request.query_params.get("nextToken", ""))
        return JSONResponse([_listed(box) for box in boxes], headers={"x-next-token": more} if more else {})

    async def connect(self, request: Request) -> Response:
        box = self.boxes.get(request.path_params["box_id"])
        return JSONResponse(_sandbox(box)) if box else _error(404, "sandbox not found")

    async def kill(self, request: Request) -> Response:
        fault = self.end_faults.next()
        if fault == "500":
            return _error(500, "it broke")
        return Response(status_code=204) if self.end(request.path_params["box_id"]) else _error(404, "not found")

    async def health(self, request: Request) -> Response:
        known = request.headers.get("E2b-Sandbox-Id") in self.boxes
        return Response(status_code=204) if known else _error(502, "The sandbox was not found")


class Processes(Process):
    """`envd` of every box."""

    def __init__(self, replica: E2BReplica) -> None:
        self._replica = replica
        self._running: dict[tuple[str, int], asyncio.subprocess.Process] = {}
        self._pids = itertools.count(100)

    async def start(self, request: pb.StartRequest, ctx: Any) -> AsyncIterator[pb.StartResponse]:
        box = self._box(ctx)
        assert request.process is not None
        pid = next(self._pids)
        process = await box.run([request.process.cmd, *request.process.args])
        self._running[box.box_id, pid] = process
        yield pb.StartResponse(event=pb.ProcessEvent(event=Oneof("start", pb.ProcessEvent.StartEvent(pid=pid))))
        async for event in _output(process, self._replica.hung_up):
            yield pb.StartResponse(event=pb.ProcessEvent(event=event))

    async def send_input(self, request: pb.SendInputRequest, ctx: Any) -> pb.SendInputResponse:
        assert request.process is not None
        assert request.input is not None
        box = self._box(ctx)
        process = self._running.get((box.box_id, request.process.selector.value))
        if process is None or process.returncode is not None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        assert process.stdin is not None
        process.stdin.write(request.input.input.value)
        await process.stdin.drain()
        return pb.SendInputResponse()

    def _box(self, ctx: Any) -> ReplicaBox:
        box = self._replica.boxes.get(ctx.request_headers.get("e2b-sandbox-id", ""))
        if box is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        return box


async def _output(process: asyncio.subprocess.Process, broken: asyncio.Event) -> AsyncIterator[Any]:
    pieces: asyncio.Queue[Any] = asyncio.Queue()

    async def follow(stream: asyncio.StreamReader | None, name: str) -> None:
        assert stream is not None
        while data := await stream.read(65536):
            data_event = pb.ProcessEvent.DataEvent(output=Oneof(name, data))
            pieces.put_nowait(Oneof("data", data_event))

    async def end() -> None:
        await asyncio.gather(follow(process.stdout, "stdout"), follow(process.stderr, "stderr"))
        code = await process.wait()
        pieces.put_nowait(Oneof("end", pb.ProcessEvent.EndEvent(exit_code=code, exited=True, status=f"exit {code}")))

    async def hang_up() -> None:
        await broken.wait()
        pieces.put_nowait(None)

    tasks = [asyncio.create_task(end()), asyncio.create_task(hang_up())]
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
            if piece.field == "end":
                return
        raise ConnectError(Code.UNAVAILABLE, "the connection to sandbox ended before the stream completed")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _unauthorized(request: Request) -> Response | None:
    return None if request.headers.get("X-API-Key") == KEY else _error(401, "invalid API key")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"code": status, "message": message}, status, headers)


def _sandbox(box: ReplicaBox) -> dict[str, Any]:
    return {
        "templateID": box.image,
        "sandboxID": box.box_id,
        "clientID": "",
        "envdVersion": "0.5.0",
        "envdAccessToken": "a token",
        "domain": None,
    }


def _listed(box: ReplicaBox) -> dict[str, Any]:
    started = datetime.fromtimestamp(box.started, UTC).isoformat()
    return {
        **{"templateID": box.image, "sandboxID": box.box_id, "clientID": "", "envdVersion": "0.5.0"},
        **{"startedAt": started, "endAt": started, "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024},
        **{"state": "running", "metadata": box.labels},
    }


def environment(url: str, _folder: Path) -> dict[str, str]:
    return {"E2B_API_KEY": KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_HTTP_VERSION": "1.1"}
