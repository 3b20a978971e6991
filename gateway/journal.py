"""The durable part of a recorded episode: its journal, and the prefix tree that is restored from it.

An entry holds an answer's ids and the data to restore its turn. Only messages that are new since the parent turn are
written, and each message or tool list once per episode: the size of an entry does not grow with the conversation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from penstock.agent_loops import (
    EpisodeJournal,
    EpisodeLLM,
    RecordedScore,
    TokenMismatch,
    from_entry,
    since_last_restart,
    to_entry,
    usual_sampling,
)
from penstock.agent_loops.chat import new_budget
from penstock.gateway.context import GatewayContext
from penstock.gateway.prefix_tree import NotRenderable, PrefixMatch, PrefixTree, Tools, Turn, as_json, digest, hash_of
from penstock.gateway.requests import PendingAnswer, ResolvedRequest
from penstock.gateway.wire.reader import Detokenizer, read_answer
from penstock.gateway.wire.responses import response_body
from penstock.gateway.wire.types import AnswerHead, Api, Choice, CompletionRequest, EngineFinish
from penstock.rollout_server import Generation
from penstock.transfer_queue import JournalEntry, JournalKind, Lease

ANSWER = "answer"
"""Key in an entry's data: the entry is an answer of a recorded episode."""


class MessageStore:
    """Messages and tool lists that are in the journal, by digest."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def new(self, values: Iterable[Any]) -> dict[str, str]:
        """Digest → JSON of those `values` that are not in the journal yet."""
        texts = {digest(text): text for text in map(_dump, values)}
        return {name: text for name, text in texts.items() if name not in self._texts}

    def keep(self, texts: Mapping[str, str]) -> None:
        """Records that `texts` are in the journal."""
        self._texts.update(texts)

    def get(self, name: str) -> Any:
        return json.loads(self._texts[name])


def sampling_key(request: CompletionRequest) -> str:
    """Equal for two requests that are the same on the same context; another seed makes another request."""
    tools = (request.tool_choice, request.parallel_tool_calls)
    return as_json([request.api, dict(request.sampling), request.n, list(request.stop), *tools])


def echo_of(request: CompletionRequest) -> dict[str, Any]:
    """Return the fields of a request that its stored response repeats; empty where none is stored."""
    return {"model": request.model, **request.echo} if request.api == "responses" and request.stored else {}


def answer_data(
    match: PrefixMatch, request: CompletionRequest, head: AnswerHead, index: int, bodies: MessageStore
) -> dict[str, Any]:
    """Data of the journal entry of choice `index`."""
    echo = echo_of(request)
    resolved = [*match.new, *([list(match.tools)] if match.tools and not match.parent else []), *echo.values()]
    return {
        ANSWER: head.answer_id,
        "index": index,
        "created_s": head.created_s,
        "asked": sampling_key(request),
        "parent": match.parent.turn_id if match.parent else "",
        "new": [digest(_dump(message)) for message in match.new],
        "tools": digest(_dump(list(match.tools))) if match.tools and not match.parent else "",
        "prompt": list(match.prompt) if isinstance(match.prompt, tuple) else match.prompt,
        "instructed": match.instructed,
        "echo": {name: digest(_dump(value)) for name, value in echo.items()},
        "bodies": bodies.new(resolved),
    }


def restore_turn(
    history: PrefixTree, entry: JournalEntry, bodies: MessageStore, detokenizer: Detokenizer
) -> Turn | None:
    """Adds one entry's answer; None if it is known. Raises `TokenMismatch` where its context has other ids now."""
    note = entry.data
    bodies.keep(note["bodies"])
    if f"{note[ANSWER]}.{note['index']}" in history.turns:
        return None
    try:
        new = tuple(bodies.get(name) for name in note["new"])
        tools: Tools = tuple(bodies.get(note["tools"])) if note["tools"] else ()
        if note["parent"]:
            tools = history.turns[note["parent"]].match.tools
        match = history.resolve_recorded(note, new, tools)
    except (KeyError, NotRenderable) as error:
        raise TokenMismatch("agent", f"answer {note[ANSWER]} of the journal has no place: {error!r}") from error
    if match.context_key != (entry.context_len, entry.context_hash):
        raise TokenMismatch("agent", f"the context of {note[ANSWER]} renders to other ids than the engine was fed")
    request = _ask_of(note["asked"], match)
    generation = from_entry(entry)
    head = head_of(note[ANSWER], note["created_s"], "", match)
    reason: EngineFinish = "length" if generation.finish_reason == "length" else "stop"
    answer = (generation.token_ids, generation.logprobs, reason)
    choice = read_answer(request, head, note["index"], detokenizer, answer)
    turn = Turn(note[ANSWER], match, choice, note["asked"], note["created_s"], note.get("echo", {}))
    history.add(turn, generation)
    return turn


def head_of(answer_id: str, created_s: int, model: str, match: PrefixMatch) -> AnswerHead:
    return AnswerHead(answer_id, created_s, model, match.context_key[0], match.parent.end if match.parent else 0)


def recorded_choice(turn: Turn, request: CompletionRequest, head: AnswerHead, detokenizer: Detokenizer) -> Choice:
    """A recorded answer in the form that `request` needs (with log-probabilities of tokens or without)."""
    reason: EngineFinish = "length" if turn.choice.finish_reason == "length" else "stop"
    answer = (turn.choice.token_ids, turn.choice.logprobs, reason)
    return read_answer(request, head, turn.choice.index, detokenizer, answer)


def _ask_of(packed: str, match: PrefixMatch) -> CompletionRequest:
    api: Api
    api, sampling, n, stop, tool_choice, parallel = json.loads(packed)
    return CompletionRequest(
        api=api,
        model="",
        tools=match.tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        n=n,
        sampling=sampling,
        stop=tuple(stop),
    )


def request_of(turn: Turn) -> CompletionRequest:
    """The fields of the request that this turn answered that are in its sampling key."""
    return _ask_of(turn.request_key, turn.match)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


NOTED = "noted"
"""Key in an entry's data: facts of the episode other than answers (reward, truncation)."""
SCORE = "score"
"""Among these facts: what the reward function gave; `reward` is what a client posted."""


DELETED = "deleted "
"""Begins the names of facts about responses that the client deleted; their tokens stay in the trajectory."""


class SessionJournal:
    """Adds answers to the journal, then to the prefix tree, one by one and in the same order.

    Raises `TokenMismatch` where the journal of `lease` cannot be restored.
    """

    def __init__(self, context: GatewayContext, lease: Lease, journal: EpisodeJournal) -> None:
        """`lease.journal`: the entries to restore; further ones are appended to `journal`, which may hold others."""
        config = context.config.of_source(lease.task.data_source)
        chat = context.chat.for_episode(new_budget(config))
        sampling = usual_sampling(config, chat.stop_token_ids, lease)
        self.lease = lease
        self.budget = chat.budget
        self.history = PrefixTree(chat)
        self.facts: dict[str, Any] = {}
        """``reward``, ``turn_rewards``, ``truncated``, ``score``, as journaled last."""
        self.detokenizer = context.detokenizer
        self.unsure = False
        """The queue may hold an answer that is unknown here: the last write failed."""
        self._context = context
        self._journal = journal
        with_routes = context.routing_replay and lease.task.split == "train"
        self.llm = EpisodeLLM(context.client, lease, self._journal, sampling, chat.decode, with_routes=with_routes)
        self._bodies = MessageStore()
        self._writing = asyncio.Lock()
        self._absorb(lease)

    async def write(self, call: PendingAnswer, match: PrefixMatch, choice: Choice, generation: Generation) -> None:
        """Adds a whole answer. Raises `QueueError`, after which it may or may not be in the journal."""
        async with self._writing:
            note = answer_data(match, call.request, call.head, choice.index, self._bodies)
            turn = Turn(call.head.answer_id, match, choice, note["asked"], call.head.created_s, note["echo"])
            try:
                await self._journal.append(to_entry(generation, match.context_key, note))
            except BaseException:  # a cancelled one too may be in the queue
                self.unsure = True
                raise
            self._bodies.keep(note["bodies"])
            self.history.add(turn, generation)
            self._remember(turn, generation)

    async def note(self, **facts: Any) -> None:
        """Journals facts that have changed; the newest of each name counts. Raises `QueueError`."""
        if any(self.facts.get(name) != value for name, value in facts.items()):
            await self._journal.append(JournalEntry(kind=JournalKind.TOOLS, data={NOTED: facts}))
            self.facts.update(facts)

    @property
    def score(self) -> RecordedScore | None:
        """The reward function's, as journaled last; what it scored may have been continued since."""
        recorded = self.facts.get(SCORE)
        return RecordedScore(**recorded) if recorded else None

    async def keep_score(self, score: RecordedScore) -> None:
        """Raises `QueueError`."""
        await self.note(**{SCORE: asdict(score)})

    async def prove(self, reward: str) -> None:
        """Raises `QueueError`."""
        await self._journal.prove(reward)

    async def is_proven(self, reward: str) -> bool:
        """Raises `QueueError`."""
        return await self._journal.is_proven(reward)

    def response(self, answer_id: str) -> Turn | None:
        """Returns the turn of a stored response; None if it was deleted or not stored."""
        turn = self.history.turns.get(f"{answer_id}.0")
        return turn if turn and turn.echo and f"{DELETED}{answer_id}" not in self.facts else None

    def response_body(self, turn: Turn, *, logprobs: bool) -> dict[str, Any]:
        """The body of a response as it was answered."""
        echo = {name: self._bodies.get(value) for name, value in turn.echo.items()}
        head = head_of(turn.answer_id, turn.created_s, echo.pop("model", self._context.model), turn.match)
        request = replace(request_of(turn), echo=echo, logprobs=logprobs)
        return response_body(request, head, [recorded_choice(turn, request, head, self.detokenizer)])

    async def resolve_in_thread(self, resolved: ResolvedRequest) -> PrefixMatch:
        """`resolved.resolve` in a thread, outside the event loop. Raises `NotRenderable`."""
        # `_writing`: the thread reads the tree, and nothing may be added to it. Taken first: while an episode waits for
        # itself, it must not hold what all episodes share.
        async with self._writing, self._context.tokenizing:
            return await asyncio.to_thread(resolved.resolve, self.history)

    async def refresh(self) -> None:
        """Reads what other servers recorded under this lease. Raises `QueueError`, `TokenMismatch`."""
        async with self._writing:
            self._absorb(await self._context.queue.adopt(self.lease.episode_id, self.lease.fence))
            self.unsure = False

    def _absorb(self, lease: Lease) -> None:
        for entry in since_last_restart(lease.journal):
            if NOTED in entry.data:
                self.facts.update(entry.data[NOTED])
            elif ANSWER in entry.data and (turn := restore_turn(self.history, entry, self._bodies, self.detokenizer)):
                self._remember(turn, from_entry(entry))

    def _remember(self, turn: Turn, generation: Generation) -> None:
        self.llm.remember(turn.match.context_key, (turn.end, hash_of(turn.ids())), generation)
