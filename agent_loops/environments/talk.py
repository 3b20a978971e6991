"""The form in which the model reads an episode: one conversation, or each turn by itself with a memory of the last
ones.

conversation    task, observation ─► action ─► observation ─► action …            one segment, ids appended
windowed        task, memory(last n turns), observation ─► action                 a segment per turn
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.agent_loops.base import AgentLoopBase
from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.conversation import Conversation
from penstock.agent_loops.segment import AgentLoopOutput, SegmentBuilder
from penstock.rollout_server import Generation
from penstock.transfer_queue import Outcome

Messages = Sequence[Mapping[str, Any]]


class WholeTalk(Conversation):
    """One conversation: each observation is a user's message."""

    def __init__(self, loop: AgentLoopBase, messages: Messages, first: str) -> None:
        super().__init__(loop.chat, with_observation(loop.chat, messages, first))

    def observe(self, reply: Generation, action: str, text: str) -> None:
        """Appends the observation that follows the last answer. Raises `TemplateError`."""
        self.go_on(reply, [{"role": "user", "content": text}])


class WindowedTalk:
    """Each turn is a separate prompt: prompts stay short, however long the episode. Used as `WholeTalk`."""

    def __init__(self, loop: AgentLoopBase, messages: Messages, first: str, remembered_turns: int) -> None:
        self._chat = loop.chat
        self._messages = messages
        self._remembered_turns = remembered_turns
        self._observed = [first]
        self._actions: list[str] = []
        self._segments = [self._next()]

    @property
    def segment(self) -> SegmentBuilder:
        return self._segments[-1]

    @property
    def done(self) -> bool:
        return self.segment.done

    def observe(self, reply: Generation, action: str, text: str) -> None:
        self._actions.append(action)
        self._observed.append(text)
        if not self.done:
            self._segments.append(self._next())

    def outputs(self, outcome: Outcome | None, turn_rewards: Sequence[float]) -> list[AgentLoopOutput]:
        spoken = [segment for segment in self._segments if segment.num_turns]
        outputs = [one.output(turn_rewards=[reward]) for one, reward in zip(spoken, turn_rewards, strict=True)]
        ending = self._chat.budget.truncation if self.done else outputs[-1].outcome
        return [*outputs[:-1], replace(outputs[-1], outcome=outcome or ending)]

    def _next(self) -> SegmentBuilder:
        memory = self._memory()
        text = f"{memory}\n\nNow:\n{self._observed[-1]}" if memory else self._observed[-1]
        return self._chat.start(with_observation(self._chat, self._messages, text))

    def _memory(self) -> str:
        first = max(0, len(self._actions) - self._remembered_turns)
        turns = zip(self._observed[first:], self._actions[first:], strict=False)
        # A memory keeps 2,000 characters of an observation.
        lines = [
            f"{number}. {observed[:2000]}\n   > {action}"
            for number, (observed, action) in enumerate(turns, start=first + 1)
        ]
        return "\n".join(["Before:", *lines]) if lines else ""


Talk = WholeTalk | WindowedTalk


def with_observation(chat: ChatTokens, messages: Messages, text: str) -> list[Mapping[str, Any]]:
    """The task's messages and the observation: added to the last message if that is the user's, else a new message.

    Special tokens that it spells out are defused: neither an environment nor what a model said can open a turn.
    """
    text = str(chat.defused({"role": "user", "content": text})["content"])
    last = messages[-1]
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
