"""Boxes of Modal, by its SDK: gVisor containers or machines, made from images of registries or from Modal's own.

The key is MODAL_TOKEN_ID with MODAL_TOKEN_SECRET; MODAL_ENVIRONMENT names an environment of theirs. An image that is
written ``im-…`` is one that Modal has; any other is fetched from its registry, once, without its entry point. A box's
name is made of its request, so a request that comes twice makes one.

The SDK runs its own event loop, in a thread: what is awaited here runs there. It retries a failing
call four times, and resumes reading a program's output after a broken connection. Its own wait when throttled is
unbounded; it is set to zero here, and the base waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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
)
from penstock.sandbox.protocol import BoxNeeds, NoSuchImage, SandboxError, SandboxLost, UnmetNeeds

if TYPE_CHECKING:
    from modal import App, Client, Image, Sandbox
    from modal.container_process import ContainerProcess

ID, SECRET = "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"
APP = "penstock"
"""Modal's app that all boxes belong to; made at the first use."""
KEEP_OPEN = ("sleep", "infinity")
WRITE_BYTES = 1 << 20


class ModalApi:
    """See `CopyingApi`. All boxes run as root: that is what Modal gives."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises `SandboxError` where the SDK or the key is missing."""
        try:
            import modal
            import modal.experimental
        except ImportError as error:
            raise SandboxError("the `modal` package is missing: `pip install 'penstock[modal]'`") from error
        if missing := [name for name in (ID, SECRET) if not os.environ.get(name)]:
            raise SandboxError(f"sandbox.backend is modal: set {' and '.join(missing)} (`modal token new` makes both)")
        os.environ.setdefault("MODAL_MAX_THROTTLE_WAIT", "0")
        self._sdk = modal
        self._config = config
        self._connecting = asyncio.Lock()
        self._client: Client | None = None
        self._app: App | None = None
        self._boxes: dict[str, Sandbox] = {}
        self._images: dict[str, Image] = {}
        network = "the internet" if config.managed.network else "no network"
        runtime = config.runtime or "the runtime that Modal picks"
        self.containment = f"a container per session ({runtime}), {network}, its code as the container's root"

    def check_needs(self, needs: BoxNeeds) -> None:
        if needs.storage_mb is not None:
            raise UnmetNeeds("a session asks for storage_mb, which boxes of modal cannot have: Modal sizes their disks")

    # ---- boxes

    async def create(self, request: BoxRequest) -> str:
        name = f"penstock-{request.key}"
        image = request.image or self._config.image
        with self._translating("making a box", image=image):
            box = await self._create_box(name, image, request)
            program = await box.exec.aio("true")  # a box that is made may still wait for a machine, or for its image
            await program.wait.aio()
        self._boxes[box.object_id] = box
        return str(box.object_id)

    async def _create_box(self, name: str, image: str, request: BoxRequest) -> Sandbox:
        client, app = await self._connected()
        modal_image, needs = self._image(image), request.needs
        cpus, memory_mb = needs.cpus or self._config.cpus, needs.memory_mb or self._config.memory_mb
        try:
            box = await self._sdk.Sandbox.create.aio(
                *KEEP_OPEN,
                app=app,
                client=client,
                name=name,
                tags=dict(request.labels),
                image=modal_image,
                timeout=request.ttl_s,
                cpu=(cpus, cpus),
                memory=(memory_mb, memory_mb),
                runtime=self._config.runtime,
                block_network=not self._config.managed.network,
            )
        except self._sdk.exception.AlreadyExistsError:  # this request, asked for a second time
            return await self._named(name, client)
        self._images[image] = modal_image
        return box

    async def _named(self, name: str, client: Client) -> Sandbox:
        try:
            return await self._sdk.Sandbox.from_name.aio(APP, name, client=client)
        except self._sdk.exception.NotFoundError as error:
            raise ApiUnavailable(f"modal: box {name} was made, and is not found: {error}") from error

    def _image(self, name: str) -> Image:
        """The same object once a box was made of it: a new one would be asked for again."""
        if name in self._images:
            return self._images[name]
        if name.startswith("im-"):
            return self._sdk.Image.from_id(name, client=self._client)
        return self._sdk.Image.from_registry(name).entrypoint([])

    async def find(self, labels: Mapping[str, str]) -> list[ListedBox]:
        boxes: list[ListedBox] = []
        with self._translating("listing boxes"):
            client, app = await self._connected()
            async for box in self._sdk.Sandbox.list.aio(app_id=app.app_id, tags=dict(labels), client=client):
                with contextlib.suppress(self._sdk.exception.NotFoundError):  # it ended meanwhile
                    boxes.append(ListedBox(box.object_id, await box.get_tags.aio()))
        return boxes

    async def end(self, box_id: str) -> None:
        with contextlib.suppress(SandboxLost), self._translating("ending a box"):
            box = await self._box(box_id)
            with contextlib.suppress(self._sdk.exception.NotFoundError):
                await box.terminate.aio()
            await box.detach.aio()
        self._boxes.pop(box_id, None)

    async def open(self, box_id: str, argv: Sequence[str], *, root: bool) -> Channel:
        """Runs as root, whatever `root` says: Modal has no other user."""
        with self._translating("starting a program in a box"):
            box = await self._box(box_id)
            return ModalChannel(await box.exec.aio(*argv, text=False))

    async def close(self) -> None:
        self._boxes.clear()
        self._images.clear()
        client, self._client, self._app = self._client, None, None
        if client is not None:
            await client.close.aio()

    # ---- copies

    async def copy(self, box_id: str, ttl_s: int) -> str:
        """Makes an image of Modal's, which lacks what the box has in memory."""
        with self._translating("copying a box"):
            box = await self._box(box_id)
            image = await box.snapshot_filesystem.aio(timeout=int(self._config.managed.start_timeout_s), ttl=ttl_s)
        return str(image.object_id)

    async def forget(self, image: str) -> None:
        with contextlib.suppress(SandboxLost), self._translating("removing a copy"):
            client, _ = await self._connected()
            await self._sdk.experimental.image_delete.aio(image, client=client)
        self._images.pop(image, None)

    # ---- the connection

    async def _connected(self) -> tuple[Client, App]:
        """Inside `_translating`. A client of our own: the SDK's is shared with whatever else this process does."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._sdk.Client.from_credentials.aio(os.environ[ID], os.environ[SECRET])
            if self._app is None:
                self._app = await self._sdk.App.lookup.aio(APP, client=self._client, create_if_missing=True)
            return self._client, self._app

    async def _box(self, box_id: str) -> Sandbox:
        if box_id not in self._boxes:
            client, _ = await self._connected()
            self._boxes[box_id] = await self._sdk.Sandbox.from_id.aio(box_id, client=client)
        return self._boxes[box_id]

    @contextlib.contextmanager
    def _translating(self, doing: str, image: str | None = None) -> Iterator[None]:
        """Raises our errors for the SDK's. `image`: of the box that is made."""
        from grpclib.exceptions import StreamTerminatedError

        try:
            yield
        except self._sdk.exception.Error as error:
            raise self._failure(doing, error, image) from error
        except (StreamTerminatedError, OSError) as error:
            raise ApiUnavailable(f"modal: {doing}: {type(error).__name__} {error}") from error

    def _failure(self, doing: str, error: Exception, image: str | None) -> SandboxError:
        sdk, text = self._sdk.exception, f"modal: {doing}: {error}"
        if isinstance(error, sdk.ResourceExhaustedError):
            details = getattr(error, "_grpc_details", None) or ()  # where the SDK keeps those of a gRPC error
            waits_s = [getattr(detail, "retry_after_secs", None) for detail in details]
            return ApiBusy(text, next((float(wait_s) for wait_s in waits_s if wait_s is not None), None))
        if isinstance(error, sdk.AuthError | sdk.PermissionDeniedError):
            return SandboxError(f"{text}: the key in {ID} and {SECRET} is refused")
        if isinstance(error, sdk.ServiceError | sdk.InternalError | sdk.ConnectionError | sdk.TimeoutError):
            return ApiUnavailable(f"{text} ({type(error).__name__})")
        if image is not None and isinstance(error, sdk.ImageBuildError | sdk.NotFoundError):
            return NoSuchImage(f"{text}: no box can be made of {image!r}: name another (sandbox.image)")
        if image is None and isinstance(error, sdk.NotFoundError | sdk.ConflictError):
            return SandboxLost(text)
        return SandboxError(f"{text} ({type(error).__name__})")


class ModalChannel(ReceivedOutput):
    """Stdin and stdout of a program that `exec` started."""

    def __init__(self, process: ContainerProcess[bytes]) -> None:
        super().__init__()
        self._process = process
        self._follow(self._output(), "output of a Modal process")

    async def _output(self) -> None:
        async with asyncio.TaskGroup() as streams:
            streams.create_task(self._copy(self._process.stdout, self.on_stdout))
            streams.create_task(self._copy(self._process.stderr, self.on_stderr))

    async def _copy(self, stream: Any, take: Any) -> None:
        async for data in stream:
            take(data.decode("utf-8", "replace"))

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), WRITE_BYTES):
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    self._process.stdin.write(data[start : start + WRITE_BYTES])
                    await self._process.stdin.drain.aio()
            except Exception as error:
                raise ChannelBroken(f"modal: writing to a box: {type(error).__name__} {error}") from error

    async def close(self) -> None:
        """The end of its input ends the program."""
        await self._stop_following()
        with contextlib.suppress(Exception):  # its box may be gone, or cannot be reached: the program ends with it
            async with asyncio.timeout(CLOSE_S):
                self._process.stdin.write_eof()
                await self._process.stdin.drain.aio()
