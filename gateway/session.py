"""One recorded episode: requests in, answers out. Each answer is durable before its reply ends.

    request ──resolve_prefix──► context ─┬─ answered before, in the journal ──► the same answer
                                         ├─ being sampled, client gone ───────► the answer in progress
                                         ├─ turns or tokens used up ──────────► empty, finish reason "length"
                                         └─ sampled, streamed ──► journal ──► prefix tree ──► end of the reply

Requests may be concurrent (sub-agents). `journal.py` holds what is durable, `prefix_tree.py` the turns.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from penstock.agent_loops import (
    TRUNCATED_LENGTH,
    TRUNCATED_TURNS,
    Budget,
    EpisodeJournal,
    InfraFailure,
    TokenMismatch,
    Watch,
)
from penstock.agent_loops.chat import tools_problem
from penstock.common import gather_or_cancel
from penstock.gateway.context import GatewayContext
from penstock.gateway.errors import Gone, TooLong, to_client_error, unexpected_end
from penstock.gateway.journal import DELETED, SessionJournal, head_of, recorded_choice, sampling_key
from penstock.gateway.prefix_tree import NotRenderable, PrefixMatch, Turn, as_json
from penstock.gateway.requests import InFlightAnswers, PendingAnswer, Replay, resolve_request
from penstock.gateway.wire.reader import AnswerReader
from penstock.gateway.wire.types import AnswerHead, Api, Choice, CompletionRequest, InvalidRequest, answer_id
from penstock.rollout_server import Chunk
from penstock.transfer_queue import Lease, LeaseLost, Outcome, OutcomeKind, QueueError

LONG = 20_000
"""Characters from which a request is tokenized in a thread; shorter ones take some 50 ms at most."""


class GatewaySession:
    """Recording of one leased episode. Raises `TokenMismatch` where its journal cannot be restored."""

    def __init__(
        self, context: GatewayContext, lease: Lease, handle: str, *, own_journal: EpisodeJournal | None = None
    ) -> None:
        """Args:
        own_journal: the agent runs in this process, from its start, and no other process records under this lease.
            `lease.journal` answers the agent's repeated requests in order; each further one is a new sample.
        """
        self.context, self.lease, self.handle = context, lease, handle
        self._alone = own_journal is not None
        self.record = SessionJournal(context, lease, own_journal or EpisodeJournal(context.queue, lease))
        self.history, self.llm, self.facts = self.record.history, self.record.llm, self.record.facts
        self.replay = Replay(self.history.turns.values() if self._alone else ())
        self.gone: str | None = None
        """Why no requests are accepted any more."""
        self.broken: Outcome | None = None
        """Set where the episode must end as an infrastructure failure."""
        self.opened_at = self.active_at = time.monotonic()
        self.wasted_calls = 0
        """Answers that ended before they were whole; their tokens are not recorded."""
        self._budget = TokenBudget(self.record.budget)
        self.in_flight = InFlightAnswers()

    # a request -----------------------------------------------------------------------------------------------------
    async def answer(self, request: CompletionRequest, *, retried: bool = False) -> PendingAnswer:
        """The answer to `request`, new or recorded. Raises `InvalidRequest` and each `GatewayError`.

        Args:
            retried: the client marks this request as a retry.
        """
        match = await self._admit(request)
        key = (match.context_key, sampling_key(request))
        if running := await self.in_flight.to_join(key, request, retried=retried):
            return running
        self.check_open()  # it may have ended during the await
        known = self._known(match, key[1], retried)
        if len(known) == request.n:
            return self._recorded(request, match, known)
        limit = self.context.context_limit()
        if limit is not None and len(match.context) >= limit:
            raise TooLong(f"this model's context is {limit} tokens; the messages are {len(match.context)} tokens")
        of_run = self.llm.sampling.max_new_tokens
        room = int(request.sampling.get("max_new_tokens", of_run))
        if request.limit_is_bound:
            room = min(room, of_run)
        # The prompt of a new segment costs nothing, as in agent loops.
        fed = len(match.delta) if match.parent is not None and match.parent.is_last else 0
        reservation = self._budget.take(request.n - len(known), room, fed)
        if isinstance(reservation, Outcome):
            await self.note(truncated=reservation.reason)
            return self._recorded(request, match, known)
        return self._start(request, match, known, reservation)

    async def count(self, request: CompletionRequest) -> int:
        """Tokens that the model would be fed for `request`. Samples and records nothing. Raises as `answer` does."""
        return len((await self._admit(request)).context)

    async def _admit(self, request: CompletionRequest) -> PrefixMatch:
        """The position of a request that may be served.

        Reads the journal again only where another server may have recorded an answer that this request contains.
        """
        self.check_open()
        self.context.check_model(request.model)
        # All prompts of a run are rendered alike: else no conversation could be continued token for token. A client may
        # say the run's own settings again.
        of_run = self.context.config.template_settings
        for name, value in request.template_settings.items():
            if name not in of_run or as_json(value) != as_json(of_run[name]):
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}",
                    f"is not the run's: agent.template_settings is {as_json(dict(of_run))}, for every request of it",
                    "unsupported_parameter",
                )
        if request.reads_calls and (problem := tools_problem(self.context.chat)):
            raise InvalidRequest("tools", problem)
        self.active_at = time.monotonic()
        if request.previous_response_id is not None:
            await self.find_response(request.previous_response_id)
        try:
            match = await self._match(request)
            if self.record.unsure or (match.may_be_known_elsewhere and not self._alone):
                await self.refresh()
                match = await self._match(request)
        except NotRenderable as error:
            raise InvalidRequest("prompt" if request.api == "completions" else "messages", str(error)) from error
        return match

    def check_open(self) -> None:
        """Raises `Gone`, with the cause, where the session has ended."""
        if self.gone is not None:
            raise Gone(self.gone)

    async def _match(self, request: CompletionRequest) -> PrefixMatch:
        """Tokenizes a long request in a thread: the leases and answers of all other episodes wait for this loop."""
        resolved, limit = resolve_request(request, self.record.response), self.context.context_limit()
        if limit is not None:
            resolved.check_length(limit, self.context.longest_token)
        if resolved.characters < LONG:
            return resolved.resolve(self.history)
        # A thread does not end with its caller, and until it ends the journal's lock must be held.
        return await asyncio.shield(asyncio.ensure_future(self.record.resolve_in_thread(resolved)))

    def _known(self, match: PrefixMatch, key: str, retried: bool) -> list[Turn]:
        """Recorded answers to this very request. One that has been continued is sampled anew, unless retried."""
        if (replayed := self.replay.take(match, key)) or (self._alone and not retried):
            return replayed
        turns = self.history.answers(match, key)
        return [] if not retried and any(turn.continued for turn in turns) else turns

    def _recorded(self, request: CompletionRequest, match: PrefixMatch, known: Sequence[Turn]) -> PendingAnswer:
        """Recorded choices; those beyond them are empty, because the budget is used up."""
        head = self._head(request, match, known)
        empty = Choice(index=0, token_ids=(), logprobs=(), text="", content="", finish_reason="length")
        choices = {index: replace(empty, index=index) for index in range(request.n)}
        for turn in known:
            choices[turn.choice.index] = recorded_choice(turn, request, head, self.context.detokenizer)
        return PendingAnswer.finished(request, head, list(choices.values()))

    def _head(self, request: CompletionRequest, match: PrefixMatch, known: Sequence[Turn] = ()) -> AnswerHead:
        decode = self.context.chat.decode
        if known:
            head = head_of(known[0].answer_id, known[0].created_s, request.model, match)
        else:
            head = head_of(answer_id(request.api, secrets.token_hex(16)), int(time.time()), request.model, match)
        # Some templates open the thinking of each answer themselves; the mark and the space after it take a few ids.
        inside = request.api == "messages" and decode(match.context[-16:]).rstrip().endswith("<think>")
        return replace(head, inside_thinking=inside)

    # sampling ------------------------------------------------------------------------------------------------------
    def _start(
        self, request: CompletionRequest, match: PrefixMatch, known: Sequence[Turn], reservation: Reservation
    ) -> PendingAnswer:
        call = PendingAnswer(request, self._head(request, match, known))
        self.in_flight.add((match.context_key, sampling_key(request)), call)
        call.task = asyncio.create_task(self._make(call, match, known, reservation), name=call.head.answer_id)
        # A task that is cancelled before its first step runs no line of `_make`.
        call.task.add_done_callback(lambda task: self._close(call, reservation, unexpected_end(task)))
        return call

    async def _make(
        self, call: PendingAnswer, match: PrefixMatch, known: Sequence[Turn], reservation: Reservation
    ) -> None:
        """Samples the choices that are not recorded. Errors go to the readers of `call`."""
        try:
            for turn in known:
                call.close(recorded_choice(turn, call.request, call.head, self.context.detokenizer))
            missing = [index for index in range(call.request.n) if index not in {turn.choice.index for turn in known}]
            limits = zip(missing, reservation.limits, strict=True)
            await gather_or_cancel([sample(self.record, call, match, index, room) for index, room in limits])
            self._close(call, reservation, None)
        except (InfraFailure, QueueError, ValidationError) as error:
            self._close(call, reservation, self._explained(error, call.request.api))

    def _close(self, call: PendingAnswer, reservation: Reservation, error: Exception | None) -> None:
        """Ends `call`; releases its reservation first, because the next request must find the rest of the budget."""
        if call.ended:
            return
        self.in_flight.remove(call)
        self._budget.give_back(reservation)
        self.wasted_calls += error is not None
        self.active_at = time.monotonic()
        call.end(Gone(self.gone) if error is not None and self.gone is not None else error)

    def _explained(self, error: Exception, api: Api = "chat") -> Exception:
        """The error for the client; ends the session where the lease is lost or ids do not match."""
        if isinstance(error, LeaseLost):
            self.end(f"the lease is lost: {error}")
            return Gone(str(self.gone))
        if isinstance(error, TokenMismatch):  # the episode ends as an infrastructure failure, never with a reward
            self.context.mismatches.seen += 1
            self.broken = Outcome(OutcomeKind.INFRA_ERROR, error.reason, error.component)
            self.end(str(error))
            return Gone(str(error))
        return to_client_error(error, api)

    # the journal ---------------------------------------------------------------------------------------------------
    async def refresh(self) -> None:
        """Reads what other servers recorded under this lease. Raises `Gone`, `NotNow`."""
        try:
            await self.record.refresh()
        except (QueueError, TokenMismatch) as error:
            raise self._explained(error) from error

    async def find_response(self, answer_id: str) -> Turn | None:
        """The turn of a stored response, which another server may have recorded. Raises `Gone`, `NotNow`."""
        self.check_open()
        if self.record.response(answer_id) is None and not self._alone:
            await self.refresh()
        return self.record.response(answer_id)

    async def delete_response(self, answer_id: str) -> None:
        """Hides a stored response; its tokens stay recorded. Raises `Gone`, `NotNow`."""
        fact = {f"{DELETED}{answer_id}": True}
        if self._alone:  # in its second run the agent starts anew and needs the response until it deletes it again
            self.facts.update(fact)
        else:
            await self.note(**fact)

    async def note(self, **facts: Any) -> None:
        """Journals facts; the newest of each name counts. Raises `Gone`, `NotNow`."""
        try:
            await self.record.note(**facts)
        except QueueError as error:
            raise self._explained(error) from error

    # its end -------------------------------------------------------------------------------------------------------
    def end(self, cause: str) -> None:
        """Accepts no more requests, for this cause, and cancels those in progress."""
        self.gone = cause
        self.in_flight.give_up()

    def reopen(self) -> None:
        """Accepts requests again, after an end that failed."""
        self.gone = None

    def state(self) -> Mapping[str, Any]:
        """Body of GET /episodes/{handle}."""
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


@dataclass(frozen=True, slots=True)
class Reservation:
    """Part of a budget that one request holds until it has ended."""

    limits: tuple[int, ...]
    """Token limit of each answer."""
    tokens: int
    """All limits together, and the new context tokens before them."""


class TokenBudget:
    """Reservations of concurrent requests; together they never exceed the rest of the episode's budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._turns = 0
        self._tokens = 0

    def take(self, answers: int, limit: int, fed: int) -> Reservation | Outcome:
        """Reserves `answers` answers of up to `limit` tokens after `fed` new context tokens; else the outcome."""
        if self._budget.turns_left - self._turns < answers:
            return TRUNCATED_TURNS
        remaining = self._budget.tokens_left - self._tokens - fed
        limits = []
        for _ in range(answers):
            limits.append(min(limit, remaining))
            remaining -= limits[-1]
        if limits[-1] < 1:
            return TRUNCATED_LENGTH
        self._turns += answers
        self._tokens += fed + sum(limits)
        return Reservation(tuple(limits), fed + sum(limits))

    def give_back(self, reservation: Reservation) -> None:
        """Releases a reservation; what the request really used is in the budget by now."""
        self._turns -= len(reservation.limits)
        self._tokens -= reservation.tokens


async def sample(record: SessionJournal, call: PendingAnswer, match: PrefixMatch, index: int, room: int) -> None:
    """Samples choice `index` of up to `room` tokens, shows it as it comes, journals and closes it.

    Raises `InfraFailure`, `QueueError`, `ValidationError`.
    """
    request = call.request
    reader = AnswerReader(request, call.head, index, record.detokenizer)
    may_end_early = bool(request.stop) or (request.reads_calls and not request.parallel_tool_calls)
    watch = _watch(call, reader, index) if request.stream or may_end_early else None
    overrides = dict(request.sampling)
    if "seed" in overrides:  # each choice has its own; seeds of engines are not negative, OpenAI's may be
        overrides["seed"] = (overrides["seed"] + index) % 2**63
    generation = await record.llm.draw(list(match.context), room, overrides, watch, routed_up_to=match.routed_up_to)
    if watch is None:
        reader.feed(generation.token_ids, generation.logprobs)
    choice = reader.finish("length" if generation.finish_reason == "length" else "stop")
    await record.write(call, match, choice, generation)
    call.close(choice)


def _watch(call: PendingAnswer, reader: AnswerReader, index: int) -> Watch:
    def watch(chunk: Chunk) -> int | None:
        taken = len(reader.token_ids)
        call.show(index, reader.feed(chunk.token_ids, chunk.logprobs))
        accepted = len(reader.token_ids) - taken
        ends_here = reader.stopped and (accepted < len(chunk.token_ids) or chunk.finish_reason != "stop")
        return accepted if ends_here else None

    return watch
