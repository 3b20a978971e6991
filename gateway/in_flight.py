"""The answers of one episode that are being made now, by what they are answers to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from penstock.gateway.call import Call
from penstock.gateway.wire import Ask

Asked = tuple[tuple[int, int], str]
"""(context, how it is sampled): requests with the same one may share an answer."""


class InFlight:
    """Whoever makes a call's task adds it, and removes it before anybody hears of its end."""

    def __init__(self) -> None:
        self._calls: dict[Asked, list[Call]] = {}

    def __iter__(self) -> Iterator[Call]:
        return iter([call for calls in self._calls.values() for call in calls])

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def add(self, asked: Asked, call: Call) -> None:
        self._calls.setdefault(asked, []).append(call)

    def remove(self, call: Call) -> None:
        left = {asked: [one for one in calls if one is not call] for asked, calls in self._calls.items()}
        self._calls = {asked: calls for asked, calls in left.items() if calls}

    async def to_join(self, asked: Asked, ask: Ask, *, retried: bool) -> Call | None:
        """The one that this request may read too. One that its own client gave up, and asks otherwise now, is awaited.

        A call with readers is somebody else's, unless the client says that it repeats itself: without that, this is a
        further sample of the same context.
        """
        for call in list(self._calls.get(asked, [])):
            if not retried and call.readers:
                continue
            if call.ask.logprobs == ask.logprobs:
                return call
            await call.over()
        return None

    def give_up(self) -> None:
        for call in self:
            if call.task is not None:
                call.task.cancel()

    async def ended(self) -> None:
        """Wait until nothing is being sampled any more."""
        tasks = [call.task for call in self if call.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
