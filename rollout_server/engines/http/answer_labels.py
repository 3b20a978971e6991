"""What the answers of an HTTP engine are sent and labelled under, in each process that asks the engine.

One process owns the engine; others may ask it beside (`rollout.sidecar_processes`). Each has its own streams, so each
labels tokens by itself, and a swap goes through all of them:

    owner     no sending ──follow──► pause ─ load ─ check label ──follow──► resume ──tell──► verified ──tell──►
    beside               no sending                  settle · relabel · hold         sending           release

`follow` returns when every process has the owner's state of that moment, or has ended with its connections. From this
follows that a token has its version in every process:

- Between the two calls of `follow` the engine samples nothing: it is paused. So all tokens of the old version exist
  before the second one, all of the new version after it.
- Before a process answers the second call it has received every token that exists (`AnswerLabels.settle_behind_fence`):
  each is labelled with the old version. What it receives later is labelled with the new one.
- A process that does not answer is killed before the engine resumes. The tokens that it had not received are dropped.

The engine's own report at the end of an answer verifies the labels, in each process as in one (`AnswerStream`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict

from penstock.rollout_server.engines.http.event_client import EngineAddress
from penstock.rollout_server.engines.http.server_process import ChildServer
from penstock.rollout_server.engines.http.stream import AnswerStream, version_of
from penstock.rollout_server.protocol import EngineError, EngineInfo

QUIET_TURNS = 10
"""Turns of the event loop, each of which polls every socket, without a token: then none is on its way."""
QUIET_FENCES = 2
"""Calls to the engine in a row, during which nothing is received: then it holds nothing back."""


class EngineState(BaseModel):
    """What a process beside the owner must know of a running engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: EngineAddress
    info: EngineInfo
    version: int
    loads: int
    """Of weights, and sleeps: each ends the prefixes of before."""
    verified: bool
    """What the engine holds was found to be `version`; until then what is sampled is held back."""
    admits: bool
    """Requests are sent; else they wait."""
    asleep: bool


class Continuing(NamedTuple):
    """Answers of a process that go on, as it takes over a state."""

    in_flight: int
    received_at: float
    """When the last of their bytes came (monotonic, the same clock in all processes of a machine); 0.0: never."""


class Followers(Protocol):
    """The processes beside the owner. Asked by the engine whose state they follow, which has changed already."""

    async def follow(self) -> Continuing:
        """Returns when each has the state of this moment, or has ended. Raises nothing."""

    def tell(self) -> None:
        """The same without waiting. States arrive in order."""


class NoFollowers:
    """Of an engine that one process asks."""

    async def follow(self) -> Continuing:
        return Continuing(0, 0.0)

    def tell(self) -> None:
        """There is no other process."""


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


class AnswerLabels:
    """One process's. The owner's is changed by `HttpWeights`, the others' by `adopt`."""

    def __init__(self, server: ChildServer, streams: Collection[AnswerStream], version_path: str) -> None:
        """Args:
        streams: answers that are being received here.
        version_path: route that tells `weight_version`.
        """
        self.server, self.streams = server, streams
        self.version = 0
        self.verified = True
        """What the server holds was found to be `version`; False while that is being looked at, and if it is not."""
        self.admission = Admission()
        self.asleep = False
        """No request is sent to the server."""
        self._loads = 0
        """A version that comes a second time with other weights must not find the first one's prefixes."""
        self._version_path = version_path

    @property
    def cache_salt(self) -> str:
        """Requests of one salt share prefixes."""
        return f"v{self.version}-{self._loads}"

    def state(self, address: EngineAddress, info: EngineInfo) -> EngineState:
        """What others must know."""
        return EngineState(
            address=address,
            info=info,
            version=self.version,
            loads=self._loads,
            verified=self.verified,
            admits=self.admission.is_open,
            asleep=self.asleep,
        )

    async def adopt(self, state: EngineState) -> Continuing:
        """Takes over the owner's state. Raises `EngineError` where the version of what was received is not certain."""
        if not state.admits:
            self.admission.close()
        if (state.version, state.loads) != (self.version, self._loads):
            if self.streams:
                await self.settle_behind_fence(state.version)
            self.label(state.version, state.loads)
            if not state.verified:
                self.hold()
        if state.verified and not self.verified:
            self.release()
        self.asleep = state.asleep
        if state.admits:
            self.admission.open()
        received_at = max((stream.received_at for stream in self.streams), default=0.0)
        return Continuing(sum(not stream.ended for stream in self.streams), received_at)

    def label(self, version: int, loads: int) -> None:
        """What is received from now on was sampled by `version`."""
        self.version, self._loads = version, loads
        for stream in self.streams:
            stream.relabel(version)

    def hold(self) -> None:
        """It is held back until `release`, and dropped where that never comes."""
        self.verified = False
        for stream in self.streams:
            stream.hold()

    def release(self) -> None:
        self.verified = True
        for stream in self.streams:
            stream.release()

    async def settle(self) -> None:
        """Receive everything that was sampled before the pause: tokens are labelled with the version of that moment.

        The server is idle and has answered several calls since, each behind its tokens in the same queues; what is left
        is in our sockets, and each turn of the loop reads those.
        """
        quiet_turns, received = 0, -1
        while quiet_turns < QUIET_TURNS:
            await asyncio.sleep(0)
            now = self._read_all()
            quiet_turns = quiet_turns + 1 if now == received else 0
            received = now

    async def settle_behind_fence(self, version: int) -> None:
        """`settle` in a process that may have read nothing for a while, whose tokens wait in the server.

        The server's front end serves all connections in one event loop. What it could not write while we did not read
        it writes when we do, and a call that we make then is answered behind that: once nothing comes beside a call, it
        holds nothing. Raises `EngineError`, also where the server holds another version.
        """
        await self.settle()
        quiet, received = 0, self._received()
        while quiet < QUIET_FENCES:
            if (reported := await self.server_version()) != version:
                raise EngineError(f"{self.server.name} reports version {reported}, its owner loaded {version}")
            await self.settle()
            now = self._received()
            quiet = quiet + 1 if now == received else 0
            received = now

    def _received(self) -> dict[AnswerStream, float]:
        """Changes with every byte."""
        return {stream: stream.received_at for stream in self.streams}

    def _read_all(self) -> int:
        """Takes apart what was received; the tokens of all open answers."""
        for stream in self.streams:
            stream.read()
        return sum(stream.received for stream in self.streams)

    async def server_version(self) -> int:
        """As the server itself says. Raises `EngineError`."""
        return version_of((await self.server.call("GET", self._version_path))["weight_version"])
