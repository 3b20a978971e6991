"""The sidecar's core: one engine, kept alive and up to date, and the answers it gives. No HTTP here.

    supervise   start engine → load the newest announced weights → open → every 0.15 s: pull, every 1 s: look after it
                engine gone, hung or behind the others → closed → back-off → start again
    heartbeat   once open: every second and at each change, this server's `ServerInfo` into the queue
    generate    one call per HTTP request; wakes nobody, waits for a slot, then for the engine

A server is registered only after it has loaded the newest announced weights, a late joiner as well as a restarted one.
Where the queue does not answer, everything that needs no queue goes on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from penstock.rollout_server.held_weights import Fetch, HeldWeights, as_it_is
from penstock.rollout_server.metrics import Metrics
from penstock.rollout_server.protocol import Chunk, Engine, EngineError, EngineInfo, GenerateRequest, Health, Sampling
from penstock.rollout_server.registration import QueueLine, Registration, ServerQueue, wait_for_event
from penstock.rollout_server.request_queue import NotServing, Serving
from penstock.rollout_server.version_pin import Standing
from penstock.transfer_queue import ServerInfo

logger = logging.getLogger(__name__)
PULL_S = 0.15
HEALTH_S = 1.0
STALL_S = 30.0
PROBE_S = 30.0
"""An engine that has had nothing to do for so long is asked for a token."""
PROBE_TIMEOUT_S = 20.0
STABLE_S = 300.0
"""An engine that ran this long has its restarts forgiven."""
MOST_BACKOFF_S = 15.0
STRAGGLER_DRAIN_S = 20.0


class NewEngine(Protocol):
    def __call__(self) -> Engine: ...


restart_after = asyncio.sleep
"""Waits before an engine is started again."""


class Sidecar:
    """`run` is the one long task; everything else answers requests meanwhile. `stop` always comes last."""

    def __init__(
        self,
        name: str,
        url: str,
        new_engine: NewEngine,
        queue: ServerQueue,
        *,
        slots: int,
        fetch: Fetch = as_it_is,
        truncated_sampling: bool = False,
        stall_s: float = 120.0,
        evaluates: bool = False,
    ) -> None:
        """`slots`: requests decoded together. `stall_s`: no token for so long, with work: the engine is restarted.
        `evaluates`: it takes evaluations alone, and each is sampled by one version."""
        self.name, self.url = name, url
        self.metrics = Metrics()
        self.engine: Engine | None = None
        self.info: EngineInfo | None = None
        self.open = False
        self.draining = False
        self.restarts = 0
        self.cause = "the engine is starting"
        self.line = QueueLine(queue)
        self.standing = Standing(self.line, lambda: self.version) if evaluates else None
        self.weights = HeldWeights(name, self.line, fetch, self.metrics, self._may_move if evaluates else None)
        self.serving = Serving(slots, self.metrics, truncated_sampling=truncated_sampling)
        self._new_engine, self._stall_s = new_engine, stall_s
        self._registration = Registration(self.line, self._me)
        self._registered = False
        self._wake = asyncio.Event()
        self._suspect = False
        """A request failed in the engine: do not wait for the next look at its health."""

    @property
    def in_flight(self) -> int:
        """Requests that are being answered or wait."""
        return self.serving.in_flight

    @property
    def version(self) -> int:
        """Policy version of the weights that tokens are sampled from now."""
        return self.weights.version

    async def run(self, max_restarts: int) -> None:
        """Keep an engine serving until cancelled. Raises `EngineError` after `max_restarts` in a row."""
        heartbeat = asyncio.create_task(self._registration.keep())
        try:
            await self._supervise(max_restarts)
        finally:
            heartbeat.cancel()

    async def _supervise(self, max_restarts: int) -> None:
        in_a_row = barren = 0
        while True:
            started, answered = time.monotonic(), self.serving.answered
            try:
                await self._run_engine()
            except EngineError as error:
                self._close(str(error))
            in_a_row = 1 if time.monotonic() - started > STABLE_S else in_a_row + 1
            # Who answered requests before it fell is worth starting at once; who never did is waited for ever longer.
            barren = 0 if self.serving.answered > answered else barren + 1
            if in_a_row > max_restarts:
                raise EngineError(f"the engine failed {in_a_row} times in a row, the last time: {self.cause}")
            self.restarts += 1
            self.metrics.restarts.inc()
            logger.error("engine restart %d of %d: %s", in_a_row, max_restarts, self.cause)
            await restart_after(min(0.5 * 2**barren, MOST_BACKOFF_S) * random.uniform(0.8, 1.2))

    async def _run_engine(self) -> None:
        """One engine's life, from start to its end, which is an `EngineError`."""
        self.engine = self._new_engine()
        try:
            self.info = await self.engine.start()
            self.weights.begin(self.info.version)
            self.cause = self.weights.cause
            checked = time.monotonic()
            while True:
                await self._pull(self.engine)
                if self._suspect or time.monotonic() - checked > HEALTH_S:
                    self._suspect = False
                    await self._look_after(self.engine)
                    checked = time.monotonic()
                await wait_for_event(self._wake, PULL_S)
                self._wake.clear()
        finally:
            self.open = False
            await self.engine.stop()

    async def _pull(self, engine: Engine) -> None:
        before = self.weights.version
        try:
            held = await self.weights.pull(engine)
        finally:
            if self.standing is not None:
                self.standing.moved()
        if self.weights.version != before:
            self._registration.changed.set()
        if held and not self.open:
            self._open()
        elif self.open or self.weights.cause:
            self.cause = self.weights.cause

    async def _may_move(self) -> bool:
        assert self.standing is not None
        return not self.open or await self.standing.may_move(lambda: self.serving.in_flight)

    async def _look_after(self, engine: Engine) -> None:
        """Raises `EngineError` where only a new engine helps."""
        if not await engine.healthy():
            raise EngineError(f"the engine does not answer any more\n{engine.stderr_tail()}")
        silent_s = self.serving.silent_s
        if self.open and self.serving.in_flight == 0 and silent_s > PROBE_S:
            await self._probe(engine)
        elif self.serving.in_flight and silent_s > self._stall_s:
            raise EngineError(f"no token sampled for {silent_s:.0f} s, {self.serving.in_flight} requests wait for one")
        if self.open and (cause := await self.weights.straggles()):
            self._close(cause)
            logger.error("draining: %s", cause)
            await wait_for_event(self.serving.idle, STRAGGLER_DRAIN_S)
            raise EngineError(cause)

    async def _probe(self, engine: Engine) -> None:
        """Sample one token with nothing else to do: that the engine answers does not mean that it samples."""
        request = GenerateRequest(token_ids=[0], sampling=Sampling(max_new_tokens=1))
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), aclosing(engine.generate(request)) as chunks:
                async for _ in chunks:
                    self.serving.sampled()
        except TimeoutError as error:
            raise EngineError(f"an idle engine sampled no token in {PROBE_TIMEOUT_S:g} s") from error

    def _open(self) -> None:
        self.open, self.cause = True, ""
        self.serving.sampled()
        self._registration.changed.set()

    def _close(self, cause: str) -> None:
        self.open, self.cause = False, cause
        self._registration.changed.set()

    async def pull_now(self, timeout_s: float) -> bool:
        """Look for newer weights at once, refused ones too. False where the attempt has not ended in `timeout_s`."""
        # The pull under way, if any, began before this call: the one after it counts.
        wanted = self.weights.pulls + 2
        self.weights.try_again()
        deadline = time.monotonic() + timeout_s
        while self.weights.pulls < wanted and time.monotonic() < deadline:
            self._wake.set()
            await asyncio.sleep(0.02)
        return self.weights.pulls >= wanted

    def _me(self) -> ServerInfo | None:
        """What the registry is told: nothing before the first engine is open, nor while this server goes."""
        self._registered = self._registered or self.open
        if not self._registered or self.draining:
            return None
        self.metrics.version.set(self.version)
        tokens, evaluates = self.serving.in_flight_tokens, self.standing is not None
        return ServerInfo(self.name, self.url, self.version, self.in_flight, self.open, tokens, evaluates)

    # answers -------------------------------------------------------------------------------------------------------
    def admit(self, request: GenerateRequest) -> GenerateRequest:
        """The request as the engine will get it. Raises `NotServing`, `TooOld`, `QueueFull`, `BadRequest`."""
        if self.draining:
            raise NotServing("this server is draining")
        if not self.open or self.info is None:
            raise NotServing(self.cause)
        if self.standing is not None:
            self.standing.check()
        return self.serving.admit(request, self.info, self.version)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Chunks of about 0.2 s. Raises `EngineError`, `DeadlineOver`. Closing it early frees the engine."""
        assert self.engine is not None
        return self._watched(self.serving.generate(self.engine, request))

    async def _watched(self, answer: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
        try:
            async with aclosing(answer) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineError:
            self._suspect = True
            self._wake.set()
            raise

    def health(self) -> Health:
        """`ok` is deep: the engine answered lately, and sampled: for requests, or for a probe where there are none."""
        silent_s = self.serving.silent_s
        stalled = self.open and silent_s > (STALL_S if self.serving.in_flight else 2 * PROBE_S + PROBE_TIMEOUT_S)
        return Health(
            ok=self.open and not self.draining and not stalled,
            cause=f"no token sampled for {silent_s:.0f} s" if stalled else self.cause,
            draining=self.draining,
            engine=self.info,
            version=self.version,
            in_flight=self.serving.in_flight,
            in_flight_tokens=self.serving.in_flight_tokens,
            sampled_s_ago=round(silent_s, 3),
            restarts=self.restarts,
            queue=self.line.error or "ok",
            weights_refused=self.weights.refused.version if self.weights.refused else None,
        )

    # the end -------------------------------------------------------------------------------------------------------
    async def drain(self, timeout_s: float) -> None:
        """Leave the registry, then let what is in flight end, `timeout_s` at most."""
        self.draining = True
        await self._registration.leave(self.name)
        if self.open:
            await wait_for_event(self.serving.idle, timeout_s)
