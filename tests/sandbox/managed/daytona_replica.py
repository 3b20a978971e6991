"""Daytona's API as its SDK speaks it: REST for sandboxes and sessions, a WebSocket for output, programs in boxes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from tests.sandbox.managed.replica import Replica, ReplicaBox, never

KEY = "dtn_0123456789"
IMAGES = {"python:3.12-slim"}
STREAMS = {"stdout": b"\x01\x01\x01", "stderr": b"\x02\x02\x02"}


class Command:
    """A command of a session: its output so far, and who waits for more."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[bytes] = []
        self.more = asyncio.Condition()
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        await asyncio.gather(self._copy(self.process.stdout, "stdout"), self._copy(self.process.stderr, "stderr"))
        await self.process.wait()
        async with self.more:
            self.more.notify_all()

    async def _copy(self, stream: asyncio.StreamReader | None, name: str) -> None:
        assert stream is not None
        while data := await stream.read(32768):
            async with self.more:
                self.log.append(STREAMS[name] + data)
                self.more.notify_all()


class DaytonaReplica(Replica):
    """`app` answers for app.daytona.io/api and, below /toolbox, for the daemons of the boxes."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, str] = {}
        self._commands: dict[tuple[str, str], Command] = {}
        self._numbers = itertools.count(1)
        session = "/toolbox/{box_id}/process/session"
        self.app = Starlette(
            routes=[
                Route("/api/sandbox", self.create, methods=["POST"]),
                Route("/api/sandbox", self.list, methods=["GET"]),
                Route("/api/sandbox/{name}", self.read, methods=["GET"]),
                Route("/api/sandbox/{name}", self.delete, methods=["DELETE"]),
                Route(session, self.create_session, methods=["POST"]),
                Route(session + "/{session_id}", self.delete_session, methods=["DELETE"]),
                Route(session + "/{session_id}/exec", self.execute, methods=["POST"]),
                Route(session + "/{session_id}/command/{command_id}/input", self.input, methods=["POST"]),
                WebSocketRoute(session + "/{session_id}/command/{command_id}/logs", self.logs),
            ]
        )

    async def create(self, request: Request) -> Response:
        if refused := _unauthorized(request):
            return refused
        fault = self.create_faults.next()
        if refused := await self.refused(fault, _error):
            return refused
        body = await request.json()
        if body["name"] in self._names:
            return _error(409, f"sandbox {body['name']} exists")
        image = body["buildInfo"]["dockerfileContent"].split()[1]
        box = self.make(body["labels"], image, {**body, "base": str(request.base_url)})
        self._names[body["name"]] = box.box_id
        if fault == "lost":
            await never()
        return JSONResponse(self._described(box))

    async def list(self, request: Request) -> Response:
        labels = json.loads(request.query_params.get("labels", "{}"))
        boxes, more = self.page(labels, request.query_params.get("cursor", ""))
        return JSONResponse({"items": [self._described(box) for box in boxes], "nextCursor": more or None})

    async def read(self, request: Request) -> Response:
        box = self._box(request.path_params["name"])
        return JSONResponse(self._described(box)) if box else _error(404, "no such sandbox")

    async def delete(self, request: Request) -> Response:
        if self.end_faults.next() == "500":
            return _error(500, "it broke")
        box = self._box(request.path_params["name"])
        if box is None:
            return _error(404, "no such sandbox")
        answer = self._described(box)
        self.end(box.box_id)
        return JSONResponse({**answer, "state": "destroyed"})

    async def create_session(self, request: Request) -> Response:
        known = request.path_params["box_id"] in self.boxes
        return JSONResponse({}, 201) if known else _error(404, "no such sandbox")

    async def delete_session(self, request: Request) -> Response:
        command = self._commands.pop((request.path_params["box_id"], request.path_params["session_id"]), None)
        if command is not None and command.process.returncode is None:
            command.process.kill()
        return Response(status_code=204)

    async def execute(self, request: Request) -> Response:
        box = self.boxes.get(request.path_params["box_id"])
        if box is None:
            return _error(404, "no such sandbox")
        body = await request.json()
        assert (body["runAsync"], body["suppressInputEcho"]) == (True, True)
        process = await box.run(["sh", "-c", body["command"]])
        self._commands[box.box_id, request.path_params["session_id"]] = Command(process)
        return JSONResponse({"cmdId": f"command-{next(self._numbers)}"}, 202)

    async def input(self, request: Request) -> Response:
        command = self._commands.get((request.path_params["box_id"], request.path_params["session_id"]))
        if command is None or command.process.returncode is not None:
            return _error(404, "no such command")
        data = (await request.json())["data"]
        assert command.process.stdin is not None
        command.process.stdin.write((data if data.endswith("\n") else data + "\n").encode())  # as the daemon does
        await command.process.stdin.drain()
        return Response(status_code=204)

    async def logs(self, socket: WebSocket) -> None:
        await socket.accept()
        command = self._commands[socket.path_params["box_id"], socket.path_params["session_id"]]
        sending, broken = asyncio.create_task(_send_log(socket, command)), asyncio.create_task(self.hung_up.wait())
        gone = asyncio.create_task(_until_gone(socket))
        await asyncio.wait([sending, broken, gone], return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, broken, gone):
            task.cancel()
        await asyncio.wait([sending, broken, gone])
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.close()

    def _box(self, name: str) -> ReplicaBox | None:
        return self.boxes.get(self._names.get(name, name))

    def _described(self, box: ReplicaBox) -> dict[str, Any]:
        failed = box.image not in IMAGES | {"base"}
        return {
            **{"id": box.box_id, "organizationId": "tests", "name": str(box.asked.get("name", "orphan")), "user": "u"},
            **{"env": {}, "labels": box.labels, "public": False, "networkBlockAll": True, "kvm": False, "target": "eu"},
            **{"cpu": 1, "gpu": 0, "memory": 1, "disk": 1, "state": "build_failed" if failed else "started"},
            **{"errorReason": f"{box.image}: no such image" if failed else None},
            "toolboxProxyUrl": f"{box.asked['base']}toolbox",
        }


async def _send_log(socket: WebSocket, command: Command) -> None:
    sent = 0
    while True:
        async with command.more:
            while sent == len(command.log) and command.process.returncode is None:
                await command.more.wait()
            pieces = command.log[sent:]
        if not pieces:
            return
        for piece in pieces:
            await socket.send_bytes(piece)
        sent += len(pieces)


async def _until_gone(socket: WebSocket) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        while True:
            await socket.receive_bytes()


def _unauthorized(request: Request) -> Response | None:
    return None if request.headers.get("Authorization") == f"Bearer {KEY}" else _error(401, "invalid API key")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"statusCode": status, "message": message}, status, headers)


def environment(url: str, _folder: Path) -> dict[str, str]:
    return {"DAYTONA_API_KEY": KEY, "DAYTONA_API_URL": f"{url}/api", "DAYTONA_TARGET": "eu"}
