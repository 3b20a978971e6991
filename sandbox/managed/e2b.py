"""Boxes of E2B, by its SDK: micro virtual machines, made from templates.

The key is E2B_API_KEY; E2B_DOMAIN names another deployment. The SDK itself waits for a Retry-After, within the time of
one request; creating has an idempotency key. A box has the size of its template.
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
from penstock.sandbox.managed.box import shell_line
from penstock.sandbox.protocol import BoxNeeds, NoSuchImage, SandboxError, SandboxLost, UnmetNeeds

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

KEY = "E2B_API_KEY"
WRITE_BYTES = 512 << 10
_BAD_REQUEST, _NOT_FOUND, _SERVER_ERROR = 400, 404, 500


class E2BApi:
    def __init__(self, config: SandboxConfig) -> None:
        """Raises `SandboxError` where the SDK or the key is missing."""
        try:
            import e2b
        except ImportError as error:
            raise SandboxError("the `e2b` package is missing: `pip install 'penstock[e2b]'`") from error
        if not os.environ.get(KEY):
            raise SandboxError(f"sandbox.backend is e2b: set {KEY} to a key of https://e2b.dev")
        self._sdk = e2b
        self._config = config
        self._boxes: dict[str, AsyncSandbox] = {}
        network = "the internet" if config.managed.network else "no network"
        self.containment = f"a virtual machine per session, {network}, sized by its template"

    def check_needs(self, needs: BoxNeeds) -> None:
        for name in ("memory_mb", "cpus", "storage_mb"):
            if getattr(needs, name) is not None:
                raise UnmetNeeds(
                    f"a session asks for {name}, which boxes of e2b cannot have by session: "
                    "build a template of that size, and name it as the task's image"
                )

    async def create(self, request: BoxRequest) -> str:
        with self._translating("making a box", image=request.image or self._config.image):
            box = await self._sdk.AsyncSandbox.create(
                request.image or self._config.image,
                timeout=request.ttl_s,
                metadata=dict(request.labels),
                allow_internet_access=self._config.managed.network,
                idempotency_key=request.key,
                **self._options(),
            )
        self._boxes[box.sandbox_id] = box
        return box.sandbox_id

    async def find(self, labels: Mapping[str, str]) -> list[ListedBox]:
        boxes: list[ListedBox] = []
        with self._translating("listing boxes"):
            pages = self._sdk.AsyncSandbox.list(self._sdk.SandboxQuery(metadata=dict(labels)), **self._options())
            while pages.has_next:
                boxes += [ListedBox(box.sandbox_id, box.metadata) for box in await pages.next_items()]
        return boxes

    async def end(self, box_id: str) -> None:
        with self._translating("ending a box"):
            await self._sdk.AsyncSandbox.kill(box_id, **self._options())
        self._boxes.pop(box_id, None)

    async def open(self, box_id: str, argv: Sequence[str], *, root: bool) -> Channel:
        channel = E2BChannel()
        with self._translating("starting a program in a box"):
            if box_id not in self._boxes:
                self._boxes[box_id] = await self._sdk.AsyncSandbox.connect(box_id, **self._options())
            channel.follow(
                await self._boxes[box_id].commands.run(
                    shell_line(argv),
                    background=True,
                    stdin=True,
                    user="root" if root else None,
                    timeout=0,
                    on_stdout=channel.on_stdout,
                    on_stderr=channel.on_stderr,
                    request_timeout=CALL_TIMEOUT_S,
                    retain_output=False,
                )
            )
        return channel

    async def close(self) -> None:
        """The SDK keeps its connections for the process."""
        self._boxes.clear()

    def _options(self) -> dict[str, Any]:
        return {"request_timeout": CALL_TIMEOUT_S, "retries": 2}

    @contextlib.contextmanager
    def _translating(self, doing: str, image: str | None = None) -> Iterator[None]:
        """Raises our errors for the SDK's. `image`: of the box that is made."""
        import httpx

        sdk = self._sdk
        try:
            yield
        except (sdk.RateLimitException, sdk.exceptions.ServiceBusyException) as error:
            raise ApiBusy(f"e2b: {doing}: {error}") from error
        except sdk.AuthenticationException as error:
            raise SandboxError(f"e2b: {doing}: the key in {KEY} is refused: {error}") from error
        except (sdk.exceptions.SandboxNotRunningException, sdk.SandboxNotFoundException) as error:
            raise SandboxLost(f"e2b: {doing}: {error}") from error
        except (sdk.TimeoutException, httpx.HTTPError, OSError) as error:
            raise ApiUnavailable(f"e2b: {doing}: {type(error).__name__} {error}") from error
        except sdk.SandboxException as error:
            raise _failure(doing, error, image) from error


def _failure(doing: str, error: Any, image: str | None) -> SandboxError:
    if (error.status_code or _SERVER_ERROR) >= _SERVER_ERROR:
        return ApiUnavailable(f"e2b: {doing}: {error}")
    if image is not None and error.status_code in (_BAD_REQUEST, _NOT_FOUND):
        return NoSuchImage(
            f"e2b: {doing}: {error}: build the template {image!r} (`e2b template build`), or name another"
        )
    return SandboxError(f"e2b: {doing}: {error}")


class E2BChannel(ReceivedOutput):
    """Stdin and stdout of a command."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: AsyncCommandHandle[None] | None = None

    def follow(self, handle: AsyncCommandHandle[None]) -> None:
        self._handle = handle
        self._follow(handle.wait(), f"output of E2B process {handle.pid}")

    async def write(self, data: bytes) -> None:
        assert self._handle is not None
        for start in range(0, len(data), WRITE_BYTES):
            try:
                await self._handle.send_stdin(data[start : start + WRITE_BYTES], CALL_TIMEOUT_S)
            except Exception as error:
                raise ChannelBroken(f"e2b: writing to a box: {error}") from error

    async def close(self) -> None:
        assert self._handle is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._handle.disconnect()
        await self._stop_following()
