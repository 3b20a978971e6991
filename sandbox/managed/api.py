"""The protocol of a provider, as `ManagedSandbox` uses it, and the failures that it understands.

An adapter is one file: it makes, lists and ends boxes, and opens a program's stdin and stdout in one. It maps what its
SDK raises to the errors below, and retries nothing itself: the base decides what is tried again, and how long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.common import Registry, cancel_and_wait
from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.protocol import BoxNeeds, SandboxBusy, SandboxError

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0
"""Deadline of one request to a provider's API."""
CLOSE_S = 5.0
"""Deadline of ending a channel."""


class ApiBusy(SandboxBusy):
    """The provider refuses more requests or boxes now (429); nothing was done."""


class ApiUnavailable(SandboxError):
    """The provider answered 5xx, or nothing: what was asked may have been done, or may be done later."""


class CostLimit(SandboxError):
    """The boxes of this process have cost as much as they may; the message names the setting."""


class ChannelBroken(SandboxError):
    """A connection to a program in a box ended; the box may live."""


@dataclass(frozen=True, slots=True)
class BoxRequest:
    """One box to be made."""

    key: str
    """Names this request alone: lower-case letters and digits. Providers that know idempotency keys get it as one."""
    labels: Mapping[str, str]
    image: str | None
    """Image, template or snapshot by the provider's name; None: the configured one."""
    needs: BoxNeeds
    ttl_s: int
    """The provider ends the box at this age, whatever happens to its maker."""


@dataclass(frozen=True, slots=True)
class ListedBox:
    box_id: str
    labels: Mapping[str, str]


class Channel(Protocol):
    """Stdin and stdout of one program in a box. ASCII lines travel on it: some providers carry text alone."""

    async def write(self, data: bytes) -> None:
        """Raises `ChannelBroken`."""

    async def read(self) -> bytes:
        """Returns the next bytes of stdout; empty after the end of the program or of the connection."""

    @property
    def stderr_tail(self) -> str: ...

    async def close(self) -> None:
        """Ends the connection; never raises."""


class ReceivedOutput:
    """The reading half of a `Channel` whose SDK gives a program's output to callbacks."""

    def __init__(self) -> None:
        self.stderr_tail = ""
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._following: asyncio.Task[None] | None = None

    def on_stdout(self, text: str) -> None:
        self._received.put_nowait(text.encode())

    def on_stderr(self, text: str) -> None:
        self.stderr_tail = (self.stderr_tail + text)[-2000:].strip()

    async def read(self) -> bytes:
        """See `Channel`."""
        return await self._received.get()

    def _follow(self, output: Awaitable[object], name: str) -> None:
        """`output` lasts as long as the program prints."""
        self._following = asyncio.create_task(self._until_ended(output), name=name)

    async def _until_ended(self, output: Awaitable[object]) -> None:
        try:
            await output
        except Exception as error:  # noqa: BLE001 - whatever ended the stream, the reader finds it ended
            logger.debug("sandbox: output of a box ended: %s", error)
        finally:
            self._received.put_nowait(b"")

    async def _stop_following(self) -> None:
        if self._following is not None:
            await cancel_and_wait([self._following])


def asked_pause_s(headers: Mapping[str, str]) -> float | None:
    """The seconds of a Retry-After header."""
    after = {name.lower(): value for name, value in headers.items()}.get("retry-after", "")
    return float(after) if after.isdigit() else None


class ManagedApi(Protocol):
    """One provider. Every call but `close` raises `ApiBusy`, `ApiUnavailable`, and `SandboxError` for a refusal."""

    containment: str
    """Which walls the provider gives, in words."""

    def check_needs(self, needs: BoxNeeds) -> None:
        """Raises `UnmetNeeds` where a box cannot be made so."""

    async def create(self, request: BoxRequest) -> str:
        """The id of a running box; asked again with the same key, of the same box. Raises `NoSuchImage` too."""

    async def find(self, labels: Mapping[str, str]) -> list[ListedBox]:
        """The living boxes with all of `labels`."""

    async def end(self, box_id: str) -> None:
        """A box that is gone already is not an error."""

    async def open(self, box_id: str, argv: Sequence[str], *, root: bool) -> Channel:
        """Starts a program, as root or as the image's user. Raises `SandboxLost` where the box is gone."""

    async def close(self) -> None:
        """Closes connections; boxes stay."""


@runtime_checkable
class CopyingApi(ManagedApi, Protocol):
    """A provider that can make an image of a box. Both calls raise as the others do."""

    async def copy(self, box_id: str, ttl_s: int) -> str:
        """An image of what the box has written to its disk; the provider drops it at this age."""

    async def forget(self, image: str) -> None:
        """Deletes an image of a copy. An image that does not exist is not an error."""


MakeApi = Callable[[SandboxConfig], ManagedApi]
"""Raises `SandboxError` where the SDK or its key is missing; the message names the fix."""
PROVIDERS: Registry[MakeApi] = Registry(
    "managed sandbox",
    {
        "daytona": "penstock.sandbox.managed.daytona:DaytonaApi",
        "e2b": "penstock.sandbox.managed.e2b:E2BApi",
        "kubernetes": "penstock.sandbox.managed.kubernetes:KubernetesApi",
        "modal": "penstock.sandbox.managed.modal:ModalApi",
    },
)
KEYS: Mapping[str, tuple[str, ...]] = {
    "daytona": ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"),
    "e2b": ("E2B_API_KEY", "E2B_ACCESS_TOKEN"),
    "modal": ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
}
"""The environment variables that hold each provider's keys: for the processes that make boxes, and no other."""
