"""The monitor of one trainer rank, a process beside it: finds ranks that are gone, stopped or stuck, and ends all.

    rank ──notes (shared memory), orders (stdin)──► its monitor ──report every second──► hub, in the monitor of rank 0
      ▲                                                  │ ◄──── "well", "over", or the verdict ────┘
      └───────────────── SIGKILL after a verdict ────────┘

    task         consumes                           waits for                 woken by
    orders       lines of stdin                     the rank                  a line, or the end of the rank
    reports      `Observer.look`                    `LOOK_S`                  the clock
    link         lines of the hub                   the hub                   a line, or the end of the connection
    hub (one)    reports of all monitors; judges    `LOOK_S`                  a line, the clock

A process, because a thread of the rank stands still with it: under SIGSTOP, and while a call keeps Python's lock.

    gone       its process ended without a farewell, or with an error            ends all ranks after `GRACE_S`
    silent     nothing was heard of its monitor for `timeout_s`                  ends all ranks
    stopped    its process was held (SIGSTOP, a debugger) for `timeout_s`        ends all ranks
    stuck      it should work, waits for no other rank, and used neither the     ends all ranks
               CPU nor the disk for `timeout_s`, nor did a child of its
    slow       it works, and others have waited for it for `timeout_s`           a warning; a collective's deadline
                                                                                 (trainer.collective_timeout_s) decides

So a long compilation or checkpoint is slow, never stuck. Time in which a monitor itself did not run counts for nothing.
A rank that waits on a GPU cannot be told from one that is stuck: there "stuck" is "slow".
No torch is imported: it starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.trainer.ranks.jury import GRACE_S, Jury, Verdict, Watched, likelier
from penstock.trainer.ranks.observer import LOOK_S, NOTES_BYTES, Observer

CAUSE_S = 6.0
"""A rank that raised the cause may take longer to end than its peers, whose collectives it broke. Less than
`watch.END_S`."""
HELLO_S = 10.0
AGAIN_S = 0.5


class Hub:
    """Hears all monitors and tells them the verdict. Only who knows the secret is heard."""

    def __init__(self, secret: str, timeout_s: float) -> None:
        self.verdict: Verdict | None = None
        self.first_has_left = asyncio.Event()
        """Rank 0's connection has ended, and its last line was judged."""
        self._echo: tuple[float, Verdict] | None = None
        """The likeliest that may be an echo, and when the first came: another rank's loss within `CAUSE_S` comes before
        it."""
        self._secret = secret
        self._jury = Jury(timeout_s)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            self._decide(self._jury.judge(now))
            self._judge_echo(now)
            if warning := self._jury.slow(now):
                _say(warning)
            first = self._jury.ranks.get(0)
            self._tell({"well": first.described if first else ""})

    async def close(self) -> None:
        """Rank 0 has left: the others need no hub any more, or have a verdict."""
        while self._echo is not None and self.verdict is None:
            await asyncio.sleep(AGAIN_S)
            self._judge_echo(time.monotonic())
        if self.verdict is None:
            self._tell({"over": True})
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watched: Watched | None = None
        try:
            watched = await self._admit(reader)
            if watched is None:
                return
            self._writers.add(writer)
            while line := await reader.readline():
                self._decide(self._jury.report(watched, _parsed(line), time.monotonic()))
        except (OSError, ValueError, KeyError, TimeoutError) as error:
            _say(f"a monitor's connection ended: {error!r}")
        finally:
            self._writers.discard(writer)
            writer.close()
            if watched is not None:
                self._decide(self._jury.lost(watched))
                if watched.rank == 0:
                    self.first_has_left.set()

    async def _admit(self, reader: asyncio.StreamReader) -> Watched | None:
        """By its first line; None for a stranger."""
        async with asyncio.timeout(HELLO_S):
            hello = _parsed(await reader.readline())
        if not hmac.compare_digest(str(hello.get("secret", "")).encode(), self._secret.encode()):
            return None
        watched = Watched(int(hello["rank"]), str(hello["host"]), int(hello["pid"]), time.monotonic())
        self._jury.ranks[watched.rank] = watched
        return watched

    def _decide(self, verdict: Verdict | None) -> None:
        """The first one counts that is no echo."""
        if verdict is None or self.verdict is not None:
            return
        if verdict.may_be_echo:
            since, first = self._echo or (time.monotonic(), None)
            self._echo = since, likelier(first, verdict)
            return
        self._announce(verdict)

    def _judge_echo(self, now: float) -> None:
        if self._echo is not None and self.verdict is None and now - self._echo[0] >= CAUSE_S:
            self._announce(self._echo[1])

    def _announce(self, verdict: Verdict) -> None:
        self.verdict = verdict
        _say(f"all ranks are ended: {verdict.text}")
        self._tell({"verdict": verdict.text, "grace_s": verdict.grace_s})

    def _tell(self, line: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(_line(line))


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """The first line of stdin."""

    rank: int
    host: str
    pid: int
    timeout_s: float
    memory_fd: int
    """Of the rank's notes."""
    own_threads: list[int]
    ends_stuck: bool
    speaks: bool
    """Of several ranks' monitors on a machine, one writes verdicts into the log."""
    secret: str = ""
    listen: str = ""
    """The hub's address; empty on all ranks but the first."""
    error_file: str = ""
    """In which torchrun looks for the cause of a rank's end."""


class Monitor:
    """Of one rank. `run` until the rank, or its hub, has ended."""

    def __init__(self, settings: MonitorSettings, orders: asyncio.StreamReader) -> None:
        self._settings, self._orders = settings, orders
        memory = mmap.mmap(settings.memory_fd, NOTES_BYTES, prot=mmap.PROT_READ)
        self._observer = Observer(
            settings.pid, memory, set(settings.own_threads), settings.timeout_s, ends_stuck=settings.ends_stuck
        )
        self._hub = Hub(settings.secret, settings.timeout_s) if settings.listen else None
        self._writer: asyncio.StreamWriter | None = None
        self._heard_at = time.monotonic()
        self._first = "rank 0"
        """In words, as the hub last described it."""

    async def run(self) -> None:
        port = await self._hub.start(self._settings.listen) if self._hub else 0
        sys.stdout.buffer.write(_line({"port": port}))
        sys.stdout.flush()
        order = await self._order()
        if "hub" not in order:
            return
        ended = asyncio.create_task(self._until_ended(), name="orders")
        keeping = [asyncio.create_task(self._hub.keep(), name="hub")] if self._hub else []
        host, port = order["hub"]
        linked = asyncio.create_task(self._link(host, port, str(order["secret"])), name="link")
        await asyncio.wait({ended, linked, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and (verdict := _verdict_of(linked)) is not None:
            await self._end_rank(verdict, ended)
        await self._say_goodbye(ended)
        for task in (ended, linked, *keeping):
            task.cancel()

    async def _until_ended(self) -> str | None:
        """The rank's farewell, empty where it ends in order; None where its process ended without one."""
        order = await self._order()
        return str(order["left"]) if "left" in order else None

    async def _order(self) -> dict[str, Any]:
        """The next line of the rank; empty where its process has ended."""
        reading = asyncio.create_task(self._orders.readline(), name="order")
        try:
            # A process that the rank forked may keep the pipe open when the rank is gone.
            while not reading.done() and os.getppid() == self._settings.pid:
                await asyncio.wait({reading}, timeout=LOOK_S)
            return _parsed(reading.result()) if reading.done() else {}
        finally:
            reading.cancel()

    async def _link(self, host: str, port: int, secret: str) -> Verdict | None:
        """Reports to the hub and hears it. The verdict; None where the hub is over."""
        reader, self._writer = await self._connected(host, port)
        mine = self._settings
        self._write({"secret": secret, "rank": mine.rank, "host": mine.host, "pid": mine.pid})
        hearing = asyncio.create_task(self._hear(reader), name="hear")
        self._heard_at = before = time.monotonic()
        try:
            while not hearing.done():
                self._write(self._observer.look())
                await asyncio.wait({hearing}, timeout=LOOK_S)
                now = time.monotonic()
                if now - before > 3 * LOOK_S:  # this process stood still, or the machine did
                    self._heard_at = min(self._heard_at + now - before, now)
                before = now
                if now - self._heard_at > mine.timeout_s:
                    return Verdict(f"nothing was heard for {now - self._heard_at:.0f} s of {self._first}")
            return hearing.result()
        finally:
            hearing.cancel()

    async def _connected(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises `OSError` after `timeout_s`."""
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            try:
                async with asyncio.timeout(HELLO_S):
                    return await asyncio.open_connection(host, port)
            except OSError:  # `TimeoutError` is one
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _hear(self, reader: asyncio.StreamReader) -> Verdict | None:
        while line := await reader.readline():
            said = _parsed(line)
            self._heard_at = time.monotonic()
            self._first = str(said.get("well") or self._first)
            if "verdict" in said:
                return Verdict(str(said["verdict"]), float(said["grace_s"]))
            if "over" in said:
                return None
        return Verdict(f"it, or its monitor, has ended without a report: {self._first}", GRACE_S)

    async def _end_rank(self, verdict: Verdict, ended: asyncio.Task[str | None]) -> None:
        """SIGKILL, unless the rank ends by itself in the grace it has."""
        if self._settings.speaks and self._hub is None:  # the hub's machine has it from the hub
            _say(f"all ranks are ended: {verdict.text}")
        if verdict.grace_s:
            await asyncio.wait({ended}, timeout=verdict.grace_s)
        if ended.done() or os.getppid() != self._settings.pid:
            return
        _tell_torchrun(self._settings.error_file, verdict.text)
        os.kill(self._settings.pid, signal.SIGKILL)

    async def _say_goodbye(self, ended: asyncio.Task[str | None]) -> None:
        """The rank has ended: the hub hears how. Without a farewell the broken connection says it."""
        left = ended.result() if ended.done() else None
        if self._writer is not None:
            if left is not None:
                self._write({"left": left})
            self._writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._writer.wait_closed()
        if self._hub is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELLO_S if self._writer is not None else 0):
                    await self._hub.first_has_left.wait()
            await self._hub.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_line(line))


def _tell_torchrun(error_file: str, text: str) -> None:
    """Its report of the failed ranks has the text."""
    message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        if error_file:
            Path(error_file).write_text(json.dumps({"message": message}))


def _verdict_of(linked: asyncio.Task[Verdict | None]) -> Verdict | None:
    if not linked.done():
        return None
    error = linked.exception()
    return Verdict(f"rank 0's monitor cannot be reached: {error!r}") if error else linked.result()


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _parsed(line: bytes) -> dict[str, Any]:
    """Empty for the end of a stream. Raises `ValueError`."""
    found = json.loads(line) if line.strip() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{line[:80]!r} is no object")
    return found


def _say(text: str) -> None:
    """Into the trainer's log."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"{stamp} ERROR penstock.ranks.monitor: {text}", file=sys.stderr, flush=True)


async def _main() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await Monitor(MonitorSettings(**_parsed(await reader.readline())), reader).run()


if __name__ == "__main__":
    # Signals to the ranks' process groups are not for it: it ends with its rank.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_main())
