"""One request's answer while it is made. It goes on when its client goes away, so that a retry finds it.

sampler ──show──► pieces of each choice ──► readers, any number, each from the beginning
        ──close─► the journaled choice  ──►

The answers of one episode that are being made now, by what they are answers to.

What an agent's second run is told: the answers that its first run was given, each one once.

What a request says, whichever route it came by, for `History.place`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.gateway.prefix_tree import History, Message, Place, Tools, Turn
from penstock.gateway.wire import Ask, BadAsk, Choice, Delta, Head

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


"""(length and hash of a context, how it was asked)"""


class Replay:
    """Made from what the journal held when the episode was taken over. Empty for an episode that is new."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._left: dict[Asked, dict[str, list[Turn]]] = {}
        for turn in turns:
            calls = self._left.setdefault((turn.place.asked, turn.asked), {})
            calls.setdefault(turn.answer_id, []).append(turn)

    def take(self, place: Place, how: str) -> list[Turn]:
        """Choices of the oldest call that asked this and was not told yet; none where it was never asked."""
        calls = self._left.get((place.asked, how))
        if not calls:
            return []
        return calls.pop(next(iter(calls)))

    @property
    def left(self) -> int:
        """Calls that were not asked for again."""
        return sum(len(calls) for calls in self._left.values())


@dataclass(frozen=True, slots=True)
class Said:
    messages: tuple[Message, ...]
    tools: Tools
    prompt: str | tuple[int, ...] | None
    instructed: bool

    def place(self, history: History) -> Place:
        """Raises `NotRenderable`."""
        if self.prompt is not None:
            return history.place_prompt(self.prompt)
        return history.place(self.messages, self.tools, instructed=self.instructed)


def said_by(ask: Ask, history: History) -> Said:
    """Raises `BadAsk` for a `previous_response_id` that is not of this episode."""
    if ask.prompt is not None:
        return Said((), (), ask.prompt, instructed=False)
    before: list[Message] = []
    if ask.instructions is not None:
        before.append({"role": "system", "content": ask.instructions})
    if ask.previous_response_id is not None:
        before += _conversation(ask.previous_response_id, history)
    return Said((*before, *ask.messages), ask.tools, None, instructed=ask.instructions is not None)


def _conversation(answer: str, history: History) -> list[Message]:
    turn = history.turns.get(f"{answer}.0")
    if turn is None:
        raise BadAsk("previous_response_id", f"{answer!r} is no response of this episode", "invalid_value")
    return turn.conversation()
