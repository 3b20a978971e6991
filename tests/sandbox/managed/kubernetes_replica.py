"""The part of Kubernetes' API that boxes need, as API server and kubelet speak it, with real programs in boxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from tests.sandbox.managed.replica import Replica, never

TOKEN = "a service account's token"
NAMESPACE = "boxes"
IMAGES = {"python:3.12-slim"}


class KubernetesReplica(Replica):
    """One namespace, one node."""

    def __init__(self) -> None:
        super().__init__()
        self.policies: dict[str, dict[str, Any]] = {}
        self.unpullable: dict[str, dict[str, Any]] = {}
        pods = "/api/v1/namespaces/boxes/pods"
        self.app = Starlette(
            routes=[
                Route(pods, self.create, methods=["POST"]),
                Route(pods, self.list, methods=["GET"]),
                Route(f"{pods}/{{name}}", self.read, methods=["GET"]),
                Route(f"{pods}/{{name}}", self.delete, methods=["DELETE"]),
                WebSocketRoute(f"{pods}/{{name}}/exec", self.execute),
                Route("/apis/networking.k8s.io/v1/namespaces/boxes/networkpolicies", self.forbid, methods=["POST"]),
                Route(
                    "/apis/networking.k8s.io/v1/namespaces/boxes/networkpolicies/{name}", self.policy, methods=["GET"]
                ),
            ]
        )

    async def create(self, request: Request) -> Response:
        if refused := _unauthorized(request.headers):
            return refused
        fault = self.create_faults.next()
        if refused := await self.refused(fault, _status):
            return refused
        manifest = await request.json()
        name = manifest["metadata"]["name"]
        if name in self.boxes:
            return _status(409, "AlreadyExists")
        image = manifest["spec"]["containers"][0]["image"]
        if image not in IMAGES:
            self.unpullable[name] = manifest
        else:
            self.make(manifest["metadata"]["labels"], image, manifest, box_id=name)
        if fault == "lost":
            await never()
        return JSONResponse({**manifest, "status": {"phase": "Pending"}}, 201)

    async def list(self, request: Request) -> Response:
        pairs = (pair.split("=") for pair in request.query_params["labelSelector"].split(","))
        boxes, more = self.page(dict(pairs), request.query_params.get("continue", ""))
        items = [_running(box.asked) for box in boxes]
        return JSONResponse({"kind": "PodList", "apiVersion": "v1", "metadata": {"continue": more}, "items": items})

    async def read(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name in self.unpullable:
            return JSONResponse(_waiting(self.unpullable[name]))
        return JSONResponse(_running(self.boxes[name].asked)) if name in self.boxes else _status(404, "NotFound")

    async def delete(self, request: Request) -> Response:
        if self.end_faults.next() == "500":
            return _status(500, "InternalError")
        name = request.path_params["name"]
        manifest = self.unpullable.pop(name, None) or (self.boxes[name].asked if name in self.boxes else None)
        if manifest is None:
            return _status(404, "NotFound")
        self.end(name)
        return JSONResponse(_running(manifest))

    async def forbid(self, request: Request) -> Response:
        policy = await request.json()
        if policy["metadata"]["name"] in self.policies:
            return _status(409, "AlreadyExists")
        self.policies[policy["metadata"]["name"]] = policy
        return JSONResponse(policy, 201)

    async def policy(self, request: Request) -> Response:
        return JSONResponse(self.policies[request.path_params["name"]])

    async def execute(self, socket: WebSocket) -> None:
        """A program, its streams as channels 0 to 2, its end as a Status on channel 3."""
        box = self.boxes.get(socket.path_params["name"])
        if _unauthorized(socket.headers) or box is None:
            await socket.close()  # before `accept`: the handshake is answered with 403
            return
        assert "v4.channel.k8s.io" in socket.scope["subprotocols"]
        process = await box.run(socket.query_params.getlist("command"))
        await socket.accept("v4.channel.k8s.io")
        tasks = [
            asyncio.create_task(self._outputs(socket, process)),
            asyncio.create_task(_inputs(socket, process)),
            asyncio.create_task(self.hung_up.wait()),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.close()

    async def _outputs(self, socket: WebSocket, process: asyncio.subprocess.Process) -> None:
        async def follow(stream: asyncio.StreamReader | None, channel: int) -> None:
            assert stream is not None
            await socket.send_bytes(bytes([channel]))  # as the kubelet does: an empty message opens each stream
            while data := await stream.read(32768):
                await socket.send_bytes(bytes([channel]) + data)

        await asyncio.gather(follow(process.stdout, 1), follow(process.stderr, 2))
        code = await process.wait()
        causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
        status = {"status": "Success"} if code == 0 else {"status": "Failure", "details": causes}
        await socket.send_bytes(b"\x03" + json.dumps({"metadata": {}, **status}).encode())


async def _inputs(socket: WebSocket, process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    with contextlib.suppress(WebSocketDisconnect, ConnectionError):
        while True:
            message = await socket.receive_bytes()
            if message[0] == 0:
                process.stdin.write(message[1:])
                await process.stdin.drain()


def _unauthorized(headers: Mapping[str, str]) -> Response | None:
    return None if headers.get("authorization") == f"Bearer {TOKEN}" else _status(401, "Unauthorized")


def _status(code: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": reason,
        "code": code,
    }
    return JSONResponse(body, code, headers)


def _running(manifest: Any) -> dict[str, Any]:
    return _with_state(manifest, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})


def _waiting(manifest: Any) -> dict[str, Any]:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image in the registry"}}
    return _with_state(manifest, "Pending", waiting)


def _with_state(manifest: Any, phase: str, state: dict[str, Any]) -> dict[str, Any]:
    container = manifest["spec"]["containers"][0]
    status = {
        **{"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0},
        **{"ready": phase == "Running", "state": state},
    }
    return {**manifest, "status": {"phase": phase, "containerStatuses": [status]}}


def environment(url: str, folder: Path) -> dict[str, str]:
    """A kubeconfig in `folder`, as JSON, which is YAML too."""
    config = {
        **{"apiVersion": "v1", "kind": "Config", "current-context": "replica"},
        "clusters": [{"name": "replica", "cluster": {"server": url}}],
        "users": [{"name": "worker", "user": {"token": TOKEN}}],
        "contexts": [{"name": "replica", "context": {"cluster": "replica", "user": "worker", "namespace": NAMESPACE}}],
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config), encoding="utf-8")
    return {"KUBECONFIG": str(file)}
