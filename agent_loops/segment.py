"""One append-only token sequence of an episode, as its loop builds it.

prompt ids │ sampled │ observed │ sampled │ …        mask  1…1 │ 0…0 │ 1…1
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from penstock.agent_loops.base import AgentLoopOutput
from penstock.agent_loops.ends import Ends
from penstock.agent_loops.errors import AgentError
from penstock.agent_loops.shared_ints import SHARED
from penstock.transfer_queue.trajectory import COMPLETED, Ids, Outcome, OutcomeKind, Spans

TRUNCATED_LENGTH = Outcome(OutcomeKind.TRUNCATED, "length")
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
    ) -> None:
        """`ends`: which of the stops stand for each other; None, each for itself."""
        if not len(prompt_ids):
            raise AgentError("a segment needs at least one prompt token")
        self.budget = budget
        self.finish_reason: str | None = None
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.said: tuple[Mapping[str, Any], ...] = ()
        """The conversation in messages; `ChatTokens.start` and `go_on` keep it."""
        self.said_up_to = 0
        """Length of the context that `said` tells."""
        self._stop_ids = frozenset(stop_ids)
        self._ends = ends
        self._ids = array("i", prompt_ids)
        self._prompt_len = len(prompt_ids)
        self._mask = bytearray()
        self._logprobs = array("f")
        self._spans = array("i")
        self._turn_starts = array("i")
        self._hash = xxhash.xxh3_64(little_endian(self._ids))
        self._out_of_room = False

    # what a loop asks ----------------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        """No further model call fits: turns or tokens are used up, or the model was cut by length."""
        return self._out_of_room or self.budget.turns_left == 0 or self.budget.tokens_left == 0

    @property
    def num_turns(self) -> int:
        return len(self._turn_starts)

    @property
    def context_len(self) -> int:
        return len(self._ids)

    @property
    def context_hash(self) -> int:
        """xxh3-64 of the int32 little-endian ids of `context`; kept up to date at a cost linear in new ids."""
        return self._hash.intdigest()

    def context(self) -> list[int]:
        """Prompt and response ids so far: exactly what the next model call is fed."""
        return SHARED.of(np.frombuffer(self._ids, dtype=np.int32))

    # what happens to it --------------------------------------------------------------------------------------------
    def append_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version_spans: Sequence[Sequence[int]],
        finish_reason: str,
    ) -> None:
        """One model call's answer (N ids, N logprobs, spans over 0…N); for `EpisodeLLM`, which checked them."""
        start = len(self._mask)
        self._turn_starts.append(start)
        for version, first, end in version_spans:
            self._spans.extend((version, start + first, start + end))
        self._logprobs.extend(logprobs)
        self._extend(ids, sampled=True)
        self.budget.turns += 1
        self.finish_reason = finish_reason
        self._out_of_room = finish_reason == "length"

    def observe(self, ids: Sequence[int]) -> bool:
        """Append ids that the model reads but did not write (mask 0).

        A closing token that the model already sampled is not repeated. Where no room would be left to answer, nothing
        is appended, the segment is done and False is returned.
        """
        ids = self._without_repeated_stop(ids)
        if len(ids) >= self.budget.tokens_left:
            self._out_of_room = True
            return False
        self.append_fed(ids)
        return True

    def append_fed(self, ids: Sequence[int]) -> None:
        """Append ids with mask 0 that the model has read already, whatever room is left."""
        self._logprobs.extend([0.0] * len(ids))
        self._extend(ids, sampled=False)

    def remember(self, said: Sequence[Mapping[str, Any]]) -> None:
        """The context so far, in messages."""
        self.said, self.said_up_to = tuple(said), self.context_len

    def output(
        self,
        reward: float | None = None,
        outcome: Outcome | None = None,
        turn_rewards: Sequence[float] = (),
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AgentLoopOutput:
        """The segment as arrays. `outcome` None is read off its end: cut by length, out of turns, or completed."""
        ids: Ids = np.array(self._ids, dtype=np.int32)
        return AgentLoopOutput(
            prompt_ids=ids[: self._prompt_len],
            response_ids=ids[self._prompt_len :],
            response_mask=np.array(self._mask, dtype=np.uint8),
            response_logprobs=np.array(self._logprobs, dtype=np.float32),
            version_spans=self._span_rows(),
            turn_starts=np.array(self._turn_starts, dtype=np.int32),
            reward=reward,
            turn_rewards=tuple(turn_rewards),
            outcome=outcome or self._ending(),
            metrics=dict(metrics or {}),
            extra=dict(extra or {}),
        )

    # helpers -------------------------------------------------------------------------------------------------------
    def _extend(self, ids: Sequence[int], *, sampled: bool) -> None:
        new = array("i", ids)
        self._ids.extend(new)
        self._mask.extend((b"\x01" if sampled else b"\x00") * len(new))
        self._hash.update(little_endian(new))
        self.budget.response_tokens += len(new)

    def _without_repeated_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """Invariant 1 keeps the sampled stop token where it is; the rendered delta begins with the same one."""
        if not ids or not self._mask or self._mask[-1] == 0:
            return ids
        last, first = self._ids[-1], ids[0]
        repeats = (first == last and first in self._stop_ids) or (self._ends and self._ends.repeats(last, first))
        return ids[1:] if repeats else ids

    def _span_rows(self) -> Spans:
        return np.array(self._spans, dtype=np.int32).reshape(-1, 3)

    def _ending(self) -> Outcome:
        if self._out_of_room:
            return TRUNCATED_LENGTH
        waits_for_answer = bool(self._mask) and self._mask[-1] == 0
        if not waits_for_answer:
            return COMPLETED
        return TRUNCATED_TURNS if self.budget.turns_left == 0 else TRUNCATED_LENGTH


def little_endian(ids: array[int] | Ids) -> bytes:
    """int32 little-endian bytes of ids, on every host: what context hashes are made of."""
    if sys.byteorder == "little":
        return ids.tobytes()
    return np.asarray(ids, dtype="<i4").tobytes()
