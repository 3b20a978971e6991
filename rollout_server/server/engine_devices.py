"""A rollout server's part in the turns on devices that it shares with the trainer.

    enter ─► engine starts ─► started ─► … samples … ─► is the trainer waiting? ─► sleep ─► give the turn back
                                 ▲                                                              │
                                 └─────────── wake ◄── the devices are ours again ◄─────────────┘

The engine is asleep, and its process alive, in the trainer's turn. Whatever fails in between ends the engine: that
frees the devices in any case, and the next one starts in a turn of the engines.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from penstock.rollout_server.protocol import DeviceBytes, Engine, EngineError, SleepingEngine, SleepLevel
from penstock.transfer_queue import ALL_THAT_IS_FREE, DeviceTurn, QueueError, TurnLost, TurnTimeout

ASLEEP = "asleep: the trainer has the devices for its step"
WAITS = "the engine starts when the trainer has handed the devices over"


class EngineDevices:
    """One engine's at a time; `enter` comes first, `leave` after its end."""

    def __init__(self, turn: DeviceTurn, level: SleepLevel) -> None:
        self._turn, self._level = turn, level
        self._bytes = DeviceBytes(0, 0)
        self.asleep = False
        turn.used = lambda: self._bytes.used

    @asynccontextmanager
    async def renewal(self) -> AsyncGenerator[None]:
        """The turn is renewed until the end of the block."""
        async with self._turn.renewal():
            yield

    @property
    def is_requested(self) -> bool:
        """Returns True while the trainer waits for the devices."""
        return self._turn.holds and self._turn.is_requested

    async def enter(self, engine: Engine) -> None:
        """Takes the turn before the engine starts. Claims all free memory until the engine's need is known.

        Raises `EngineError` for an engine that cannot sleep.
        """
        _sleeper(engine).will_sleep(self._level)
        self.asleep = True
        try:
            await self._turn.take(ALL_THAT_IS_FREE)
        finally:
            self.asleep = False

    async def started(self, engine: Engine) -> None:
        """Returns when what the engine needs is claimed. Raises `EngineError`, `OverBudget`."""
        await self.measure(engine)
        try:
            await self._turn.claim(self._bytes.most)
        except (TurnLost, TurnTimeout, QueueError) as error:
            raise EngineError(str(error)) from error

    async def measure(self, engine: Engine) -> None:
        """Raises `EngineError`, also where the devices have been given to the trainer meanwhile."""
        try:
            self._turn.check()
        except TurnLost as error:
            raise EngineError(str(error)) from error
        self._bytes = await _sleeper(engine).device_bytes()

    async def sleep_until_ours(
        self, engine: Engine, *, has_announced: bool, check: Callable[[], Awaitable[None]]
    ) -> bool:
        """One turn of the trainer, `check` awaited again and again in it. True: the engine has no weights now.

        `has_announced`: weights that are dropped can be loaded again. Raises `EngineError`, `OverBudget`.
        """
        sleeper, level = _sleeper(engine), self._level if has_announced else 1
        self.asleep = True
        try:
            most = self._bytes.most
            await sleeper.sleep(level)
            self._bytes = await sleeper.device_bytes()
            await self._turn.give_back(self._bytes.used)
            await self._turn.take(most, check)
            await sleeper.wake()
            self._bytes = await sleeper.device_bytes()
        finally:
            self.asleep = False
        return level > 1

    async def leave(self) -> None:
        """The engine has ended."""
        self._bytes = DeviceBytes(0, 0)
        await self._turn.give_back()


def _sleeper(engine: Engine) -> SleepingEngine:
    if not isinstance(engine, SleepingEngine):
        raise EngineError(
            f"{type(engine).__name__} cannot release the memory of its devices: set placement.colocated and"
            " placement.lend to false, or rollout.engine to hf, vllm or sglang",
            retryable=False,
        )
    return engine
