"""Boxes of Daytona, by its SDK: containers or machines, made from an image or from one of its snapshots.

The key is DAYTONA_API_KEY; DAYTONA_API_URL and DAYTONA_TARGET name another deployment and region. An image that is
written ``snapshot:NAME`` is a snapshot. A box's name is made of its request, so a request that comes twice makes one.

A program is a command of a session: its output comes over a WebSocket, its input by one request per line of ours. The
box keeps that output in a file, so what is read and printed in it takes room on its disk too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.managed.api import (
    CALL_TIMEOUT_S,
    CLOSE_S,
    ApiBusy,
    ApiUnavailable,
    BoxRequest,
    Channel,
    ChannelBroken,
    ListedBox,
    ReceivedOutput,
    asked_pause_s,
)
from penstock.sandbox.protocol import BoxNeeds, NoSuchImage, SandboxError, SandboxLost, UnmetNeeds

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

KEY = "DAYTONA_API_KEY"
SNAPSHOT = "snapshot:"
_REFUSED, _NOT_FOUND, _CONFLICT, _BUSY, _SERVER_ERROR = (401, 403), 404, 409, 429, 500


class DaytonaApi:
    def __init__(self, config: SandboxConfig) -> None:
        """Raises `SandboxError` where the SDK or the key is missing."""
        try:
            import daytona
        except ImportError as error:
            raise SandboxError("the `daytona` package is missing: `pip install 'penstock[daytona]'`") from error
        if not os.environ.get(KEY):
            raise SandboxError(f"sandbox.backend is daytona: set {KEY} to a key of https://app.daytona.io")
        self._sdk = daytona
        self._config = config
        self._connected: AsyncDaytona | None = None
        self._boxes: dict[str, AsyncSandbox] = {}
        network = "the internet" if config.managed.network else "no network"
        self.containment = f"one sandbox per session, {network}"

    def check_needs(self, needs: BoxNeeds) -> None:
        """Raises `UnmetNeeds` for sizes of a snapshot, which has its own. An image may have sizes."""
        sized = any(size is not None for size in (needs.memory_mb, needs.cpus, needs.storage_mb))
        if sized and self._config.image.startswith(SNAPSHOT):
            raise UnmetNeeds(
                f"a session asks for a size, and boxes of {self._config.image} have their snapshot's: name an image"
            )

    async def create(self, request: BoxRequest) -> str:
        name = f"penstock-{request.key}"
        image = request.image or self._config.image
        try:
            with self._translating("making a box", image=image):
                box = await self._started(name, self._parameters(name, image, request))
        except NoSuchImage:  # the box is there, and will never run
            with contextlib.suppress(SandboxError):
                await self.end(name)
            raise
        self._boxes[box.id] = box
        return box.id

    async def _started(self, name: str, parameters: Any) -> AsyncSandbox:
        try:
            return await self._client.create(parameters, timeout=0)
        except self._sdk.DaytonaConflictError:  # this request, asked for a second time
            box = await self._client.get(name, request_timeout=CALL_TIMEOUT_S)
            await box.wait_for_sandbox_start(timeout=0)
            return box

    def _parameters(self, name: str, image: str, request: BoxRequest) -> Any:
        common: dict[str, Any] = {
            "name": name,
            "labels": dict(request.labels),
            "os_user": "root" if request.needs.own_root else None,
            "network_block_all": not self._config.managed.network,
            "ttl_minutes": -(-request.ttl_s // 60),
            "auto_stop_interval": 0,
        }
        if image.startswith(SNAPSHOT):
            return self._sdk.CreateSandboxFromSnapshotParams(snapshot=image.removeprefix(SNAPSHOT), **common)
        needs = request.needs
        resources = self._sdk.Resources(
            cpu=round(-(-(needs.cpus or self._config.cpus) // 1)),
            memory=-(-(needs.memory_mb or self._config.memory_mb) // 1024),
            disk=-(-needs.storage_mb // 1024) if needs.storage_mb is not None else None,
        )
        return self._sdk.CreateSandboxFromImageParams(image=image, resources=resources, **common)

    async def find(self, labels: Mapping[str, str]) -> list[ListedBox]:
        with self._translating("listing boxes"):
            query = self._sdk.ListSandboxesQuery(labels=dict(labels))
            boxes = self._client.list(query, request_timeout=CALL_TIMEOUT_S)
            return [ListedBox(box.id, box.labels) async for box in boxes]

    async def end(self, box_id: str) -> None:
        with contextlib.suppress(SandboxLost), self._translating("ending a box"):
            await self._client.delete(await self._box(box_id), timeout=CALL_TIMEOUT_S)
        self._boxes.pop(box_id, None)

    async def open(self, box_id: str, argv: Sequence[str], *, root: bool) -> Channel:
        """Runs as the box's user, which is root if the session asked for its own root."""
        session_id = f"penstock-{secrets.token_hex(6)}"
        with self._translating("starting a program in a box"):
            process = (await self._box(box_id)).process
            await process.create_session(session_id, request_timeout=CALL_TIMEOUT_S)
            command = self._sdk.SessionExecuteRequest(
                command=shlex.join(argv), run_async=True, suppress_input_echo=True
            )
            started = await process.execute_session_command(session_id, command, timeout=int(CALL_TIMEOUT_S))
        return DaytonaChannel(process, session_id, started.cmd_id)

    async def close(self) -> None:
        if self._connected is not None:
            await self._connected.close()
            self._connected = None

    @property
    def _client(self) -> AsyncDaytona:
        """Made at the first call, which is inside a running loop."""
        if self._connected is None:
            self._connected = self._sdk.AsyncDaytona()
        return self._connected

    async def _box(self, box_id: str) -> AsyncSandbox:
        if box_id not in self._boxes:
            self._boxes[box_id] = await self._client.get(box_id, request_timeout=CALL_TIMEOUT_S)
        return self._boxes[box_id]

    @contextlib.contextmanager
    def _translating(self, doing: str, image: str | None = None) -> Iterator[None]:
        """Raises our errors for the SDK's. `image`: of the box that is made."""
        try:
            yield
        except self._sdk.DaytonaError as error:
            raise _failure(doing, error, image) from error
        except (OSError, RuntimeError) as error:
            raise ApiUnavailable(f"daytona: {doing}: {type(error).__name__} {error}") from error


def _failure(doing: str, error: Any, image: str | None) -> SandboxError:
    text, status = f"daytona: {doing}: {error}", error.status_code
    if image is not None and ("build_failed" in str(error).lower() or status in (400, 404, 422)):
        return NoSuchImage(f"{text}: no box can be made of {image!r}: name another (sandbox.image)")
    if status is None or status >= _SERVER_ERROR:
        return ApiUnavailable(text)
    if status == _BUSY:
        return ApiBusy(text, asked_pause_s(error.headers))
    if status in _REFUSED:
        return SandboxError(f"{text}: the key in {KEY} is refused")
    return SandboxLost(text) if status == _NOT_FOUND else SandboxError(text)


class DaytonaChannel(ReceivedOutput):
    """Input and output of a session's only command."""

    def __init__(self, process: Any, session_id: str, command_id: str) -> None:
        super().__init__()
        self._process = process
        self._ids = (session_id, command_id)
        output = process.get_session_command_logs_async(*self._ids, self.on_stdout, self.on_stderr)
        self._follow(output, f"output of Daytona command {command_id}")

    async def write(self, data: bytes) -> None:
        """Whole lines: the daemon ends each piece of input with a line's end if it has none."""
        try:
            await self._process.send_session_command_input(
                *self._ids, data.decode("ascii"), request_timeout=CALL_TIMEOUT_S
            )
        except Exception as error:
            raise ChannelBroken(f"daytona: writing to a box: {error}") from error

    async def close(self) -> None:
        await self._stop_following()
        with contextlib.suppress(Exception):  # its box may be gone, or cannot be reached: the program ends with it
            async with asyncio.timeout(CLOSE_S):
                await self._process.delete_session(self._ids[0], request_timeout=CLOSE_S)
