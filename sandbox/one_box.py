"""A session's hold on its box: one at a time, started anew where a run brought it down, ended with the session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from penstock.sandbox.config import SandboxConfig
from penstock.sandbox.losses import Losses
from penstock.sandbox.protocol import SandboxLost


class Endable(Protocol):
    @property
    def alive(self) -> bool: ...

    async def end(self) -> None:
        """Everything in the box is gone afterwards."""


B = TypeVar("B", bound=Endable)


class OneBoxSession(Generic[B]):
    """Calls queue up in `_turn`: one runs at a time."""

    def __init__(
        self,
        session_id: str,
        config: SandboxConfig,
        box: B,
        launch: Callable[[], Awaitable[B]],
        on_closed: Callable[[], None],
    ) -> None:
        self.session_id = session_id
        self._config = config
        self._launch = launch
        self._on_closed = on_closed
        self._box: B | None = box
        self._losses = Losses()
        self._turn = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def leave(self) -> None:
        """The box ends with this process: nobody else could go on in it."""
        await self.close()

    async def close(self) -> None:
        """Goes on to its end also where the caller is cancelled: `on_closed` gives the box's slot to the next one."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        """A box on its way would else come after the end, in a slot that is another's by then, and stay."""
        try:
            if self._starting is not None:
                await asyncio.wait([self._starting])
            await self._end_box()
        finally:
            self._on_closed()

    async def _living_box(self) -> B:
        if self._closing is not None:
            raise SandboxLost(f"session {self.session_id} is closed")
        if self._box is None:
            if self._ending is not None:
                await asyncio.shield(self._ending)  # the new box takes over its slot
            self._starting = asyncio.create_task(self._start())
            try:
                await self._starting
            finally:
                self._starting = None
        if self._closing is not None:
            raise SandboxLost(f"session {self.session_id} is closed")
        assert self._box is not None
        if not self._box.alive:
            await self.close()
            raise SandboxLost(f"the box of session {self.session_id} ended between two calls")
        return self._box

    async def _start(self) -> None:
        """In a task of its own, so that `close` can wait for it. It has deadlines of its own."""
        self._box = await self._launch()

    async def _end_box(self) -> None:
        if self._box is not None:
            self._losses.box_ended()
            self._ending = asyncio.create_task(self._box.end())
            self._box = None
        if self._ending is not None:
            await asyncio.shield(self._ending)
