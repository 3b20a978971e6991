"""A box of a provider: the driver behind a keeper, spoken to over a connection that may break.

    ManagedBox ──lines──► Channel (the provider's API) ──► relay ──► keeper ──► driver

A request carries a number. Where the connection breaks in a request, it is sent again over a new one, with how many of
its frames have arrived: the keeper carries out no number twice.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.common import Backoff
from penstock.sandbox.box import MAX_FRAME_BYTES, Box, BoxEnded, OnOutput
from penstock.sandbox.bundle import KEEPER_MODULES, command_from_stdin, line_of
from penstock.sandbox.managed.api import ApiBusy, ApiUnavailable, Channel, ChannelBroken
from penstock.sandbox.protocol import Accept, NoSuchImage, SandboxError

START_DEADLINE_S = 60.0
"""Until the driver answers in a box that runs."""
PAUSE = Backoff(0.1, 5.0, jitter=(0.5, 1.0))
PYTHON = "python3"
_RELAY = (Path(__file__).parents[1] / "inside" / "relay.py").read_text(encoding="utf-8") + "\nmain()\n"
Open = Callable[[Sequence[str]], Awaitable[Channel]]
"""Starts a program in the box."""


class ManagedBox(Box):
    def __init__(self, keeper: str, open_channel: Open, finish: Callable[[], Awaitable[None]]) -> None:
        """`finish` ends the provider's box, and does not raise."""
        super().__init__()
        self._keeper = keeper
        self._open = open_channel
        self._finish = finish
        self._channel: Channel | None = None
        self._received = bytearray()
        self._ended = False
        self._writing = asyncio.Lock()
        self._broken_limit: str | None = None

    @classmethod
    async def start(
        cls, keeper: str, settings: dict[str, object], open_channel: Open, finish: Callable[[], Awaitable[None]]
    ) -> ManagedBox:
        """Starts keeper and driver in a box that runs; the box is ended if that fails.

        Raises:
            NoSuchImage: its image has no python3 that can run them.
            SandboxError: another reason.
        """
        box = cls(keeper, open_channel, finish)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                box._channel = await open_channel(command_from_stdin(PYTHON, {**settings, "name": keeper}))
                await box._channel.write(line_of(KEEPER_MODULES))
                await box._receive()
        except (ChannelBroken, TimeoutError) as error:
            reason = box.stderr_tail or f"no answer in {START_DEADLINE_S:.0f} s ({error})"
            await box.end()
            signs = "Python 3.9 or newer|ModuleNotFoundError|python3: |executable file not found|No such file"
            if re.search(signs, reason):
                text = "the image has no python3 (3.9 or newer) that can run the box's driver"
                raise NoSuchImage(f"{text}: {reason}") from error
            raise SandboxError(f"the box did not start: {reason}") from error
        except BaseException:
            await box.end()
            raise
        return box

    @property
    def alive(self) -> bool:
        """False once the end is known here. If the provider ended the box, the next request notices."""
        return not self._ended

    @property
    def broken_limit(self) -> str | None:
        """Returns the limit that the box broke, else None. Code has the uid of keeper and driver and can kill them."""
        return self._broken_limit

    @property
    def stderr_tail(self) -> str:
        return self._channel.stderr_tail if self._channel is not None else ""

    async def end(self) -> None:
        self._ended = True
        await self._hang_up()
        await self._finish()

    async def request(
        self, command: dict[str, Any], deadline_s: float, on_output: OnOutput | None = None
    ) -> dict[str, Any]:
        self._requests += 1
        frames = 0
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    await self._send({**command, "id": self._requests, "have": frames})
                    while "out" in (answer := self._answer(await self._receive())):
                        frames += 1
                        if on_output is not None:
                            on_output(answer["out"], answer["data"])
                    return answer
                except ChannelBroken as error:
                    await self._reconnect(error)

    async def request_served(
        self, command: dict[str, Any], deadline_s: float, accept: Accept, stop: asyncio.Event | None
    ) -> dict[str, Any]:
        """Connections of a served run cannot be continued: the box is lost with the connection that carries them."""
        try:
            if self._channel is None:
                await self._reconnect(ChannelBroken("no connection"))
            return await super().request_served(command, deadline_s, accept, stop)
        except ChannelBroken as error:
            raise BoxEnded(f"the connection to the box broke in a served run: {error}") from error

    async def _reconnect(self, broken: Exception) -> None:
        """Raises `BoxEnded` where the box, or what runs in it, is gone, or cannot be reached in time."""
        # A broken connection is made anew for 30 s before the box counts as lost.
        deadline = time.monotonic() + 30.0
        failures = 0
        await self._hang_up()
        while self._channel is None:
            try:
                self._channel = await self._open([PYTHON, "-I", "-S", "-c", _RELAY, self._keeper])
            except (ApiBusy, ApiUnavailable) as error:
                broken = error
                failures += 1
                pause_s = PAUSE.pause_s(failures, at_least_s=getattr(error, "after_s", None))
                if time.monotonic() + pause_s > deadline:
                    raise BoxEnded(f"the box cannot be reached any more: {broken}") from broken
                await asyncio.sleep(pause_s)
            except SandboxError as error:
                raise BoxEnded(f"the box is gone: {error}") from error

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        self._received.clear()
        if channel is not None:
            await channel.close()

    async def _send(self, frame: dict[str, Any]) -> None:
        if self._channel is None:
            raise ChannelBroken("no connection")
        line = json.dumps(frame).encode("ascii") + b"\n"
        writing = asyncio.create_task(self._write(self._channel, line), name="frame to a box")
        # the error of a frame whose sender is gone has no caller: the next frame meets it too
        writing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.shield(writing)

    async def _write(self, channel: Channel, line: bytes) -> None:
        """A frame is written whole, also where its sender is cancelled, and none into another: connections of a served
        run write side by side, and what a half of one leaves behind would be read as the beginning of the next."""
        async with self._writing:
            await channel.write(line)

    async def _receive(self) -> dict[str, Any]:
        frame = json.loads(await self._line())
        if not isinstance(frame, dict):
            raise BoxEnded("the box broke its protocol")
        self._oom_kills = frame.get("oom_kills", self._oom_kills)
        return frame

    async def _line(self) -> bytes:
        """Raises `ChannelBroken` where none comes any more, `BoxEnded` if it is longer than a frame may be."""
        seen = 0
        while (end := self._received.find(b"\n", seen)) < 0:
            seen = len(self._received)
            if seen > MAX_FRAME_BYTES:
                raise BoxEnded(f"the box sent a line of more than {MAX_FRAME_BYTES} bytes")
            data = await self._channel.read() if self._channel is not None else b""
            if not data:
                # the words of relay.py if the keeper is gone; a shell's other words mean nothing
                if "the box's driver has ended" in self.stderr_tail:
                    self._broken_limit = "killed"
                    raise BoxEnded(f"the box ended ({self.stderr_tail})")
                raise ChannelBroken("the connection to the box ended")
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line


def shell_line(argv: Sequence[str]) -> str:
    """Return a shell line for providers that take a command as text: the shell is replaced by `argv`."""
    return "exec " + shlex.join(argv)
