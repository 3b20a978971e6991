"""The `llm` of a loop: token in, token out, journaled before the loop sees the answer.

GenerateClient   the protocol of rollout clients
EpisodeLLM       model calls of one episode
Generation       checked here (`check_generation`), cut at a stop string, and encoded for the journal
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError

from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.errors import AgentError, EpisodeRestart, InfraFailure, TokenMismatch
from penstock.agent_loops.journal import EpisodeJournal
from penstock.agent_loops.segment import SegmentBuilder
from penstock.agent_loops.tracing import span
from penstock.common import OpenSpan
from penstock.rollout_server import (
    AnswerBuilder,
    Chunk,
    FinishReason,
    GenerateRequest,
    Generation,
    ImageRef,
    Sampling,
    versions_of,
    without_last,
)
from penstock.transfer_queue import JournalEntry, JournalKind, Lease

Watch = Callable[[Chunk], int | None]
"""Called with each chunk of an answer. A returned number ends the answer after that many tokens of it, as ``stop``."""
MEMBERS_TOGETHER = 8
"""Members of a group with one prefix: a larger group fills several servers, also where each member has another client
and none knows of the others. Seven in eight then find their prompt in the server's cache."""
LOGPROB_EPSILON = 1e-4
"""A log-softmax in low precision may end this far above 0."""


class GenerateClient(Protocol):
    """An agent worker's connection to rollout servers: `EpisodeLLM` samples, the worker asks for versions."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """The answer to one context. Raises if no server answered within the client's deadline."""

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """The same answer as it grows; `version_spans` count from the start of each chunk.

        The last chunk, and no other, carries `finish_reason`, ``stop`` or ``length``. Raises as `generate` does.
        Closing the generator early aborts the request.
        """
        yield Chunk()

    async def best_version(self) -> int | None:
        """Newest policy version among accepting servers; None: there is none."""


def usual_sampling(config: AgentConfig, stop_token_ids: Sequence[int], lease: Lease) -> Sampling:
    """The recipe's sampling, overridden by the task's. Raises `InfraFailure` if the task's is invalid.

    A task's ``greedy_member`` names the one episode of its group that is sampled greedily.
    """
    try:
        names = ("temperature", "top_p", "top_k", "max_new_tokens")
        fields = {**{name: getattr(config, name) for name in names}, "stop_token_ids": tuple(stop_token_ids)}
        fields |= lease.task.sampling or {}
        if fields.pop("greedy_member", None) == lease.member:
            fields["temperature"] = 0.0
        return Sampling(**fields)
    except ValidationError as error:
        raise InfraFailure("task", f"bad sampling of {lease.task.task_id}: {error}") from error


def prefix_of(lease: Lease) -> str:
    """Names the prompt that this episode shares with `MEMBERS_TOGETHER` of its group; empty: with none.

    Not made of the prompt's text: where all tasks have the same (an environment's), all would go to one server.
    """
    task = lease.task
    return f"{task.task_id}/{lease.member // MEMBERS_TOGETHER}" if task.split == "train" else ""


@dataclass(slots=True)
class CallCounts:
    """Numbers of one episode's model calls."""

    calls: int = 0
    continued_over_update: int = 0
    resumed: int = 0
    latency_s: float = 0.0
    """Time spent waiting for the model, all calls together."""


@dataclass(slots=True)
class SeenContexts:
    """Contexts that the engine was fed and returned; a loop's outputs are checked against them (invariant 1)."""

    before: set[tuple[int, int]] = field(default_factory=set)
    """(length, xxh3-64) of each context that was fed."""
    after: set[tuple[int, int]] = field(default_factory=set)
    """The same with the answer appended."""


class EpisodeLLM:
    """Model calls of one lease. `segments` lists those it appended to, in order of their first call."""

    def __init__(
        self,
        client: GenerateClient,
        lease: Lease,
        journal: EpisodeJournal,
        sampling: Sampling,
        decode: Callable[[Sequence[int]], str],
        *,
        with_routes: bool = False,
    ) -> None:
        """`with_routes`: the engines of the run report which experts read each token."""
        self._with_routes = with_routes
        self.counts = CallCounts()
        self.segments: list[SegmentBuilder] = []
        self.seen = SeenContexts()
        self.failure: AgentError | None = None
        """The failure that ends the episode, even if the loop caught it."""
        self._client = client
        self._lease = lease
        self._journal = journal
        self.sampling = sampling
        self._usual = GenerateRequest.model_construct(
            token_ids=[],
            sampling=sampling,
            episode_id=lease.episode_id,
            min_version=lease.min_version,
            split=lease.task.split,
            prefix=prefix_of(lease),
        )
        """The fields that all requests of the episode share."""
        self._decode = decode

    async def generate(self, segment: SegmentBuilder, **overrides: Any) -> Generation:
        """Samples on the segment's exact context and appends the answer to it.

        `overrides` are fields of `Sampling`; an answer as long as their `max_new_tokens` is whole, as the caller wanted
        it. Raises `InfraFailure` if no server answered, `TokenMismatch` if ids, logprobs and versions of the answer are
        inconsistent; the episode then ends without a reward.
        """
        if segment.done:
            raise AgentError("generate() on a segment that is done; ask `segment.done` before each call")
        before = (segment.context_len, segment.context_hash)
        try:
            entry = self._journal.take(JournalKind.SAMPLED, segment.fed_hash)
            if entry is not None:
                generation = from_entry(entry)
            else:
                routed, images = segment.routed_up_to, segment.images
                context, room = segment.context(), segment.budget.tokens_left
                generation = await self.draw(context, room, overrides, images=images, routed_up_to=routed)
                await self._journal.append_naming(to_entry(generation, (before[0], segment.fed_hash), {}))
        except (InfraFailure, EpisodeRestart) as error:
            self.failure = error
            raise
        if not any(known is segment for known in self.segments):
            self.segments.append(segment)
        segment.append_sampled(generation, whole=len(generation.token_ids) == overrides.get("max_new_tokens"))
        self.remember(before, (segment.context_len, segment.context_hash), generation)
        return replace(generation, text=self._decode(generation.token_ids))

    async def draw(
        self,
        context: list[int],
        tokens_left: int,
        overrides: Mapping[str, Any],
        watch: Watch | None = None,
        *,
        images: Sequence[ImageRef] = (),
        routed_up_to: int = 0,
    ) -> Generation:
        """Samples at most `tokens_left` tokens on exactly these ids; checks, but neither journals nor appends.

        `routed_up_to`: how much of the context needs no routed experts, where the run has them.

        Raises as `generate` does. Cancelling it aborts the request in the engine.
        """
        request = self._request(context, tokens_left, overrides, images)
        if self._with_routes:
            request = request.model_copy(update={"routed_experts_from": min(routed_up_to, len(context) - 1)})
        started = time.monotonic()
        try:
            with span("model") as model_span:
                generation = await (self._watched(request, watch) if watch else self._client.generate(request))
                if isinstance(model_span, OpenSpan):
                    versions = versions_of({version for version, _, _ in generation.version_spans})
                    facts = {"finish_reason": generation.finish_reason, "resumed": generation.resumed, **versions}
                    model_span.note(input_tokens=len(context), output_tokens=len(generation.token_ids), **facts)
                    if model_span.with_text:
                        model_span.text(prompt=self._decode(context), answer=self._decode(generation.token_ids))
        except InfraFailure:
            raise
        except Exception as error:
            raise InfraFailure("rollout", f"{type(error).__name__}: {error}") from error
        self.counts.latency_s += time.monotonic() - started
        check_generation(generation, self._lease.min_version)
        return generation

    async def _watched(self, request: GenerateRequest, watch: Watch) -> Generation:
        answer = AnswerBuilder(request)
        async with aclosing(self._client.stream(request)) as chunks:
            async for chunk in chunks:
                keep = watch(chunk)
                answer.add(chunk if keep is None else first_tokens(chunk, keep))
                if keep is not None:
                    break
        return answer.build()

    def _request(
        self, context: list[int], tokens_left: int, overrides: Mapping[str, Any], images: Sequence[ImageRef]
    ) -> GenerateRequest:
        """Not validated: checking and copying the context would be most of a request's cost."""
        name = f"{self._lease.episode_id}:{self._lease.fence}:{self.counts.calls}"
        changed: dict[str, Any] = {"token_ids": context, "images": tuple(images), "request_id": name}
        sampling = self.sampling
        if overrides or tokens_left < sampling.max_new_tokens:
            fields = {**sampling.model_dump(), **overrides}
            changed["sampling"] = Sampling(**{**fields, "max_new_tokens": min(fields["max_new_tokens"], tokens_left)})
        return self._usual.model_copy(update=changed)

    def remember(self, before: tuple[int, int], after: tuple[int, int], generation: Generation) -> None:
        """Counts an answer and records (length, hash) of its context, before and after the answer."""
        self.seen.before.add(before)
        self.seen.after.add(after)
        self.counts.calls += 1
        self.counts.continued_over_update += generation.continued_over_update
        self.counts.resumed += generation.resumed


def check_generation(generation: Generation, min_version: int) -> None:
    """Invariant 1 at the edge. Raises `TokenMismatch` naming what does not fit, `InfraFailure` for an aborted call."""
    ids, logprobs = generation.token_ids, generation.logprobs
    if generation.finish_reason == "abort":
        raise InfraFailure("rollout", "the engine aborted the call")
    if not ids:
        raise TokenMismatch("rollout", "the engine returned no tokens")
    if len(ids) != len(logprobs):
        raise TokenMismatch("rollout", f"{len(ids)} token ids but {len(logprobs)} logprobs")
    # One infinite or undefined number makes the sum so; the values are looked at one by one only to name it.
    if not math.isfinite(sum(logprobs)) or max(logprobs) > LOGPROB_EPSILON:
        bad = [value for value in logprobs if not math.isfinite(value) or value > LOGPROB_EPSILON]
        if bad:
            raise TokenMismatch("rollout", f"logprob {bad[0]} is not a finite number below 0")
    _check_spans(generation.version_spans, len(ids), min_version)
    experts = generation.routed_experts
    if experts is not None and (experts.ndim != 3 or len(experts) < len(ids)):
        raise TokenMismatch("rollout", f"{len(ids)} token ids but routed experts of shape {experts.shape}")


def _check_spans(spans: Sequence[tuple[int, int, int]], length: int, min_version: int) -> None:
    position = 0
    for version, start, end in spans:
        if start != position or end <= start:
            raise TokenMismatch("rollout", f"version spans {list(spans)} do not cover {length} tokens once")
        if version < min_version:
            raise TokenMismatch("rollout", f"tokens of version {version}, below the episode's floor {min_version}")
        position = end
    if position != length:
        raise TokenMismatch("rollout", f"version spans {list(spans)} do not cover {length} tokens once")


def first_tokens(chunk: Chunk, count: int) -> Chunk:
    """`chunk` cut behind its first `count` tokens, as the last one of an answer that a stop string ended."""
    spans = [(version, start, min(end, count)) for version, start, end in chunk.version_spans if start < count]
    return Chunk(
        token_ids=chunk.token_ids[:count],
        logprobs=chunk.logprobs[:count],
        version_spans=spans,
        finish_reason="stop",
        routed_experts=without_last(chunk.routed_experts, len(chunk.token_ids) - count),
    )


def to_entry(generation: Generation, context: tuple[int, int], note: Mapping[str, Any]) -> JournalEntry:
    """The journal entry of an answer; `note` is added to its data."""
    return JournalEntry(
        kind=JournalKind.SAMPLED,
        context_len=context[0],
        context_hash=context[1],
        ids=np.array(generation.token_ids, dtype=np.int32),
        logprobs=np.array(generation.logprobs, dtype=np.float32),
        version_spans=np.array(generation.version_spans, dtype=np.int32).reshape(-1, 3),
        routed_experts=generation.routed_experts,
        data={
            "finish_reason": generation.finish_reason,
            "continued_over_update": generation.continued_over_update,
            "resumed": generation.resumed,
            **note,
        },
    )


def from_entry(entry: JournalEntry) -> Generation:
    """The inverse of `to_entry`."""
    assert entry.ids is not None
    assert entry.logprobs is not None
    assert entry.version_spans is not None
    reason: FinishReason = entry.data["finish_reason"]
    spans = [(int(version), int(start), int(end)) for version, start, end in entry.version_spans]
    return Generation(
        token_ids=entry.ids.tolist(),
        logprobs=entry.logprobs.tolist(),
        version_spans=spans,
        finish_reason=reason,
        continued_over_update=bool(entry.data.get("continued_over_update")),
        resumed=int(entry.data.get("resumed", 0)),
        routed_experts=entry.routed_experts,
    )
