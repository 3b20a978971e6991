"""Requests to one session: what they ask for, their answers in progress, and answers that are given again.

    sampler ──show──► pieces of each choice ──► readers, any number, each from the beginning
            ──close─► the journaled choice  ──►

An answer is completed also after its client has disconnected, so that a retry finds it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.errors import TooLong
from penstock.gateway.prefix_tree import Message, PrefixMatch, PrefixTree, Tools, Turn
from penstock.gateway.wire.reader import TextDelta
from penstock.gateway.wire.types import AnswerHead, Api, Choice, CompletionRequest, InvalidRequest

MAX_NESTS = 1_000_000
"""Lists and objects of one body: they take more time and memory than their bytes say."""


def parse_json(body: bytes) -> Any:
    """Raises `InvalidRequest`."""
    if body.count(b"[") + body.count(b"{") > MAX_NESTS:
        raise InvalidRequest("", f"the body has more than {MAX_NESTS} lists and objects; send fewer", "invalid_value")
    try:
        return json.loads(body or b"{}", parse_constant=lambda name: math.nan)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("", f"the body is not valid JSON: {error}", "invalid_value") from error


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return True if the `openai` or `anthropic` package repeats this request."""
    return headers.get("x-stainless-retry-count", "0") not in ("", "0")


Update = tuple[int, TextDelta | Choice]
"""(index of the choice, text that can be shown now, or the whole choice once it is in the journal)"""


class PendingAnswer:
    """One request's answer; `task` makes it, readers follow `updates` or await `whole`."""

    def __init__(self, request: CompletionRequest, head: AnswerHead) -> None:
        self.request, self.head = request, head
        self.task: asyncio.Task[None] | None = None
        self.readers = 0
        """Clients that wait for it; while there are any, an equal request is a further sample."""
        self._pieces: list[list[TextDelta | Choice]] = [[] for _ in range(request.n)]
        self._more = asyncio.Event()
        self.ended = False
        self._error: BaseException | None = None

    def show(self, index: int, delta: TextDelta) -> None:
        """Adds text and tokens that may be sent before the answer is in the journal."""
        if delta.text or delta.tokens:
            self._pieces[index].append(delta)
            self._wake()

    def close(self, choice: Choice) -> None:
        """Adds a whole choice, which is in the journal."""
        self._pieces[choice.index].append(choice)
        self._wake()

    def end(self, error: BaseException | None = None) -> None:
        self.ended, self._error = True, error
        self._wake()

    async def wait_end(self) -> None:
        """Waits until the answer has ended, with or without an error."""
        while not self.ended:
            await self._more.wait()

    @classmethod
    def finished(cls, request: CompletionRequest, head: AnswerHead, choices: Sequence[Choice]) -> PendingAnswer:
        """An answer that is known already."""
        call = cls(request, head)
        for choice in choices:
            call.close(choice)
        call.end()
        return call

    async def updates(self) -> AsyncGenerator[Update]:
        """All pieces, from the beginning. Raises the error that ended the answer early."""
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
        """All choices, in order. Raises the error that ended the answer early."""
        choices: dict[int, Choice] = {}
        async for index, update in self.updates():
            if isinstance(update, Choice):
                choices[index] = update
        return [choices[index] for index in sorted(choices)]

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


Asked = tuple[tuple[int, int], str]
"""((length, hash) of the context, sampling key): requests with equal ones may share an answer."""


class InFlightAnswers:
    """Answers of one session that are being made. Register on start; unregister before completing."""

    def __init__(self) -> None:
        self._calls: dict[Asked, list[PendingAnswer]] = {}

    def __iter__(self) -> Iterator[PendingAnswer]:
        return iter([call for calls in self._calls.values() for call in calls])

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def add(self, key: Asked, call: PendingAnswer) -> None:
        self._calls.setdefault(key, []).append(call)

    def remove(self, call: PendingAnswer) -> None:
        remaining = {key: [one for one in calls if one is not call] for key, calls in self._calls.items()}
        self._calls = {key: calls for key, calls in remaining.items() if calls}

    async def to_join(self, key: Asked, request: CompletionRequest, *, retried: bool) -> PendingAnswer | None:
        """The answer that this request may share; None: it gets its own.

        An answer without readers was abandoned by its client and is shared; with readers only if the client marks this
        request as a retry, otherwise it is a further sample of the same context. One that was asked for with or without
        log-probabilities, as this one is not, is awaited instead, and then found in the journal.
        """
        for call in list(self._calls.get(key, [])):
            if not retried and call.readers:
                continue
            if call.request.logprobs == request.logprobs:
                return call
            await call.wait_end()
        return None

    def give_up(self) -> None:
        for call in self:
            if call.task is not None:
                call.task.cancel()

    async def ended(self) -> None:
        """Waits until no answer is being sampled."""
        tasks = [call.task for call in self if call.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


class Replay:
    """Answers for the second run of an agent: those that its first run got, each one once. Empty for a new episode."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._unanswered: dict[Asked, dict[str, list[Turn]]] = {}
        for turn in turns:
            calls = self._unanswered.setdefault((turn.match.context_key, turn.request_key), {})
            calls.setdefault(turn.answer_id, []).append(turn)

    def take(self, match: PrefixMatch, key: str) -> list[Turn]:
        """Choices of the oldest answer to this request that was not given again yet; empty: there is none."""
        calls = self._unanswered.get((match.context_key, key))
        if not calls:
            return []
        return calls.pop(next(iter(calls)))

    @property
    def left(self) -> int:
        """Answers that were not requested again."""
        return sum(len(calls) for calls in self._unanswered.values())


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    messages: tuple[Message, ...]
    tools: Tools
    prompt: str | tuple[int, ...] | None
    instructed: bool

    @property
    def characters(self) -> int:
        """Return the length of all text in it; 0 for a prompt of ids."""
        return _characters([self.prompt, self.messages, self.tools])

    def check_length(self, limit: int, longest_token: int | None) -> None:
        """Raises `TooLong` where the request cannot fit into `limit` tokens, whatever its text is."""
        if isinstance(self.prompt, tuple) and len(self.prompt) >= limit:
            raise TooLong(f"this model's context is {limit} tokens; the prompt is {len(self.prompt)} tokens")
        most = limit * (longest_token or 0)
        if longest_token is not None and self.characters > most:
            raise TooLong(
                f"this model's context is {limit} tokens, at most {most} characters; "
                f"the request has {self.characters} characters"
            )

    def resolve(self, history: PrefixTree) -> PrefixMatch:
        """Raises `NotRenderable`."""
        if self.prompt is not None:
            return history.resolve_prompt(self.prompt)
        return history.resolve_prefix(self.messages, self.tools, instructed=self.instructed)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def resolve_request(request: CompletionRequest, response: Callable[[str], Turn | None]) -> ResolvedRequest:
    """The whole conversation of a request; `response` finds a stored one by its id.

    Raises `InvalidRequest` if there is none, for calls without results, and for results without calls.
    """
    if request.prompt is not None:
        return ResolvedRequest((), (), request.prompt, instructed=False)
    before: list[Message] = []
    if request.instructions is not None:
        before.append({"role": "system", "content": request.instructions})
    if (answer := request.previous_response_id) is not None:
        turn = response(answer)
        if turn is None:
            message = f"Previous response with id {answer!r} not found."
            raise InvalidRequest("previous_response_id", message, "previous_response_not_found")
        before += turn.conversation()
    messages = (*before, *request.messages)
    check_calls(messages, request.api)
    return ResolvedRequest(messages, request.tools, None, instructed=request.instructions is not None)


def check_calls(messages: Sequence[Message], api: Api) -> None:
    """Raises `InvalidRequest` for a call without a result, and for a result without a call.

    Results stand directly behind the calls that they answer, one for each; in /v1/responses anywhere behind them.
    """
    anywhere = api == "responses"
    called: set[str] = set()
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        field = "input" if anywhere else f"messages.{index}"
        if message["role"] == "tool":
            answered = message["tool_call_id"]
            if answered not in called:
                where = "before it" if anywhere else "of the message before the results"
                raise InvalidRequest(
                    field, f"is a result for {answered!r}, which is not a call {where}", "invalid_value"
                )
            open_calls.discard(answered)
            continue
        if not anywhere:
            _check_answered(open_calls, field)
            called = set()
        calls = {str(call["id"]) for call in message.get("tool_calls") or ()}
        called |= calls
        open_calls |= calls
    _check_answered(open_calls, "input" if anywhere else "messages")


def _check_answered(open_calls: set[str], field: str) -> None:
    if open_calls:
        names = ", ".join(sorted(open_calls))
        raise InvalidRequest(field, f"each call must be answered by a result, and has none: {names}", "invalid_value")
