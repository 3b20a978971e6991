"""A conversation with the model: one segment, or several where its history is written again.

keep       start ─► reply ─► go_on ─► reply ─► …                                  one segment
strip      start ─► reply ─► go_on (thinking in it is dropped) ┄► new segment ─► reply ─► …
any        start ─► reply ─► go_on (the template moves what stood before) ┄► new segment ─► reply ─► …
restart    start ─► reply ─► restart ┄► new segment ─► reply ─► …
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.chat.template import Message, Tools
from penstock.agent_loops.segment import AgentLoopOutput, SegmentBuilder
from penstock.rollout_server import Generation
from penstock.transfer_queue import Outcome


class Conversation:
    """A conversation of several turns. The next reply goes to `segment`; `outputs` are the loop's result."""

    def __init__(self, chat: ChatTokens, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Raises `TemplateError`."""
        self._chat = chat
        self._tools = tools
        self._segments = [chat.start(messages, tools)]

    @property
    def segment(self) -> SegmentBuilder:
        """The newest one."""
        return self._segments[-1]

    @property
    def done(self) -> bool:
        """No further reply fits."""
        return self.segment.done

    @property
    def num_turns(self) -> int:
        return sum(segment.num_turns for segment in self._segments)

    def go_on(self, reply: Generation, messages: Sequence[Message]) -> None:
        """Appends `messages` after the model's `reply`. Raises `TemplateError`."""
        after = self._chat.go_on(self.segment, reply, messages)
        if after is not self.segment:
            self._segments.append(after)

    def restart(self, messages: Sequence[Message]) -> None:
        """Begins a new segment with `messages` in place of the history. Raises `TemplateError`."""
        self._segments.append(self._chat.start(messages, self._tools))

    def outputs(self, outcome: Outcome | None = None, turn_rewards: Sequence[float] = ()) -> list[AgentLoopOutput]:
        """Segments in which something was sampled, in order; `turn_rewards` by turn of the whole conversation.

        `outcome` is the last one's; None is read off its end, or says that no reply to a restart was left.
        """
        spoken = [segment for segment in self._segments if segment.num_turns] or self._segments[:1]
        if outcome is None and spoken[-1] is not self.segment:
            outcome = self._chat.budget.truncation
        outcomes = [*([None] * (len(spoken) - 1)), outcome]
        rewards = iter(turn_rewards)
        return [
            one.output(outcome=end, turn_rewards=tuple(islice(rewards, one.num_turns)))
            for one, end in zip(spoken, outcomes, strict=True)
        ]
