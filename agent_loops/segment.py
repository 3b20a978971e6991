"""One append-only token sequence of an episode, as its loop builds it: a `TokenRow` under the episode's budget."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from penstock.agent_loops.base import AgentLoopOutput
from penstock.agent_loops.ends import Ends
from penstock.agent_loops.errors import AgentError
from penstock.agent_loops.shared_ints import SHARED
from penstock.agent_loops.token_row import TokenRow
from penstock.rollout_server import ImageRef
from penstock.transfer_queue import COMPLETED, Outcome, OutcomeKind

TRUNCATED_LENGTH = Outcome(OutcomeKind.TRUNCATED, "length")
SPOILED = Outcome(OutcomeKind.POLICY_ERROR, "the model sampled the place of an image that is not there")
TRUNCATED_TURNS = Outcome(OutcomeKind.TRUNCATED, "turns")
TRUNCATED_DEADLINE = Outcome(OutcomeKind.TRUNCATED, "deadline")


@dataclass(slots=True)
class Budget:
    """What one episode may use; all its segments draw on the same one."""

    max_turns: int
    """Model calls."""
    max_response_tokens: int
    """Sampled and observed tokens together."""
    turns: int = 0
    response_tokens: int = 0

    @property
    def tokens_left(self) -> int:
        return max(0, self.max_response_tokens - self.response_tokens)

    @property
    def turns_left(self) -> int:
        return max(0, self.max_turns - self.turns)


class SegmentBuilder:
    """The `segment` of a loop. Ids only ever go on at its end, so each context starts with the one before it."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        budget: Budget,
        stop_ids: Collection[int] = (),
        ends: Ends | None = None,
        *,
        images: Sequence[ImageRef] = (),
        placeholders: Collection[int] = (),
    ) -> None:
        """`ends`: which of the stops stand for each other; None, each for itself.

        `images` whose places the prompt has; `placeholders` are the ids of such places, which a model may not sample.
        """
        if not len(prompt_ids):
            raise AgentError("a segment needs at least one prompt token")
        self.budget = budget
        self.finish_reason: str | None = None
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.said: list[Mapping[str, Any]] = []
        """The conversation in messages; `ChatTokens` keeps it where histories are written again."""
        self.said_up_to = 0
        """Length of the context that `said` tells."""
        self.images = list(images)
        """In the order of their places in the context."""
        self._placeholders = frozenset(placeholders)
        self._spoiled = False
        self._searched_up_to = 0
        self._stop_ids = frozenset(stop_ids)
        self._ends = ends
        self._row = TokenRow(prompt_ids)
        self._out_of_room = False

    # what a loop asks ----------------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        """No further model call fits: turns or tokens are used up, or the model was cut by length."""
        return self._out_of_room or self.budget.turns_left == 0 or self.budget.tokens_left == 0

    @property
    def num_turns(self) -> int:
        return len(self._row.turn_starts)

    @property
    def context_len(self) -> int:
        return len(self._row.ids)

    @property
    def context_hash(self) -> int:
        """xxh3-64 of the int32 little-endian ids of `context`; kept up to date at a cost linear in new ids."""
        return self._row.hash

    @property
    def fed_hash(self) -> int:
        """`context_hash` and the images: two images of one size have the same ids."""
        if not self.images:
            return self.context_hash
        names = [image.sha256 for image in self.images]
        return xxhash.xxh3_64_intdigest(":".join([str(self.context_hash), *names]).encode())

    def context(self) -> list[int]:
        """Prompt and response ids so far: exactly what the next model call is fed."""
        return SHARED.of(np.frombuffer(self._row.ids, dtype=np.int32))

    # what happens to it --------------------------------------------------------------------------------------------
    def append_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version_spans: Sequence[Sequence[int]],
        finish_reason: str,
    ) -> None:
        """One model call's answer (N ids, N logprobs, spans over 0…N); for `EpisodeLLM`, which checked them."""
        self._row.append_sampled(ids, logprobs, version_spans)
        self.budget.response_tokens += len(ids)
        self.budget.turns += 1
        self.finish_reason = finish_reason
        self._spoiled = not self._placeholders.isdisjoint(ids)
        self._out_of_room = finish_reason == "length" or self._spoiled

    def observe(self, ids: Sequence[int]) -> bool:
        """Append ids that the model reads but did not write (mask 0).

        A closing token that the model already sampled is not repeated. Where no room would be left to answer, nothing
        is appended, the segment is done and False is returned.
        """
        images = getattr(ids, "images", ())
        ids = self._without_repeated_stop(ids)
        if not self._has_room(len(ids)):
            return False
        self.append_fed(ids)
        self.images.extend(images)
        return True

    def make_room(self, count: int) -> bool:
        """Draw on the budget for what a segment that takes this one's place begins with. False: as `observe`."""
        if self.done or not self._has_room(count):
            return False
        self.budget.response_tokens += count
        return True

    def append_fed(self, ids: Sequence[int]) -> None:
        """Append ids with mask 0 that the model has read already, whatever room is left."""
        self._row.append_fed(ids)
        self.budget.response_tokens += len(ids)

    def remember(self, new: Sequence[Mapping[str, Any]]) -> None:
        """What the context holds since the last time, in messages."""
        self.said.extend(new)
        self.said_up_to = self.context_len

    def take_unsearched(self) -> list[int]:
        """The context since the last time."""
        start, self._searched_up_to = self._searched_up_to, self.context_len
        return self._row.ids[start:].tolist()

    def output(
        self,
        reward: float | None = None,
        outcome: Outcome | None = None,
        turn_rewards: Sequence[float] = (),
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AgentLoopOutput:
        """The segment as arrays. `outcome` None is read off its end: cut by length, out of turns, or completed."""
        return AgentLoopOutput(
            **self._row.columns(),
            reward=reward,
            turn_rewards=tuple(turn_rewards),
            outcome=SPOILED if self._spoiled else outcome or self._ending(),
            metrics=dict(metrics or {}),
            extra=dict(extra or {}),
            images=tuple(self.images),
        )

    # helpers -------------------------------------------------------------------------------------------------------
    def _has_room(self, count: int) -> bool:
        """For `count` ids and an answer to them; else the segment is done."""
        if count < self.budget.tokens_left:
            return True
        self._out_of_room = True
        return False

    def _without_repeated_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """Invariant 1 keeps the sampled stop token where it is; the rendered delta begins with the same one."""
        if not ids or not self._row.ends_sampled:
            return ids
        last, first = self._row.ids[-1], ids[0]
        repeats = (first == last and first in self._stop_ids) or (self._ends and self._ends.repeats(last, first))
        return ids[1:] if repeats else ids

    def _ending(self) -> Outcome:
        if self._out_of_room:
            return TRUNCATED_LENGTH
        if self._row.ends_sampled or not self._row.mask:
            return COMPLETED
        return TRUNCATED_TURNS if self.budget.turns_left == 0 else TRUNCATED_LENGTH
