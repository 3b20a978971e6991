"""Modal's API as its SDK speaks it: gRPC to the control plane and to a box's command router, with programs in boxes.

Both services answer at one address, by the protocol that the SDK ships. What it calls and is not here is refused as
unimplemented. The messages are those of version 2 of sandboxes, which the SDK uses by default.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as tasks
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase
from tests.sandbox.managed.replica import Replica, ReplicaBox, never

KEY = ("ak-0123456789", "as-0123456789")
IMAGES = {"python:3.12-slim"}
OWN_FOLDER = "/srv"
"""What a box writes to its disk here: in its image, when it is copied."""
CLOSE_S = 5.0
SUCCESS, FAILURE = api.GenericResult.GENERIC_STATUS_SUCCESS, api.GenericResult.GENERIC_STATUS_FAILURE
Handle = Callable[[Any, Any], Awaitable[Any]]


def unary(handle: Handle) -> Handle:
    """Decorator: a method that gets a request and returns its answer, once the caller has shown its key."""

    async def call(self: Any, stream: Any) -> None:
        self.admit(stream.metadata)
        await stream.send_message(await handle(self, await stream.recv_message()))

    return call


class PartOfService:
    """A gRPC service of which only some calls are there."""

    service: Any

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)

        async def refuse(_stream: Any) -> None:
            raise GRPCError(Status.UNIMPLEMENTED, f"the replica has no {name}")

        return refuse

    def __mapping__(self) -> Any:
        return self.service.__mapping__(self)


@dataclass(frozen=True)
class ReplicaImage:
    tag: str
    files: bytes = b""
    """A tar of `OWN_FOLDER`."""


def token() -> str:
    """As Modal's are: readable by the client, who looks when it ends."""
    parts = ({"alg": "none"}, {"exp": time.time() + 3600, "number": secrets.token_hex(4)}, {})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


class ModalReplica(Replica):
    """Control plane and routers."""

    walls = ("--tmpfs", OWN_FOLDER)
    asks_again = 4

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[str, ReplicaImage] = {}
        self.wire: list[bytes] = []
        """Every request for a box, as it came."""
        self.control = ControlPlane(self)
        self.router = Router(self)
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = Server([self.control, self.router], status_details_codec=custom_detail_codec)
        await server.start(sock=listener)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield self.url
        finally:
            await self.router.wait_closed()
            server.close()
            with contextlib.suppress(TimeoutError):  # clients that keep a connection open
                await asyncio.wait_for(server.wait_closed(), CLOSE_S)

    def make(self, labels: dict[str, str], image: str, asked: dict[str, object], box_id: str = "") -> ReplicaBox:
        return super().make(labels, image, asked, f"sb-{box_id or secrets.token_hex(8)}")

    def hang_up(self) -> None:
        """The router forgets its programs, which keep running: reads that the SDK resumes return nothing."""
        self.router.forget_programs()


class ControlPlane(PartOfService):
    service = ModalClientBase

    def __init__(self, replica: ModalReplica) -> None:
        self._replica = replica
        self._names: dict[str, str] = {}
        self._auth_token = token()

    def admit(self, metadata: Any) -> None:
        if (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) != KEY:
            raise GRPCError(Status.UNAUTHENTICATED, "invalid token")

    @unary
    async def AuthTokenGet(self, _request: Any) -> Any:
        return api.AuthTokenGetResponse(token=self._auth_token)

    @unary
    async def EnvironmentGetOrCreate(self, _request: Any) -> Any:
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    @unary
    async def AppGetOrCreate(self, request: Any) -> Any:
        return api.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

    # ---- images

    @unary
    async def ImageGetOrCreate(self, request: Any) -> Any:
        first = request.image.dockerfile_commands[0].split()[1]
        bases = {base.docker_tag: self._replica.images[base.image_id].tag for base in request.image.base_images}
        tag = bases.get(first, first)
        if tag not in IMAGES:
            result = api.GenericResult(status=FAILURE, exception=f"{tag}: no such image")
            return api.ImageGetOrCreateResponse(image_id="im-failed", result=result)
        image_id = f"im-{secrets.token_hex(8)}"
        self._replica.images[image_id] = ReplicaImage(tag)
        return api.ImageGetOrCreateResponse(image_id=image_id, result=api.GenericResult(status=SUCCESS))

    @unary
    async def ImageFromId(self, request: Any) -> Any:
        if request.image_id not in self._replica.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        return api.ImageFromIdResponse(image_id=request.image_id)

    @unary
    async def ImageDelete(self, request: Any) -> Any:
        if self._replica.images.pop(request.image_id, None) is None:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        return Empty()

    # ---- boxes

    @unary
    async def SandboxCreateV2(self, request: Any) -> Any:
        replica, asked = self._replica, request.definition
        fault = replica.create_faults.next()
        await self._refuse(fault, replica.create_faults.retry_after_s)
        if asked.name in self._names and self._names[asked.name] in replica.boxes:
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox {asked.name} exists")
        replica.wire.append(request.SerializeToString())
        image = replica.images[asked.image_id]
        box = replica.make({tag.tag_name: tag.tag_value for tag in request.tags}, image.tag, {"definition": asked})
        self._names[asked.name] = box.box_id
        if image.files:
            unpacking = await box.run(["tar", "-x", "-C", OWN_FOLDER])
            await unpacking.communicate(image.files)
        if fault == "lost":
            await never()
        return api.SandboxCreateV2Response(
            sandbox_id=box.box_id,
            task_id=task_of(box.box_id),
            metadata=api.SandboxHandleMetadata(app_id=request.app_id),
            command_router_access=api.CommandRouterAccess(jwt=replica.router.jwt, url=replica.url),
        )

    async def _refuse(self, fault: str, retry_after_s: float) -> None:
        if fault == "429":
            policy = [api.RPCRetryPolicy(retry_after_secs=retry_after_s)] if retry_after_s else None
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "too many requests", policy)
        if fault == "500":
            raise GRPCError(Status.INTERNAL, "it broke")
        if fault == "silence":
            await never()

    @unary
    async def SandboxGetFromNameV2(self, request: Any) -> Any:
        box = self._box(self._names.get(request.sandbox_name, ""))
        return api.SandboxGetFromNameResponse(sandbox_id=box.box_id, metadata=api.SandboxHandleMetadata())

    @unary
    async def SandboxListV2(self, request: Any) -> Any:
        """The newest first, in short pages: a client must ask on."""
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        before = request.before_timestamp or time.time() + 1
        older = [box for box in self._replica.find(wanted) if box.started < before]
        found = sorted(older, key=lambda box: box.started, reverse=True)[:2]
        return api.SandboxListResponse(
            sandboxes=[
                api.SandboxInfo(id=box.box_id, created_at=box.started, metadata=api.SandboxHandleMetadata())
                for box in found
            ]
        )

    @unary
    async def SandboxTagsGetV2(self, request: Any) -> Any:
        labels = self._box(request.sandbox_id).labels
        return api.SandboxTagsGetResponse(
            tags=[api.SandboxTag(tag_name=name, tag_value=value) for name, value in labels.items()]
        )

    @unary
    async def SandboxTerminateV2(self, request: Any) -> Any:
        await self._refuse(self._replica.end_faults.next(), 0.0)
        self._box(request.sandbox_id)
        self._replica.end(request.sandbox_id)
        return api.SandboxTerminateResponse()

    @unary
    async def SandboxWaitV2(self, request: Any) -> Any:
        self._box(request.sandbox_id)
        return api.SandboxWaitResponse(metadata=api.SandboxHandleMetadata())

    @unary
    async def SandboxGetTaskIdV2(self, request: Any) -> Any:
        return api.SandboxGetTaskIdResponse(task_id=task_of(self._box(request.sandbox_id).box_id))

    @unary
    async def SandboxGetCommandRouterAccess(self, request: Any) -> Any:
        self._box(request.sandbox_id)
        return api.SandboxGetCommandRouterAccessResponse(jwt=self._replica.router.jwt, url=self._replica.url)

    def _box(self, box_id: str) -> ReplicaBox:
        if box_id not in self._replica.boxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {box_id} not found")
        return self._replica.boxes[box_id]


def task_of(box_id: str) -> str:
    return f"ta-{box_id}V"


class ReplicaProgram:
    """A program of a box: its output so far, and who waits for more."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.forgotten = False
        self.received = 0
        """Bytes of its input."""
        self.output = {
            tasks.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT: bytearray(),
            tasks.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR: bytearray(),
        }
        self.more = asyncio.Condition()
        self._ended: set[int] = set()
        streams = zip(self.output, (process.stdout, process.stderr), strict=True)
        self.following = asyncio.create_task(self._follow([self._copy(number, stream) for number, stream in streams]))

    async def _follow(self, copies: list[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*copies)
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def _copy(self, number: int, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while data := await stream.read(32768):
            await self.change(lambda: self.output[number].extend(data))
        await self.change(lambda: self._ended.add(number))

    async def change(self, what: Callable[[], object]) -> None:
        async with self.more:
            what()
            self.more.notify_all()

    async def read(self, number: int, offset: int) -> AsyncIterator[bytes]:
        """From `offset` on, until it has ended."""
        while True:
            async with self.more:
                while not (self.forgotten or number in self._ended or len(self.output[number]) > offset):
                    await self.more.wait()
                data = bytes(self.output[number][offset:])
            if self.forgotten:
                raise GRPCError(Status.NOT_FOUND, "no such program")
            if not data:
                return
            offset += len(data)
            yield data


class Router(PartOfService):
    """Command routers of all boxes."""

    service = TaskCommandRouterBase

    def __init__(self, replica: ModalReplica) -> None:
        self._replica = replica
        self._programs: dict[str, ReplicaProgram] = {}
        self._following: list[asyncio.Task[None]] = []
        self.jwt = token()

    def admit(self, metadata: Any) -> None:
        if metadata.get("authorization") != f"Bearer {self.jwt}":
            raise GRPCError(Status.UNAUTHENTICATED, "invalid token")

    def forget_programs(self) -> None:
        programs, self._programs = list(self._programs.values()), {}
        for program in programs:
            program.forgotten = True
            self._following.append(asyncio.create_task(program.change(lambda: None)))

    async def wait_closed(self) -> None:
        """After the boxes have ended: their programs have, too."""
        if self._following:
            await asyncio.wait(self._following, timeout=CLOSE_S)

    @unary
    async def TaskExecStart(self, request: Any) -> Any:
        box = self._box(request.task_id)
        if request.exec_id not in self._programs:
            program = ReplicaProgram(await box.run(list(request.command_args)))
            self._programs[request.exec_id] = program
            self._following.append(program.following)
        return tasks.TaskExecStartResponse()

    async def TaskExecStdioRead(self, stream: Any) -> None:
        self.admit(stream.metadata)
        request = await stream.recv_message()
        program = self._program(request.exec_id)
        async for data in program.read(request.file_descriptor, request.offset):
            await stream.send_message(tasks.TaskExecStdioReadResponse(data=data))

    @unary
    async def TaskExecStdinWrite(self, request: Any) -> Any:
        program = self._program(request.exec_id)
        assert program.process.stdin is not None
        try:
            program.process.stdin.write(request.data[max(0, program.received - request.offset) :])
            await program.process.stdin.drain()
        except ConnectionError as error:
            raise GRPCError(Status.FAILED_PRECONDITION, "the program has ended") from error
        program.received = max(program.received, request.offset + len(request.data))
        if request.eof:
            program.process.stdin.close()
        return tasks.TaskExecStdinWriteResponse()

    @unary
    async def TaskExecWait(self, request: Any) -> Any:
        return tasks.TaskExecWaitResponse(code=await self._program(request.exec_id).process.wait())

    @unary
    async def TaskSnapshotFilesystem(self, request: Any) -> Any:
        packing = await self._box(request.task_id).run(["tar", "-c", "-C", OWN_FOLDER, "."], stdin=False)
        files, _ = await packing.communicate()
        image_id = f"im-{secrets.token_hex(8)}"
        self._replica.images[image_id] = ReplicaImage("a copy", files)
        return tasks.TaskSnapshotFilesystemResponse(image_id=image_id)

    def _box(self, task_id: str) -> ReplicaBox:
        for box in self._replica.boxes.values():
            if task_of(box.box_id) == task_id:
                return box
        raise GRPCError(Status.NOT_FOUND, f"Task {task_id} not found")

    def _program(self, exec_id: str) -> ReplicaProgram:
        if exec_id not in self._programs:
            raise GRPCError(Status.NOT_FOUND, f"Exec {exec_id} not found")
        return self._programs[exec_id]


def environment(url: str, folder: Path) -> dict[str, str]:
    return {
        **{"MODAL_TOKEN_ID": KEY[0], "MODAL_TOKEN_SECRET": KEY[1], "MODAL_SERVER_URL": url},
        **{"MODAL_CONFIG_PATH": f"{folder}/none.toml", "MODAL_DISABLE_API_PROXY": "1"},
    }
