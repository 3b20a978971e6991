"""One recorded episode: requests in, answers out, each answer durable before its reply ends.

request ──place──► context ─┬─ asked before, in the journal ───────► told again
                            ├─ being sampled, its client gone ─────► joined
                            ├─ turns or tokens used up ────────────► empty, finish reason "length"
                            └─ sampled, shown as it comes ──► journal ──► history ──► the reply's last words

Requests may come side by side (sub-agents); journal and history are `record.py`'s.

What further answers may use of an episode's budget, with what is being sampled now taken off.

One choice of a call: sampled, shown as it comes, written down, closed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from penstock.agent_loops import TRUNCATED_LENGTH, TRUNCATED_TURNS, Budget, InfraFailure, TokenMismatch, Watch
from penstock.common import gather_or_cancel
from penstock.gateway.context import CaptureParts
from penstock.gateway.errors import Gone, TooLong, told_of, unforeseen
from penstock.gateway.journal import Record, head_of, how_asked, told_again
from penstock.gateway.prefix_tree import NotRenderable, Place, Turn
from penstock.gateway.requests import Call, InFlight, Replay, said_by
from penstock.gateway.wire import AnswerReader, Ask, BadAsk, Choice, answer_id
from penstock.rollout_server import Chunk
from penstock.transfer_queue import Lease, LeaseLost, Outcome, OutcomeKind, QueueError


class CapturedEpisode:
    """Made for one lease, by whoever holds its handle. Raises `TokenMismatch` where the journal cannot be followed."""

    def __init__(self, parts: CaptureParts, lease: Lease, handle: str, *, alone: bool = False) -> None:
        """`alone`: the agent runs in this process, from its start. No other process records under this lease; what the
        journal holds answers the agent's own questions anew, in order, and each further one is a sample of its own.
        """
        self.parts, self.lease, self.handle = parts, lease, handle
        self._alone = alone
        self.record = Record(parts, lease)
        self.history, self.llm, self.facts = self.record.history, self.record.llm, self.record.facts
        self.replay = Replay(self.history.turns.values() if alone else ())
        self.gone: str | None = None
        """Why there are no more calls."""
        self.broken: Outcome | None = None
        """Set where the episode must end as a failure of ours."""
        self.opened_at = self.active_at = time.monotonic()
        self.wasted_calls = 0
        """Answers that were given up before they were whole; their tokens are nowhere."""
        self._room = Room(self.record.budget)
        self.in_flight = InFlight()

    # a request -----------------------------------------------------------------------------------------------------
    async def answer(self, ask: Ask, *, retried: bool = False) -> Call:
        """Its answer, made now or known already. `retried`: the client says that it asked before.

        Raises `BadAsk`, `TooLong`, `Gone`, `NotNow`.
        """
        self.check_open()
        self.active_at = time.monotonic()
        place = await self._place(ask)
        key = (place.asked, how_asked(ask))
        if running := await self.in_flight.to_join(key, ask, retried=retried):
            return running
        self.check_open()  # it may have ended while others were asked
        known = self._known(place, key[1], retried)
        if len(known) == ask.n:
            return self._told_again(ask, place, known)
        self._check_length(place)
        share = self._room.take(ask.n - len(known), self._wanted(ask), self._fed(place))
        if isinstance(share, Outcome):
            await self.note(truncated=share.reason)
            return self._told_again(ask, place, known)
        return self._start(ask, place, known, share)

    def check_open(self) -> None:
        """Raises `Gone` with the cause."""
        if self.gone is not None:
            raise Gone(self.gone)

    async def _place(self, ask: Ask) -> Place:
        """Another sidecar may have answered what is not known here: asked only where that would show."""
        try:
            place = said_by(ask, self.history).place(self.history)
            if self.record.unsure or (place.may_be_known_elsewhere and not self._alone):
                await self.refresh()
                place = said_by(ask, self.history).place(self.history)
        except NotRenderable as error:
            raise BadAsk("prompt" if ask.api == "completions" else "messages", str(error)) from error
        return place

    def _known(self, place: Place, how: str, retried: bool) -> list[Turn]:
        """Recorded answers to exactly this. One that was gone on from is asked anew, unless the client repeats."""
        if (replayed := self.replay.take(place, how)) or (self._alone and not retried):
            return replayed
        turns = self.history.answers(place, how)
        return [] if not retried and any(turn.continued for turn in turns) else turns

    def _told_again(self, ask: Ask, place: Place, known: Sequence[Turn]) -> Call:
        """What is recorded; choices beyond it are empty, for there is no room for them."""
        head = self._head(ask, place, known)
        choices = {turn.choice.index: told_again(turn, ask, head, self.parts.text_of) for turn in known}
        return Call.finished(ask, head, [choices.get(index) or _nothing(index) for index in range(ask.n)])

    def _head(self, ask: Ask, place: Place, known: Sequence[Turn] = ()) -> Any:
        if known:
            return head_of(known[0].answer_id, known[0].created_s, ask.model, place)
        return head_of(answer_id(ask.api, secrets.token_hex(16)), int(time.time()), ask.model, place)

    def _check_length(self, place: Place) -> None:
        limit = self.parts.context_limit()
        if limit is not None and len(place.context) >= limit:
            raise TooLong(f"this model's context is {limit} tokens; the messages are {len(place.context)} tokens")

    def _wanted(self, ask: Ask) -> int:
        return int(ask.sampling.get("max_new_tokens", self.llm.sampling.max_new_tokens))

    def _fed(self, place: Place) -> int:
        """New ids that a segment goes on with; the prompt of a new segment costs nothing, as in agent loops."""
        return len(place.delta) if place.parent is not None and place.parent.is_last else 0

    # sampling ------------------------------------------------------------------------------------------------------
    def _start(self, ask: Ask, place: Place, known: Sequence[Turn], share: Share) -> Call:
        call = Call(ask, self._head(ask, place, known))
        self.in_flight.add((place.asked, how_asked(ask)), call)
        call.task = asyncio.create_task(self._make(call, place, known, share), name=call.head.answer_id)
        # Its last line is not enough: a task that is cancelled before its first step runs no line at all.
        call.task.add_done_callback(lambda task: self._close(call, share, unforeseen(task)))
        return call

    async def _make(self, call: Call, place: Place, known: Sequence[Turn], share: Share) -> None:
        """What goes wrong is for those who wait for the call."""
        try:
            for turn in known:
                call.close(told_again(turn, call.ask, call.head, self.parts.text_of))
            missing = [index for index in range(call.ask.n) if index not in {turn.choice.index for turn in known}]
            rooms = zip(missing, share.rooms, strict=True)
            await gather_or_cancel([sample(self.record, call, place, index, room) for index, room in rooms])
            self._close(call, share, None)
        except (InfraFailure, QueueError, ValidationError) as error:
            self._close(call, share, self._explained(error))

    def _close(self, call: Call, share: Share, error: Exception | None) -> None:
        """Before anybody hears of its end: the next request must find the room that this one leaves."""
        if call.ended:
            return
        self.in_flight.remove(call)
        self._room.give_back(share)
        self.wasted_calls += error is not None
        self.active_at = time.monotonic()
        call.end(Gone(self.gone) if error is not None and self.gone is not None else error)

    def _explained(self, error: Exception) -> Exception:
        """What the client is told."""
        if isinstance(error, LeaseLost):
            self.end(f"the lease is lost: {error}")
            return Gone(str(self.gone))
        if isinstance(error, TokenMismatch):
            return self._spoiled(error)
        return told_of(error)

    # the journal ---------------------------------------------------------------------------------------------------
    async def refresh(self) -> None:
        """Take in what other sidecars recorded under this lease. Raises `Gone`, `NotNow`."""
        try:
            await self.record.refresh()
        except (QueueError, TokenMismatch) as error:
            raise self._explained(error) from error

    async def note(self, **facts: Any) -> None:
        """Write facts down; the newest of each name counts. Raises `Gone`, `NotNow`."""
        try:
            await self.record.note(**facts)
        except QueueError as error:
            raise self._explained(error) from error

    def _spoiled(self, error: TokenMismatch) -> Gone:
        """Ids do not fit together: the episode ends as a failure of ours, never with a reward."""
        self.parts.mismatches.seen += 1
        self.broken = Outcome(OutcomeKind.INFRA_ERROR, error.reason, error.component)
        self.end(str(error))
        return Gone(str(error))

    # its end -------------------------------------------------------------------------------------------------------
    def end(self, cause: str) -> None:
        """No more calls, for this cause; those being made are given up."""
        self.gone = cause
        self.in_flight.give_up()

    def reopen(self) -> None:
        """The end did not come about: calls are taken again."""
        self.gone = None

    def state(self) -> Mapping[str, Any]:
        """For GET /episodes/{handle}."""
        return {
            "episode_id": self.lease.episode_id,
            "handle": self.handle,
            "turns": len(self.history.turns),
            "segments": len(self.history.segments),
            "turns_left": self.record.budget.turns_left,
            "tokens_left": self.record.budget.tokens_left,
            "calls_in_flight": len(self.in_flight),
            "reward": self.facts.get("reward"),
            "truncated": self.facts.get("truncated"),
            "age_s": round(time.monotonic() - self.opened_at, 3),
        }


def _nothing(index: int) -> Choice:
    return Choice(index=index, token_ids=(), logprobs=(), text="", content="", finish_reason="length")


@dataclass(frozen=True, slots=True)
class Share:
    """Taken by one call until it has ended."""

    rooms: tuple[int, ...]
    """Most tokens of each answer."""
    tokens: int
    """These together, and the ids that are fed before them."""


class Room:
    """Shares of calls that run side by side; together they never take more than is left."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._turns = 0
        self._tokens = 0

    def take(self, answers: int, wanted: int, fed: int) -> Share | Outcome:
        """Room for so many answers of `wanted` tokens at most, behind `fed` new ids; or how the episode is over."""
        if self._budget.turns_left - self._turns < answers:
            return TRUNCATED_TURNS
        left = self._budget.tokens_left - self._tokens - fed
        rooms = []
        for _ in range(answers):
            rooms.append(min(wanted, left))
            left -= rooms[-1]
        if rooms[-1] < 1:
            return TRUNCATED_LENGTH
        self._turns += answers
        self._tokens += fed + sum(rooms)
        return Share(tuple(rooms), fed + sum(rooms))

    def give_back(self, share: Share) -> None:
        """The call has ended; what it really used is in the budget by now."""
        self._turns -= len(share.rooms)
        self._tokens -= share.tokens


SEEDS = 2**63
"""OpenAI's seeds may be negative, an engine's are not."""


async def sample(record: Record, call: Call, place: Place, index: int, room: int) -> None:
    """Choice `index`, of `room` tokens at most. Raises `InfraFailure`, `QueueError`, `ValidationError`."""
    reader = AnswerReader(call.ask, call.head, index, record.text_of)
    watch = _watch(call, reader, index) if _must_watch(call.ask) else None
    generation = await record.llm.draw(list(place.context), room, _overrides(call.ask, index), watch)
    if watch is None:
        reader.feed(generation.token_ids, generation.logprobs)
    choice = reader.finish("length" if generation.finish_reason == "length" else "stop")
    await record.write(call, place, choice, generation)
    call.close(choice)


def _overrides(ask: Ask, index: int) -> Mapping[str, Any]:
    """Fields of `Sampling`; each choice has a seed of its own."""
    if "seed" not in ask.sampling:
        return ask.sampling
    return {**ask.sampling, "seed": (ask.sampling["seed"] + index) % SEEDS}


def _must_watch(ask: Ask) -> bool:
    """Whether somebody reads along, or the answer may end before the engine ends it."""
    return ask.stream or bool(ask.stop) or (ask.reads_calls and not ask.parallel_tool_calls)


def _watch(call: Call, reader: AnswerReader, index: int) -> Watch:
    def watch(chunk: Chunk) -> int | None:
        taken = len(reader.token_ids)
        call.show(index, reader.feed(chunk.token_ids, chunk.logprobs))
        kept = len(reader.token_ids) - taken
        ends_here = reader.stopped and (kept < len(chunk.token_ids) or chunk.finish_reason != "stop")
        return kept if ends_here else None

    return watch
