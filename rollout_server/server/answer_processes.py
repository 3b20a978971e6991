"""The processes beside a sidecar (`rollout.sidecar_processes`), as the sidecar sees them: see `answer_server`.

Who owns what, with N processes of which the sidecar is one:

    the engine's life, weights, health, the registry     the sidecar alone; the others follow (`answer_labels`)
    pins of a version                                    an evaluation server has one process
    the port                                             the sidecar, which deals connections out: `ConnectionDealer`
    POST /generate                                       the process with the connection; with images the sidecar
    every other route, episodes                          the sidecar: the others pass them on
    slots, the length of the queue                       equal shares, in sum those of one process
    counts, metrics                                      the sidecar's, which adds the others' up every `COUNT_S`
    aborts, routed experts                               as with one process: they belong to an answer

    keep    per process: start ─► begin ─► hand it connections, count ─► it has ended ─► back-off ─► start
    follow  every state of the engine, to all that have begun; a process that does not take it over is killed

A process that is killed breaks off its own answers, which clients continue elsewhere as those of a killed sidecar; it
is started again with the newest state. What it did in its last `COUNT_S` is missing in the metrics.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.common import Backoff, gather_or_cancel
from penstock.rollout_server.config import RolloutConfig
from penstock.rollout_server.engines.child_link import Link, child_environment, end_child
from penstock.rollout_server.engines.http.answer_labels import Continuing
from penstock.rollout_server.engines.http.engine import HttpEngine
from penstock.rollout_server.engines.http.server_process import Child
from penstock.rollout_server.protocol import Engine, EngineError
from penstock.rollout_server.server.metrics import RolloutMetrics
from penstock.rollout_server.server.sidecar_state import ProcessCounts, ProcessSpec, SidecarState

logger = logging.getLogger(__name__)
COUNT_S = 0.2
FOLLOW_S = 10.0
"""A process that has not taken over a state by then hangs. The engine may be paused meanwhile."""
BEGIN_S = 60.0
END_S = 10.0
LAST_WORDS_S = 1.0
"""From the end of the connection to the end of the process."""
STABLE_S = 300.0
"""A process that ran this long has its restarts forgotten."""
BACKOFF = Backoff(0.5, 15.0, jitter=(0.8, 1.2))


def shares(slots: int, processes: int) -> list[int]:
    """Of each process; in sum `slots`."""
    return [slots // processes + (number < slots % processes) for number in range(processes)]


class AnswerProcess:
    """One process at a time. `start` comes first, `end` or `kill` last."""

    def __init__(self, number: int, log_dir: Path) -> None:
        self.name = f"answer process {number}"
        self.begun = False
        """It takes connections and states."""
        self.counts = ProcessCounts()
        """As it last said; of none that runs, all are 0."""
        self._counted_at = 0.0
        self._child = Child(self.name, log_dir / f"answers-{number}.log")
        self._link: Link | None = None
        self._connections: socket.socket | None = None
        self._handed = 0

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def open_connections(self) -> int:
        """Those that it has not taken yet counted."""
        return self.counts.connections + self._handed - self.counts.accepted

    @property
    def silent_s(self) -> float:
        """See `RequestQueue.silent_s`; endless where it sampled nothing, or is gone."""
        if self.counts.silent_s is None:
            return math.inf
        return self.counts.silent_s + time.monotonic() - self._counted_at

    async def start(self, spec: ProcessSpec) -> None:
        """Returns when the process accepts states. Raises `EngineError`."""
        control, theirs = socket.socketpair()
        self._connections, their_connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections.setblocking(False)
        self._link = Link(self._reap, self._cause, self.name)
        command = [sys.executable, "-m", "penstock.rollout_server.server.answer_server"]
        command += ["--control", str(theirs.fileno()), "--connections", str(their_connections.fileno())]
        with theirs, their_connections:
            inherited = [theirs.fileno(), their_connections.fileno()]
            await self._child.spawn(command, child_environment(1), pass_fds=inherited)
        await self._link.open(control)
        self._handed, self.counts = 0, ProcessCounts()
        await self._link.call("begin", BEGIN_S, spec=spec.model_dump(mode="json"))
        self._counted_at = time.monotonic()

    def hand_over(self, connection: socket.socket) -> bool:
        """Gives it `connection`; False where it takes none now, and the caller still has it."""
        if self._connections is None:
            return False
        try:
            socket.send_fds(self._connections, [b"c"], [connection.fileno()])
        except OSError:  # full, or the process is gone
            return False
        connection.close()
        self._handed += 1
        return True

    async def follow(self, state: SidecarState) -> Continuing:
        """See `Followers`: it has the state, or has ended."""
        assert self._link is not None
        try:
            reply = await self._link.call("state", FOLLOW_S, state=state.model_dump(mode="json"))
        except EngineError as error:
            logger.error("%s is killed: it did not take over the engine's state: %s", self.name, error)
            await self.kill()
            return Continuing(0, 0.0)
        return Continuing(*reply["continuing"])

    def tell(self, state: SidecarState) -> None:
        if self._link is not None and self._link.is_open:
            self._link.send("state", state=state.model_dump(mode="json"))

    async def count(self) -> ProcessCounts:
        """What it did since it was last asked; `counts` is new. Raises `EngineError` where it does not answer."""
        assert self._link is not None
        return self._take_counts((await self._link.call("count", FOLLOW_S))["counts"])

    def _take_counts(self, found: object) -> ProcessCounts:
        before, self.counts = self.counts, ProcessCounts.model_validate(found)
        self._counted_at = time.monotonic()
        outcomes = {name: value - before.outcomes.get(name, 0.0) for name, value in self.counts.outcomes.items()}
        return self.counts.model_copy(
            update={
                "answered": self.counts.answered - before.answered,
                "tokens": self.counts.tokens - before.tokens,
                "outcomes": outcomes,
                "engine_errors": self.counts.engine_errors - before.engine_errors,
            }
        )

    async def end(self) -> ProcessCounts:
        """Its connections end, then it; what it did since it was last asked."""
        self._stop_handing()
        if not self.begun or self._link is None:
            return ProcessCounts()
        try:
            return self._take_counts((await self._link.call("end", END_S))["counts"])
        except EngineError as error:
            logger.warning("%s did not end by itself: %s", self.name, error)
            return ProcessCounts()
        finally:
            await end_child(self._child.process, self._link)
            self._forget()

    async def kill(self) -> None:
        """With SIGKILL: when this returns, its connections are closed. Twice does nothing."""
        self._stop_handing()
        self._forget()
        process, link = self._child.process, self._link  # of this life: the next one may begin while we wait
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        if link is not None:
            link.close_writing()
            link.close()

    def _stop_handing(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def _forget(self) -> None:
        self.begun, self.counts, self._handed = False, ProcessCounts(), 0

    async def _reap(self) -> None:
        if self._child.process is not None:
            await asyncio.wait({asyncio.ensure_future(self._child.process.wait())}, timeout=LAST_WORDS_S)

    def _cause(self) -> str:
        tail = self._child.tail()
        return f"{self.name} is gone" + (f"; the end of {self._child.log_path}:\n{tail}" if tail else "")


class AnswerProcesses:
    """All that a sidecar has; none without `specs`. Implements `Followers`.

    `share` for each engine, `run` beside it, `end` last.
    """

    def __init__(
        self, specs: Sequence[ProcessSpec], log_dir: Path, metrics: RolloutMetrics, max_restarts: int = 0
    ) -> None:
        """Args:
        specs: of each process, but for the engine's class.
        metrics: the sidecar's, to which theirs are added.
        """
        self.processes = [AnswerProcess(number, log_dir) for number in range(1, len(specs) + 1)]
        self.answered = 0
        """Answers that were completed."""
        self._specs, self._metrics, self._max_restarts = list(specs), metrics, max_restarts
        self._state: Callable[[], SidecarState] | None = None
        self._on_engine_error: Callable[[], None] = lambda: None
        self._told: SidecarState | None = None
        self._shared = asyncio.Event()
        self._ending = False
        self._engine_class = ""

    def share(self, engine: Engine, state: Callable[[], SidecarState], on_engine_error: Callable[[], None]) -> None:
        """They ask `engine` too, from its start on. Raises `EngineError` where one process alone can."""
        if not self.processes:
            return
        if not isinstance(engine, HttpEngine):
            kind = type(engine).__name__
            raise EngineError(f"rollout.sidecar_processes: only one process can ask a {kind}", retryable=False)
        engine.share(self)
        self._state, self._on_engine_error = state, on_engine_error
        self._engine_class = f"{type(engine).__module__}:{type(engine).__qualname__}"
        self._shared.set()

    async def run(self) -> None:
        """Keeps all of them until cancelled. Raises `EngineError` where one ends again and again."""
        if not self.processes:
            await asyncio.Event().wait()
        await self._shared.wait()
        await gather_or_cancel([self._keep(*pair) for pair in zip(self.processes, self._specs, strict=True)])

    async def _keep(self, process: AnswerProcess, spec: ProcessSpec) -> None:
        in_a_row = 0
        while True:
            started = time.monotonic()
            try:
                await process.start(spec.model_copy(update={"engine_class": self._engine_class}))
                await self._begin(process)
                await self._count_while_it_lives(process)
            except (EngineError, OSError) as error:
                cause = str(error)
            finally:
                await process.kill()
            if self._ending:
                return
            in_a_row = 1 if time.monotonic() - started > STABLE_S else in_a_row + 1
            if in_a_row > self._max_restarts:
                raise EngineError(f"{process.name} ended {in_a_row} times in a row, the last time: {cause}")
            logger.error("%s: restart %d of %d: %s", process.name, in_a_row, self._max_restarts, cause)
            await restart_after(BACKOFF.pause_s(in_a_row))

    async def _begin(self, process: AnswerProcess) -> None:
        process.tell(self._now())
        await process.count()  # answered behind the state: it can take connections
        # At once one after the other: a state that came between the two would not reach it.
        process.tell(self._now())
        process.begun = True

    async def _count_while_it_lives(self, process: AnswerProcess) -> None:
        """Raises `EngineError` when it has ended."""
        while True:
            self._add(await process.count())
            if self._now() != self._told:
                self.tell()
            await asyncio.sleep(COUNT_S)

    def _add(self, done: ProcessCounts) -> None:
        self.answered += done.answered
        self._metrics.tokens.inc(done.tokens)
        for outcome, count in done.outcomes.items():
            self._metrics.requests.labels(outcome).inc(count)
        if done.engine_errors:
            self._on_engine_error()

    # states --------------------------------------------------------------------------------------------------------
    def _now(self) -> SidecarState:
        assert self._state is not None
        return self._state()

    @property
    def _begun(self) -> list[AnswerProcess]:
        return [process for process in self.processes if process.begun]

    async def follow(self) -> Continuing:
        """See `Followers`."""
        begun = self._begun
        if not begun:
            return Continuing(0, 0.0)
        self._told = state = self._now()
        found = await asyncio.gather(*(process.follow(state) for process in begun))
        return Continuing(sum(one.in_flight for one in found), max(one.received_at for one in found))

    def tell(self) -> None:
        """See `Followers`."""
        if begun := self._begun:
            self._told = state = self._now()
            for process in begun:
                process.tell(state)

    # connections ---------------------------------------------------------------------------------------------------
    def hand_over(self, connection: socket.socket, own: int) -> bool:
        """To the process with the fewest; False where the sidecar, which has `own`, has no more, and keeps it."""
        fewest = min(self._begun, key=lambda process: process.open_connections, default=None)
        return fewest is not None and fewest.open_connections < own and fewest.hand_over(connection)

    # counts --------------------------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return sum(process.counts.in_flight for process in self.processes)

    @property
    def in_flight_tokens(self) -> int:
        return sum(process.counts.in_flight_tokens for process in self.processes)

    @property
    def silent_s(self) -> float:
        """Of the one that sampled last; endless where there is none."""
        return min((process.silent_s for process in self.processes), default=math.inf)

    async def until_idle(self, timeout_s: float) -> None:
        """Returns when they have answered all that they were asked, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            for process in self._begun:
                try:
                    self._add(await process.count())
                except EngineError as error:
                    logger.warning("%s", error)  # `run` sees to it
            if self.in_flight == 0 or time.monotonic() > deadline:
                return
            await asyncio.sleep(COUNT_S)

    async def end(self) -> None:
        """They end, with the answers that they have begun; so does `run`."""
        self._ending = True
        for done in await asyncio.gather(*(process.end() for process in self.processes)):
            self._add(done)


def make_specs(
    config: RolloutConfig, log_dir: Path, sidecar_socket: str, *, server: str, run: str, model: str, token: str
) -> list[ProcessSpec]:
    """Of the processes beside the sidecar."""
    return [
        ProcessSpec(
            server=server,
            run=run,
            config=config,
            model=model,
            log_dir=str(log_dir),
            token=token,
            engine_class="",
            sidecar_socket=sidecar_socket,
            slots=slots,
        )
        for slots in shares(config.max_concurrent, config.sidecar_processes)[1:]
    ]


restart_after = asyncio.sleep
"""Waits before a process is started again; tests replace it."""
