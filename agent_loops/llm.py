"""The `llm` of a loop: token in, token out, journaled before the loop sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from penstock.agent_loops.client import GenerateClient
from penstock.agent_loops.errors import AgentError, EpisodeRestart, InfraFailure
from penstock.agent_loops.generations import check_generation, first_tokens, from_entry, to_entry
from penstock.agent_loops.journal import EpisodeJournal
from penstock.agent_loops.segment import SegmentBuilder
from penstock.agent_loops.trace import span
from penstock.rollout_server import (
    AnswerBuilder,
    Chunk,
    GenerateRequest,
    Generation,
    ImageRef,
    OpenSpan,
    Sampling,
    versions_of,
)
from penstock.transfer_queue import JournalKind, Lease

Watch = Callable[[Chunk], int | None]
"""Sees an answer's chunks as they arrive. A number ends the answer behind so many tokens of this chunk, as ``stop``."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model, already appended to its segment. N = sampled tokens."""

    ids: list[int]
    """[N]"""
    text: str
    """Decoded from `ids`, special tokens kept."""
    logprobs: list[float]
    """[N]"""
    finish_reason: str
    """``stop`` or ``length``"""


@dataclass(slots=True)
class CallCounts:
    """Numbers of one episode's model calls."""

    calls: int = 0
    continued_over_update: int = 0
    resumed: int = 0
    latency_s: float = 0.0
    """Time spent waiting for the model, all calls together."""


@dataclass(slots=True)
class Seen:
    """What the engine was fed and gave, to hold a loop's outputs against (invariant 1)."""

    before: set[tuple[int, int]] = field(default_factory=set)
    """(length, xxh3-64) of each context that was fed."""
    after: set[tuple[int, int]] = field(default_factory=set)
    """The same with the answer appended."""


class EpisodeLLM:
    """Made for one lease of an episode. `segments` are those it appended to, in order of their first call."""

    def __init__(
        self,
        client: GenerateClient,
        lease: Lease,
        journal: EpisodeJournal,
        sampling: Sampling,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.counts = CallCounts()
        self.segments: list[SegmentBuilder] = []
        self.seen = Seen()
        self.failure: AgentError | None = None
        """The failure that ends the episode, also where the loop swallowed it."""
        self._client = client
        self._lease = lease
        self._journal = journal
        self.sampling = sampling
        self._decode = decode

    async def generate(self, segment: SegmentBuilder, **overrides: Any) -> Reply:
        """Sample on the segment's exact context and append the answer to it.

        `overrides` are fields of `Sampling`. Raises `InfraFailure` where no server answered, `TokenMismatch` where ids,
        logprobs and versions of the answer do not fit together; the episode then ends without a reward.
        """
        if segment.done:
            raise AgentError("generate() on a segment that is done; ask `segment.done` before each call")
        asked = (segment.context_len, segment.context_hash)
        try:
            entry = self._journal.take(JournalKind.SAMPLED, segment.fed_hash)
            generation = from_entry(entry) if entry else await self._sample(segment, asked, overrides)
        except (InfraFailure, EpisodeRestart) as error:
            self.failure = error
            raise
        self._append(segment, asked, generation)
        text = self._decode(generation.token_ids)
        return Reply(generation.token_ids, text, generation.logprobs, generation.finish_reason)

    async def _sample(
        self, segment: SegmentBuilder, asked: tuple[int, int], overrides: Mapping[str, Any]
    ) -> Generation:
        context, room = segment.context(), segment.budget.tokens_left
        generation = await self.draw(context, room, overrides, images=segment.images)
        await self._journal.append_naming(to_entry(generation, (asked[0], segment.fed_hash), {}))
        return generation

    async def draw(
        self,
        context: list[int],
        tokens_left: int,
        overrides: Mapping[str, Any],
        watch: Watch | None = None,
        *,
        images: Sequence[ImageRef] = (),
    ) -> Generation:
        """Sample on exactly these ids, `tokens_left` tokens at most: checked, but neither journaled nor appended yet.

        Raises as `generate` does. Cancelling it gives the answer up in the engine.
        """
        request = self._request(context, tokens_left, overrides, images)
        started = time.monotonic()
        try:
            with span("model") as told:
                generation = await (self._watched(request, watch) if watch else self._client.generate(request))
                if isinstance(told, OpenSpan):
                    self._tell(told, context, generation)
        except InfraFailure:
            raise
        except Exception as error:
            raise InfraFailure("rollout", f"{type(error).__name__}: {error}") from error
        self.counts.latency_s += time.monotonic() - started
        check_generation(generation, self._lease.min_version)
        return generation

    def _tell(self, told: OpenSpan, context: Sequence[int], generation: Generation) -> None:
        versions = versions_of({version for version, _, _ in generation.version_spans})
        facts = {"finish_reason": generation.finish_reason, "resumed": generation.resumed, **versions}
        told.note(input_tokens=len(context), output_tokens=len(generation.token_ids), **facts)
        if told.with_text:
            told.text(prompt=self._decode(context), answer=self._decode(generation.token_ids))

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
        """Not validated: checking, and copying, a context of our own ids is what most of a request would cost."""
        sampling = self.sampling
        if overrides or tokens_left < sampling.max_new_tokens:
            wanted = {**sampling.model_dump(), **overrides}
            sampling = Sampling(**{**wanted, "max_new_tokens": min(wanted["max_new_tokens"], tokens_left)})
        return GenerateRequest.model_construct(
            token_ids=context,
            images=tuple(images),
            sampling=sampling,
            request_id=f"{self._lease.episode_id}:{self._lease.fence}:{self.counts.calls}",
            episode_id=self._lease.episode_id,
            min_version=self._lease.min_version,
            split=self._lease.task.split,
        )

    def _append(self, segment: SegmentBuilder, asked: tuple[int, int], generation: Generation) -> None:
        if not any(known is segment for known in self.segments):
            self.segments.append(segment)
        segment.append_sampled(
            generation.token_ids, generation.logprobs, generation.version_spans, generation.finish_reason
        )
        self.remember(asked, (segment.context_len, segment.context_hash), generation)

    def remember(self, asked: tuple[int, int], after: tuple[int, int], generation: Generation) -> None:
        """Count an answer, and keep (length, hash) of what the engine was fed and of that with its answer."""
        self.seen.before.add(asked)
        self.seen.after.add(after)
        self.counts.calls += 1
        self.counts.continued_over_update += generation.continued_over_update
        self.counts.resumed += generation.resumed
