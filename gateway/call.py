"""One request's answer while it is made. It goes on when its client goes away, so that a retry finds it.

sampler ──show──► pieces of each choice ──► readers, any number, each from the beginning
        ──close─► the journaled choice  ──►
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from penstock.gateway.wire import Ask, Choice, Delta, Head

Update = tuple[int, Delta | Choice]
"""(choice, what can be shown of it now), or the whole choice, once it is in the journal."""


class Call:
    """`task` makes it; readers follow `updates` or wait for `whole`."""

    def __init__(self, ask: Ask, head: Head) -> None:
        self.ask, self.head = ask, head
        self.task: asyncio.Task[None] | None = None
        self.readers = 0
        """Clients that wait for it; a second request while there are some is a question of its own."""
        self._pieces: list[list[Delta | Choice]] = [[] for _ in range(ask.n)]
        self._more = asyncio.Event()
        self.ended = False
        self._error: BaseException | None = None

    def show(self, index: int, delta: Delta) -> None:
        """Text and tokens that may be sent before the answer is in the journal."""
        if delta.text or delta.tokens:
            self._pieces[index].append(delta)
            self._wake()

    def close(self, choice: Choice) -> None:
        """The choice is whole and in the journal."""
        self._pieces[choice.index].append(choice)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        self.ended, self._error = True, error
        self._wake()

    async def over(self) -> None:
        """Wait until it has ended, however it did."""
        while not self.ended:
            await self._more.wait()

    @classmethod
    def finished(cls, ask: Ask, head: Head, choices: Sequence[Choice]) -> Call:
        """A call whose answer is known already."""
        call = cls(ask, head)
        for choice in choices:
            call.close(choice)
        call.end()
        return call

    async def updates(self) -> AsyncGenerator[Update]:
        """Everything from the beginning on. Raises what ended the call early."""
        seen = [0] * len(self._pieces)
        self.readers += 1
        try:
            while True:
                more, ended = self._more, self.ended
                for index, pieces in enumerate(self._pieces):
                    while seen[index] < len(pieces):
                        seen[index] += 1
                        yield index, pieces[seen[index] - 1]
                if ended:
                    break
                await more.wait()
            if self._error is not None:
                raise self._error
        finally:
            self.readers -= 1

    async def whole(self) -> list[Choice]:
        """All choices, in order. Raises what ended the call early."""
        choices: dict[int, Choice] = {}
        async for index, update in self.updates():
            if isinstance(update, Choice):
                choices[index] = update
        return [choices[index] for index in sorted(choices)]

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
