"""A session and its box: what starts is ended, whenever the session is closed."""

from __future__ import annotations

import asyncio

import pytest

from penstock.sandbox import SandboxConfig, SandboxLost
from penstock.sandbox.session import OneBoxSession


class NoBox:
    def __init__(self, log: list[str], name: str) -> None:
        self.alive = True
        self._log = log
        self._name = name

    async def end(self) -> None:
        self.alive = False
        self._log.append(f"{self._name} ended")


class Held(OneBoxSession[NoBox]):
    """Whose second box comes when `may_start` is set."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.may_start = asyncio.Event()
        super().__init__("s", SandboxConfig(), NoBox(self.log, "first"), self._second, lambda: self.log.append("freed"))

    async def _second(self) -> NoBox:
        self.log.append("second starts")
        await self.may_start.wait()
        return NoBox(self.log, "second")

    async def call(self) -> NoBox:
        async with self._turn:
            return await self._living_box()

    async def lose(self) -> None:
        await self._end_box()


@pytest.fixture
async def session() -> Held:
    """Its first box is gone; the second one is on its way."""
    made = Held()
    await made.lose()
    return made


async def test_session_close_ends_a_starting_box_before_its_slot(session: Held) -> None:
    call = asyncio.create_task(session.call())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0.01)
    session.may_start.set()
    with pytest.raises(SandboxLost, match="is closed"):
        await call
    await closing
    assert session.log == ["first ended", "second starts", "second ended", "freed"]


async def test_session_starts_anew_after_a_cancelled_start(session: Held) -> None:
    call = asyncio.create_task(session.call())
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    session.may_start.set()
    assert (await session.call()).alive
    assert session.log == ["first ended", "second starts", "second starts"]
    await session.close()
    assert session.log[-2:] == ["second ended", "freed"]
