"""The weights of an inference server with an HTTP API: swapped while requests are in flight.

    decoding ─────────┬─ its last step ─┐ paused                         ┌── decoding
    fetch: read, check│ request a pause │ load · label · settle · verify │ resume
    └─ fetch_s ───────┘                 │ └ load_s ┘                     │
                                        └─ pause_s ──────────────────────┘

Where `verifies_late`, decoding continues while the server's weights are verified, and what is sampled meanwhile is held
back here: handed on if they are the version's, else dropped with the server.

A broadcast that is received in place begins a pause; the load of that version, or of a file, ends it:

    decoding ── join ─┬─ its last step ─┐ paused                                            ┌── decoding
                      │ request a pause │ receive · (announcement) · label · settle         │ resume
                                        └─ pause_s ─────────────────────────────────────────┘

New requests wait at `admission` meanwhile. Each carries `cache_salt`, so that the prefix cache never gives keys and
values of older weights to a request that began under newer ones; nothing has to be flushed. Any failure that leaves the
server in an unknown state ends it: half a version never samples.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.checkpoint import Shapes, tensor_shapes
from penstock.rollout_server.engines.http.server_process import ChildServer
from penstock.rollout_server.engines.http.stream import AnswerStream, version_of
from penstock.rollout_server.protocol import EngineError, SleepLevel
from penstock.weight_sync import LoadReport, Manifest, WeightsBroken, WeightsRefused, WeightsUnreachable

logger = logging.getLogger(__name__)
Fetched = TypeVar("Fetched")
"""A version that was read and verified, in the form that the server gets."""


class Admission:
    """Requests pass here, except while the server is paused."""

    def __init__(self) -> None:
        self.closings = 0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def wait(self, deadline: float) -> int:
        """`closings`, once it is open. Raises `EngineError` at `deadline` (monotonic)."""
        if self._open.is_set():
            return self.closings
        try:
            await asyncio.wait_for(self._open.wait(), deadline - time.monotonic())
        except TimeoutError as error:
            raise EngineError("the weight swap did not end before the request's deadline") from error
        return self.closings

    def close(self) -> None:
        if self._open.is_set():
            self.closings += 1
            self._open.clear()

    def open(self) -> None:
        self._open.set()


@dataclass(slots=True)
class Standstill:
    """A pause under way."""

    since: float
    """When the last token came (monotonic)."""
    in_flight: int
    """Requests that will continue."""
    broadcast: str = ""
    """Name of the broadcast that came whole meanwhile; empty where none did."""
    state: str = ""
    """State of the received tensors."""
    receive_s: float = 0.0

    def holds(self, manifest: Manifest) -> bool:
        """Returns True if exactly this version was received: every name, shape, dtype and checksum."""
        return manifest.transport == "broadcast" and (self.broadcast, self.state) == (
            manifest.broadcast_name,
            manifest.state,
        )


class HttpWeights(ABC, Generic[Fetched]):
    """One server's weights, and the version under which its tokens are received. Subclasses add routes and bodies."""

    version_path: ClassVar[str]
    """Sets `weight_version`."""
    verifies_late: ClassVar[bool] = False
    """`_verify` is done after `_resume`, while what is sampled is held back."""

    def __init__(
        self, config: RolloutConfig, model: str, server: ChildServer, streams: Collection[AnswerStream]
    ) -> None:
        """`streams`: answers that are being received."""
        self.config, self.model = config, model
        self.server, self.streams = server, streams
        self.shapes: Shapes = {}
        """Shape of each tensor of the model; known from the start on."""
        self.version = 0
        self.verified = True
        """The server's values were compared with `version`; False while that is under way, and if they differ."""
        self.admission = Admission()
        self.asleep = False
        """No request is sent to the server."""
        self.standstill: Standstill | None = None
        """The pause that a broadcast in place began; the server holds no version, or one that is not announced."""
        self.dropped = False
        """The server has had no weights since it slept: until a version is loaded it stays paused. A request may have
        reached it while it fell asleep, and would be sampled from memory that holds nothing."""
        self._loads = 0
        """A version that comes a second time with other weights must not find the first one's prefixes."""
        self._one_at_a_time = asyncio.Lock()
        self._verifying: asyncio.Task[None] | None = None

    @abstractmethod
    async def _look(self) -> list[str]:
        """Determines what can be verified, on the weights that the server came up with; returns limits in words."""

    @abstractmethod
    def _fetch(self, manifest: Manifest) -> AbstractAsyncContextManager[Fetched]:
        """Verify every byte, name and shape while decoding continues. Raises `WeightsRefused`."""

    @abstractmethod
    async def _pause(self) -> None:
        """Returns once nothing is sampled any more; requests in flight are treated as `config.pause` says."""

    @abstractmethod
    async def _load(self, version: int, fetched: Fetched) -> None:
        """Put the version in and label it. Raises `WeightsRefused` only where nothing was touched."""

    @abstractmethod
    async def _verify(self, fetched: Fetched) -> None:
        """Raises `EngineError` where the values in the server differ from those of the version."""

    @abstractmethod
    async def _resume(self) -> None:
        """Decoding continues. Where weights were `dropped` a version has been loaded."""

    @abstractmethod
    async def _sleep(self, level: SleepLevel) -> None:
        """End what is in flight, and free the devices' memory."""

    @abstractmethod
    async def _wake(self) -> None:
        """The reverse; decoding continues unless weights were `dropped`."""

    async def sleep(self, level: SleepLevel) -> None:
        """Answers in flight end as ``abort``. Any failure ends the server, which frees the memory in any case.

        Raises `EngineError`.
        """
        async with self._one_at_a_time:
            await self.until_verified()  # the workers compare what they hold, which must be there
            self.asleep = True
            async with self._or_end(f"{self.server.name} did not fall asleep in"):
                await self._sleep(level)
            self.dropped = self.dropped or level > 1
            self._loads += 1  # no prefix is left

    async def wake(self) -> None:
        """Raises `EngineError`; the server has ended then."""
        async with self._one_at_a_time:
            async with self._or_end(f"{self.server.name} did not wake up in"):
                await self._wake()
            self.asleep = False

    @asynccontextmanager
    async def _or_end(self, late: str, timeout_s: float | None = None) -> AsyncGenerator[None]:
        """Bounds the block by `timeout_s` or the server's; `late` is the error then. What leaves the server in an
        unknown state ends it."""
        within_s = self.server.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(within_s):
                yield
        except (WeightsRefused, WeightsUnreachable, WeightsBroken):
            raise
        except TimeoutError as error:
            await self.server.stop()
            raise EngineError(f"{late} {within_s:g} s") from error
        except BaseException:
            await self.server.stop()
            raise

    async def start(self) -> list[str]:
        """Ask the running server for its version; returns what cannot be done. Raises `EngineError`."""
        self.shapes = await asyncio.to_thread(tensor_shapes, self.model)
        limits = await self._look()
        self.version = await self.server_version()
        if not self.shapes:
            limits.append(f"{self.model} has no safetensors to compare with: incomplete versions are not detected")
        return limits

    async def swap(self, manifest: Manifest) -> LoadReport:
        """Fetch, verify, pause, load, verify again, resume.

        `WeightsRefused`: nothing was touched, the old weights serve. `EngineError`: the server's state is unknown, so
        it was ended; the sidecar starts another.
        """
        async with self._one_at_a_time:
            begin = time.monotonic()
            async with self._fetch(manifest) as fetched:
                await self.until_verified()  # tokens of two versions on trial could not be distinguished
                fetch_s = time.monotonic() - begin
                self.admission.close()
                try:
                    async with self._or_end("the weight swap took more than"):
                        pause_s, load_s, in_flight = await self._pause_and_load(manifest.version, fetched)
                finally:
                    self._admit()
        return LoadReport(version=self.version, fetch_s=fetch_s, pause_s=pause_s, load_s=load_s, in_flight=in_flight)

    def _admit(self) -> None:
        """Requests are sent again, unless the server is paused."""
        if self.standstill is None or not self.server.alive:
            self.admission.open()

    async def _pause_and_load(self, version: int, fetched: Fetched) -> tuple[float, float, int]:
        """(seconds without a token, of loading, requests that continue)"""
        pause = self.standstill or await self._stand_still()
        begin = time.monotonic()
        try:
            await self._load(version, fetched)
        except WeightsRefused:
            if self.standstill is None and not self.dropped:
                await self._resume()
            raise
        return await self._serve(version, pause, time.monotonic() - begin, fetched)

    async def _stand_still(self) -> Standstill:
        """Returns once nothing is sampled any more."""
        requested_at = time.monotonic()
        await self._pause()
        # The step that was under way when we asked continued sampling: the pause begins with its tokens.
        since = max([requested_at, *(stream.received_at for stream in self.streams)])
        self._read_all()
        # Aborted answers do not continue, though the last events of some are still on their way.
        in_flight = 0 if self.config.pause == "abort" else sum(not stream.ended for stream in self.streams)
        return Standstill(since, in_flight)

    async def _serve(
        self, version: int, pause: Standstill, load_s: float, fetched: Fetched | None
    ) -> tuple[float, float, int]:
        """The server holds `version` under its label: resume. `fetched`: to compare with; None if that was done."""
        if (reported := await self.server_version()) != version:
            raise EngineError(f"{self.server.name} reports version {reported} after loading {version}")
        await self._settle()
        late = self.verifies_late and fetched is not None
        if fetched is not None and not late:
            await self._verify(fetched)
        self.version, self._loads, self.verified = version, self._loads + 1, not late
        for stream in self.streams:  # what they receive from now on was sampled by `version`
            stream.relabel(version)
            if late:
                stream.hold()
        await self._resume()
        self.standstill, self.dropped = None, False
        if late and fetched is not None:
            self._verifying = asyncio.create_task(self._release_or_end(fetched), name=f"verify version {version}")
        return time.monotonic() - pause.since, load_s, pause.in_flight

    async def _release_or_end(self, fetched: Fetched) -> None:
        """Hand on what was held back, or end the server, which drops it."""
        try:
            await self._verify(fetched)
        except (EngineError, OSError) as error:
            logger.error("what was sampled since version %d was loaded is dropped: %s", self.version, error)
            await self.server.stop()
            return
        self.verified = True
        for stream in self.streams:
            stream.release()

    async def until_verified(self) -> None:
        """The last load was verified, or its server has ended."""
        if self._verifying is not None:
            await asyncio.wait({self._verifying})

    # versions of tokens ---------------------------------------------------------------------------------------------
    @property
    def cache_salt(self) -> str:
        """Requests of one salt share prefixes."""
        return f"v{self.version}-{self._loads}"

    async def _settle(self) -> None:
        """Receive everything that was sampled before the pause: tokens are labelled with the version of that moment.

        The server is idle and has answered several calls since, each behind its tokens in the same queues; what is left
        is in our sockets, and each turn of the loop reads those. After 10 turns without a token none is on its way.
        """
        quiet_turns, received = 0, -1
        while quiet_turns < 10:
            await asyncio.sleep(0)
            now = self._read_all()
            quiet_turns = quiet_turns + 1 if now == received else 0
            received = now

    def _read_all(self) -> int:
        """Takes apart what was received; the tokens of all open answers."""
        for stream in self.streams:
            stream.read()
        return sum(stream.received for stream in self.streams)

    async def server_version(self) -> int:
        """Returns the version that the server reports. Raises `EngineError`."""
        return version_of((await self.server.call("GET", self.version_path))["weight_version"])
