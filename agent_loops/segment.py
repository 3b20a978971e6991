"""A segment: one append-only token sequence of an episode.

SegmentBuilder   what a loop builds, under the episode's `Budget`
                 (its arrays are a `TokenRow`)
AgentLoopOutput  the finished segment, as the loop returns it

prompt ids │ sampled │ observed │ sampled │ …        mask  1…1 │ 0…0 │ 1…1
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import xxhash

from penstock.agent_loops.errors import AgentError
from penstock.agent_loops.token_row import SHARED, TokenRow
from penstock.rollout_server import Generation, ImageRef
from penstock.transfer_queue import COMPLETED, Outcome, OutcomeKind, Segment

TRUNCATED_LENGTH = Outcome(OutcomeKind.TRUNCATED, "length")
SPOILED = Outcome(OutcomeKind.POLICY_ERROR, "the model sampled the place of an image that is not there")
TRUNCATED_TURNS = Outcome(OutcomeKind.TRUNCATED, "turns")
TRUNCATED_DEADLINE = Outcome(OutcomeKind.TRUNCATED, "deadline")


@dataclass(frozen=True, slots=True)
class AgentLoopOutput(Segment):
    """A finished segment as its loop returns it: the arrays, and what the loop says of them.

    Made by `SegmentBuilder.output()`. The arrays are never edited by hand (invariant 1).
    """

    reward: float | None = None
    """None: the run's reward function is asked."""
    turn_rewards: Sequence[float] = ()
    outcome: Outcome = COMPLETED
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[ImageRef] = ()
    """Images in the order of their placeholders among the ids."""


@dataclass(frozen=True, slots=True)
class MessageDelta(Sequence[int]):
    """Ids of rendered messages and the images in them, for `SegmentBuilder.observe`."""

    ids: Sequence[int]
    images: Sequence[ImageRef] = ()
    """Images whose placeholders are among `ids`, in order."""

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.ids[index]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Budget:
    """The limits of one episode, shared by all its segments."""

    max_turns: int
    """Model calls."""
    max_response_tokens: int
    """Sampled and observed tokens together."""
    window: int = 0
    """Tokens of one segment, prompt included: what the engine's context holds. 0: not known."""
    turns: int = 0
    response_tokens: int = 0

    @property
    def tokens_left(self) -> int:
        return max(0, self.max_response_tokens - self.response_tokens)

    @property
    def turns_left(self) -> int:
        return max(0, self.max_turns - self.turns)

    @property
    def truncation(self) -> Outcome:
        """The outcome of what ends for want of turns or of room."""
        return TRUNCATED_TURNS if self.turns_left == 0 else TRUNCATED_LENGTH


@dataclass(frozen=True, slots=True)
class ReplyEnds:
    """Qwen: all are ``<|im_end|>``. GLM closes nothing: what comes next, ``<|user|>`` or ``<|observation|>``, ends it.

    gpt-oss: the model samples ``<|return|>`` or ``<|call|>``, the template writes ``<|end|>`` or ``<|call|>``.
    Llama 3.1: ``<|eot_id|>``; its generation config has ``<|eom_id|>`` too, which the template names and opens nothing
    with: it only closes. ``<|end_of_text|>``, which the template never names, is a stop and closes no turn. Command A:
    ``<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`` close an answer together, and the second one ends it.
    """

    stops: tuple[int, ...]
    """A sampled one ends the reply."""
    closers: frozenset[int]
    """Ids that only close a turn are interchangeable; a stop that is not among them opens the next turn."""
    leads: tuple[tuple[int, ...], ...]
    """Beginnings of a delta, longest first: the template's text between a reply and its end, then the end alone."""

    def lead_of(self, delta: Sequence[int]) -> tuple[int, ...]:
        """The one that `delta` begins with; empty if it begins with none."""
        return next((lead for lead in self.leads if tuple(delta[: len(lead)]) == lead), ())

    def repeated(self, last: int, delta: Sequence[int]) -> int:
        """Return how many of the delta's first ids the model has written already, given `last` as its last sampled
        id.
        """
        lead = self.lead_of(delta) or tuple(delta[:1])
        if not lead:
            return 0
        ended = (lead[-1] == last and last in self.stops) or {lead[-1], last} <= self.closers
        return len(lead) if ended else 0


class SegmentBuilder:
    """The `segment` of a loop. Ids are only appended, so each context starts with the one before it."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        budget: Budget,
        stop_ids: Collection[int] = (),
        ends: ReplyEnds | None = None,
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
        self.messages: list[Mapping[str, Any]] = []
        """The conversation in messages; `ChatTokens` keeps it where histories are written again."""
        self.messages_up_to = 0
        """Length of the context that `said` describes."""
        self.images = list(images)
        """Images in the order of their places in the context."""
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
        """No further model call fits: turns or tokens are used up, or the last answer was cut by length."""
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

    @property
    def routed_up_to(self) -> int:
        """Positions of the context before this one need no routed experts: they are known, or never will be."""
        return self._row.routed_up_to

    def context(self) -> list[int]:
        """Prompt and response ids so far: exactly what the next model call is fed."""
        # A copy: an array whose buffer is exported, as by a profiler that holds a frame, refuses to grow.
        return SHARED.of(np.array(self._row.ids, dtype=np.int32))

    # what happens to it --------------------------------------------------------------------------------------------
    def append_sampled(self, answer: Generation, *, whole: bool = False) -> None:
        """Appends one model call's answer; for `EpisodeLLM`, which checked it.

        `whole`: the answer is complete although it was cut by length, as its caller wanted it.
        """
        self._row.append_sampled(answer)
        self.budget.response_tokens += len(answer.token_ids)
        self.budget.turns += 1
        self.finish_reason = "stop" if whole else answer.finish_reason
        self._spoiled = not self._placeholders.isdisjoint(answer.token_ids)
        self._out_of_room = self.finish_reason == "length" or self._spoiled

    def observe(self, delta: MessageDelta | Sequence[int]) -> bool:
        """Appends ids that the model reads but did not write (mask 0).

        A closing token that the model already sampled is not repeated. If no room would be left for an answer, in the
        budget or in the window, nothing is appended, the segment is done and False is returned.
        """
        if not isinstance(delta, MessageDelta):
            delta = MessageDelta(delta)
        ids = self._without_repeated_stop(delta.ids)
        if not self._has_room(len(ids), self.context_len):
            return False
        self.append_fed(ids)
        self.images.extend(delta.images)
        return True

    def make_room(self, count: int, prompt_len: int) -> bool:
        """Draws on the budget for `count` new ids in the prompt of the segment that replaces this one. False: as
        `observe`."""
        if self.done or not self._has_room(count, prompt_len - count):
            return False
        self.budget.response_tokens += count
        return True

    def append_fed(self, ids: Sequence[int]) -> None:
        """Appends ids with mask 0 that the model has read already, regardless of the budget."""
        self._row.append_fed(ids)
        self.budget.response_tokens += len(ids)

    def remember(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Records the messages that the context gained since the last call."""
        self.messages.extend(new)
        self.messages_up_to = self.context_len

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
        """The segment as arrays. `outcome` None is derived from its end: cut by length, out of turns, or completed."""
        return AgentLoopOutput(
            **self._row.arrays(),
            reward=reward,
            turn_rewards=tuple(turn_rewards),
            outcome=SPOILED if self._spoiled else outcome or self._ending(),
            metrics=dict(metrics or {}),
            extra=dict(extra or {}),
            images=tuple(self.images),
        )

    # helpers -------------------------------------------------------------------------------------------------------
    def _has_room(self, count: int, before: int) -> bool:
        """Return True if `count` ids behind `before` and an answer fit; otherwise the segment is done.

        A context that outgrows the window is the policy's doing: refused by the engine, it would be a failure of the
        infrastructure, and the episode a dead letter.
        """
        window = self.budget.window
        if count < self.budget.tokens_left and (not window or before + count < window):
            return True
        self._out_of_room = True
        return False

    def _without_repeated_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """Invariant 1 keeps the sampled stop token in place; the rendered delta begins with the same one."""
        if not ids or not self._row.ends_sampled:
            return ids
        last = self._row.ids[-1]
        repeated = self._ends.repeated(last, ids) if self._ends else 0
        return ids[repeated or int(ids[0] == last and last in self._stop_ids) :]

    def _ending(self) -> Outcome:
        if self._out_of_room:
            return TRUNCATED_LENGTH
        if self._row.ends_sampled or not self._row.mask:
            return COMPLETED
        return self.budget.truncation


def last_answer(output: Segment) -> list[int]:
    """Ids of the last model call's answer; none where the model was not called."""
    if output.num_turns == 0:
        return []
    start = int(output.turn_starts[-1])
    ids: list[int] = output.response_ids[start:][output.response_mask[start:] == 1].tolist()
    return ids
