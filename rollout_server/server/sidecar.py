"""The core of a rollout server: one engine, kept alive and up to date, and its answers. No HTTP here.

    supervise   start engine → load the newest announced weights → open → pull every 0.15 s, check it every 1 s
                engine gone, hung or behind the others → closed → back off → start again
                trainer waits for shared devices → closed → asleep in its turn → awake → newest weights → open
    receive     under ``broadcast``, next to each engine: the next version, while this one is served; in place: under a
                pause, and if that leaves no version: closed → a whole file → open
    usage       every second: tokens and devices' time, by episode, to the queue's ledger
    heartbeat   from just before it opens: this server's `ServerInfo` to the queue, every second and on each change
    generate    one call per HTTP request: waits for a slot, then for the engine

A server is registered only after it has loaded the newest announced weights, whether it joins late or was restarted.
While the queue does not answer, everything that does not need it continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext

from penstock.common import Backoff, cancel_and_wait
from penstock.rollout_server.protocol import Chunk, Engine, EngineError, EngineInfo, GenerateRequest, Health, Sampling
from penstock.rollout_server.server.engine_devices import ASLEEP, WAITS, EngineDevices
from penstock.rollout_server.server.metrics import RolloutMetrics
from penstock.rollout_server.server.registration import (
    BuildCheck,
    QueueConnection,
    Registration,
    ServerQueue,
    build_of,
    wait_for_event,
)
from penstock.rollout_server.server.request_queue import NotServing, RequestQueue
from penstock.rollout_server.server.usage import ServerUsage
from penstock.rollout_server.server.version_pin import VersionPin
from penstock.transfer_queue import ServerInfo
from penstock.weight_sync import BroadcastMember, Fetch, InPlaceEngine, StagingEngine, WeightUpdater, no_fetch

logger = logging.getLogger(__name__)
PULL_S = 0.15
HEALTH_S = 1.0
STALL_S = 30.0
PROBE_S = 30.0
"""An engine idle for this long is probed with one token."""
PROBE_TIMEOUT_S = 20.0
BACKOFF = Backoff(0.5, 15.0, jitter=(0.8, 1.2))


class Sidecar:
    """`run` is the one long task; the other calls interleave with it. `drain` comes last."""

    def __init__(
        self,
        name: str,
        url: str,
        new_engine: Callable[[], Engine],
        queue: ServerQueue,
        *,
        slots: int,
        fetch: Fetch = no_fetch,
        member: BroadcastMember | None = None,
        truncated_sampling: bool = False,
        stall_s: float = 120.0,
        evaluates: bool = False,
        devices: EngineDevices | None = None,
    ) -> None:
        """Args:
        slots: requests decoded together.
        member: takes part in broadcasts for the engine; `fetch` knows it.
        stall_s: the engine is restarted after this long without a token while requests are in flight.
        evaluates: serves evaluations only, each by one policy version.
        devices: shared with the trainer, in turns.
        """
        self.name, self.url = name, url
        self.metrics = RolloutMetrics()
        self.engine: Engine | None = None
        self.info: EngineInfo | None = None
        self.open = False
        self.draining = False
        self.restarts = 0
        self.cause = "the engine is starting"
        self.connection = QueueConnection(queue)
        self.pin = VersionPin(self.connection, lambda: self.version) if evaluates else None
        self.weights = WeightUpdater(name, self.connection, fetch, self.metrics, self._may_move if evaluates else None)
        self.usage = ServerUsage(name, self.connection, lambda: self.open, lambda: self._asleep)
        self.requests = RequestQueue(
            slots,
            self.metrics,
            truncated_sampling=truncated_sampling,
            usage=self.usage,
            on_engine_error=self._check_soon,
        )
        self._new_engine, self._stall_s, self._member = new_engine, stall_s, member
        self._registration = Registration(self.connection, self._entry)
        self._registered = False
        self._build = BuildCheck(self.connection, name)
        self._devices = devices
        self._wake = asyncio.Event()
        self._suspect = False
        """A request failed in the engine: its health is checked at once."""
        self._checked_at = 0.0

    @property
    def version(self) -> int:
        """Policy version of the loaded weights."""
        return self.weights.version

    @property
    def _asleep(self) -> bool:
        return self._devices is not None and self._devices.asleep

    async def run(self, max_restarts: int) -> None:
        """Keeps an engine serving until cancelled. Raises `EngineError` after `max_restarts` in a row, and at once if
        its first start failed for good."""
        keepers = [asyncio.create_task(self._registration.keep()), asyncio.create_task(self.usage.keep())]
        try:
            async with self._devices.renewal() if self._devices else nullcontext():
                await self._supervise(max_restarts)
        finally:
            for task in keepers:
                task.cancel()

    async def _supervise(self, max_restarts: int) -> None:
        in_a_row = barren = 0
        while True:
            started, answered = time.monotonic(), self.requests.answered
            try:
                await self._run_engine()
            except EngineError as error:
                self._close(str(error))
                if self.info is None and not error.retryable:  # it has never started, and never will
                    raise
            # The restarts of an engine that ran for five minutes are forgotten.
            in_a_row = 1 if time.monotonic() - started > 300.0 else in_a_row + 1
            # An engine that answered requests before it failed is restarted soon; one that never did, ever later.
            barren = 0 if self.requests.answered > answered else barren + 1
            if in_a_row > max_restarts:
                raise EngineError(f"the engine failed {in_a_row} times in a row, the last time: {self.cause}")
            self.restarts += 1
            self.metrics.restarts.inc()
            logger.error("engine restart %d of %d: %s", in_a_row, max_restarts, self.cause)
            await restart_after(BACKOFF.pause_s(barren + 1))

    async def _run_engine(self) -> None:
        """One engine's life; ends with an `EngineError`."""
        self.engine = self._new_engine()
        try:
            if self._devices is not None:
                self.cause = WAITS
                await self._devices.enter(self.engine)
            self.info = await self.engine.start()
            if self._devices is not None:
                await self._devices.started(self.engine)
            self.weights.begin(self.info.version)
            self.cause = self.weights.cause
            async with self._receiving(self.engine) as receiving:
                await self._keep_current(self.engine, receiving)
        finally:
            self.open = self.requests.is_rejecting = False
            await self.engine.stop()  # if it raises, the devices' memory may be held: their entry then expires
            if self._devices is not None:
                await self._devices.leave()

    async def _hand_over(self, engine: Engine, devices: EngineDevices) -> None:
        """The trainer's turn. Answers end with their tokens so far; their clients resume them when the engine wakes."""
        self._close(ASLEEP)
        self.requests.is_rejecting = True
        slept_since = time.monotonic()
        announced = self.weights.announced and self.pin is None  # an evaluation continues with the version that it has
        dropped = await devices.sleep_until_ours(
            engine, has_announced=announced, check=lambda: self._check_asleep(engine)
        )
        if dropped:
            self.weights.dropped()
        self.requests.is_rejecting = False
        self.cause = "awake; the newest weights are not loaded yet"
        logger.info("the trainer had the devices for %.1f s", time.monotonic() - slept_since)

    async def _check_asleep(self, engine: Engine) -> None:
        """Raises `EngineError`: one that has ended is not waited for."""
        if time.monotonic() - self._checked_at > HEALTH_S:
            self._checked_at = time.monotonic()
            if not await engine.healthy():
                raise EngineError(f"the engine ended in its sleep\n{engine.stderr_tail()}")

    async def _keep_current(self, engine: Engine, receiving: asyncio.Task[None] | None) -> None:
        """Until the engine is gone. Raises `EngineError`."""
        self._checked_at = time.monotonic()
        stood = False
        while True:
            if self._devices is not None and self._devices.is_requested:
                await self._hand_over(engine, self._devices)
            await self._pull(engine)
            self._close_without_version(engine)
            if stood and not self._stands_still:
                self.requests.sampled()  # it was silent for a reason
            stood = self._stands_still
            if receiving is not None and receiving.done():
                receiving.result()
            if self._suspect or time.monotonic() - self._checked_at > HEALTH_S:
                self._suspect = False
                await self._check(engine)
                self._checked_at = time.monotonic()
            await wait_for_event(self._wake, PULL_S)
            self._wake.clear()

    @asynccontextmanager
    async def _receiving(self, engine: Engine) -> AsyncGenerator[asyncio.Task[None] | None]:
        """The task that receives broadcasts for this engine; None if there are none, or it can only read files."""
        if self._member is None or not isinstance(engine, StagingEngine):
            yield None
            return
        task = asyncio.create_task(self._member.run(engine, self._meeting), name="receive broadcasts")
        try:
            yield task
        finally:
            await cancel_and_wait([task])

    def _meeting(self) -> str:
        """Address at which servers wait for broadcasts, by the newest announcement. Empty if it names none, and while
        draining: a member that leaves costs all others the broadcast. In place it is empty during a load too: the
        engine could not pause at once."""
        in_place = self._member is not None and self._member.in_place
        if self.draining or (in_place and (self.weights.loading or not self.open)):
            return ""
        newest = self.weights.newest
        address = newest.manifest.get("round") if newest and isinstance(newest.manifest, Mapping) else None
        return address if isinstance(address, str) else ""

    @property
    def _stands_still(self) -> bool:
        """The engine is paused for a broadcast in place, or holds no version since one: its silence is not a stall."""
        if self._member is None or not self._member.in_place:
            return False
        return self._member.busy or (isinstance(self.engine, InPlaceEngine) and self.engine.stands_still)

    def _close_without_version(self, engine: Engine) -> None:
        """No broadcast will end the pause that one began: the engine holds parts of two versions. Requests in flight
        wait in it, others go elsewhere, until the announced version was loaded from its file."""
        if self._member is None or not self._member.in_place or self._member.busy or self.weights.is_dropped:
            return
        if isinstance(engine, InPlaceEngine) and engine.stands_still:
            self.weights.dropped()
            self._close(self._member.cause)
            self._wake.set()

    async def _pull(self, engine: Engine) -> None:
        before = (self.weights.version, self.weights.refused)
        try:
            is_current = await self.weights.pull(engine)
        finally:
            if self.pin is not None:
                self.pin.moved()
        if (self.weights.version, self.weights.refused) != before:
            self._registration.changed.set()
        if is_current and not self.open:
            assert self.info is not None
            await self._compare(self.info)
            self._open()
        elif self.open or self.weights.cause:
            self.cause = self.weights.cause

    async def _compare(self, info: EngineInfo) -> None:
        """Raises `EngineError` where the run has engines of another build; this server is then not in the registry."""
        try:
            await self._build.compare(info, self._register)
        except EngineError:
            self._registered = False
            await self._registration.leave(self.name)
            raise

    async def _register(self) -> None:
        """Closed, if it is the first time: others see its build. Raises `QueueError`."""
        self._registered = True
        await self._registration.announce()

    async def _may_move(self) -> bool:
        assert self.pin is not None
        return not self.open or await self.pin.may_move(lambda: self.requests.in_flight)

    async def _check(self, engine: Engine) -> None:
        """Raises `EngineError` where only a new engine helps."""
        if self._devices is not None:
            await self._devices.measure(engine)
        if not await engine.healthy():
            raise EngineError(f"the engine does not answer any more\n{engine.stderr_tail()}")
        silent_s = 0.0 if self._stands_still else self.requests.silent_s
        if self.open and self.requests.in_flight == 0 and silent_s > PROBE_S:
            await self._probe(engine)
        elif self.requests.in_flight and silent_s > self._stall_s:
            raise EngineError(f"no token sampled for {silent_s:.0f} s, {self.requests.in_flight} requests wait for one")
        if self.open and (cause := await self.weights.straggles()):
            self._close(cause)
            logger.error("draining: %s", cause)
            await wait_for_event(self.requests.idle, 20.0)
            raise EngineError(cause)

    async def _probe(self, engine: Engine) -> None:
        """Samples one token on an idle engine: an engine that answers health checks may still not sample."""
        request = GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), aclosing(engine.generate(request)) as chunks:
                async for _ in chunks:
                    self.requests.sampled()
                    return  # an empty one as well: the token may be held back until the weights are verified
        except TimeoutError as error:
            raise EngineError(f"an idle engine sampled no token in {PROBE_TIMEOUT_S:g} s") from error

    def _check_soon(self) -> None:
        self._suspect = True
        self._wake.set()

    def _open(self) -> None:
        self.open, self.cause = True, ""
        self.requests.sampled()
        self._registration.changed.set()

    def _close(self, cause: str) -> None:
        self.open, self.cause = False, cause
        self._registration.changed.set()

    async def pull_now(self, timeout_s: float) -> bool:
        """Looks for newer weights at once, refused ones included; False: the attempt has not ended in `timeout_s`."""
        # A pull in progress began before this call: the one after it counts.
        pulls = self.weights.pulls + 2
        self.weights.try_again()
        deadline = time.monotonic() + timeout_s
        while self.weights.pulls < pulls and time.monotonic() < deadline:
            self._wake.set()
            await asyncio.sleep(0.02)
        return self.weights.pulls >= pulls

    def _entry(self) -> ServerInfo | None:
        """The entry in the registry; None before the first engine is to open or has refused its weights, and while
        draining."""
        refused = self.weights.refused
        self._registered = self._registered or self.open or refused is not None
        if not self._registered or self.draining:
            return None
        self.metrics.version.set(self.version)
        tokens, evaluates = self.requests.in_flight_tokens, self.pin is not None
        number, cause = (None, "") if refused is None else (refused.version, self.weights.cause[:500])
        build = build_of(self.info) if self.info else ""
        return ServerInfo(
            self.name, self.url, self.version, self.requests.in_flight, self.open,
            tokens, evaluates, number, cause, self._asleep, build,
        )  # fmt: skip

    # answers -------------------------------------------------------------------------------------------------------
    def admit(self, request: GenerateRequest) -> GenerateRequest:
        """The request as the engine will get it. Raises `NotServing`, `TooOld`, `QueueFull`, `BadRequest`."""
        if self.draining:
            raise NotServing("this server is draining")
        if not self.open or self.info is None:
            raise NotServing(self.cause)
        if self.pin is not None:
            self.pin.check()
        return self.requests.admit(request, self.info, self.version)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        assert self.engine is not None
        return self.requests.generate(self.engine, request)

    def health(self) -> Health:
        """`ok` means that the engine answered lately, and sampled: for requests, or for a probe when idle."""
        silent_s = self.requests.silent_s
        receives = self.open and self._stands_still
        most_s = STALL_S if self.requests.in_flight else 2 * PROBE_S + PROBE_TIMEOUT_S
        stalled = self.open and not receives and silent_s > most_s
        cause = "a version is received in place" if receives else self.cause
        if stalled:
            cause = f"no token sampled for {silent_s:.0f} s"
        return Health(
            ok=self.open and not self.draining and not stalled,
            cause=cause,
            draining=self.draining,
            engine=self.info,
            version=self.version,
            in_flight=self.requests.in_flight,
            in_flight_tokens=self.requests.in_flight_tokens,
            sampled_s_ago=round(silent_s, 3),
            restarts=self.restarts,
            queue=self.connection.error or "ok",
            weights_refused=self.weights.refused.version if self.weights.refused else None,
        )

    async def drain(self, timeout_s: float) -> None:
        """Leaves the registry, then waits for the requests in flight, `timeout_s` at most."""
        self.draining = True
        await self._registration.leave(self.name)
        if self.open:
            await wait_for_event(self.requests.idle, timeout_s)
        await self.usage.report()


restart_after = asyncio.sleep
"""Waits before an engine is started again; tests replace it."""
