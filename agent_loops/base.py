"""What users write against: an agent loop is one class with one method that must be written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.agent_loops.side_by_side import all_or_none
from penstock.rollout_server import ImageRef
from penstock.transfer_queue import COMPLETED, Ids, Logprobs, Mask, Outcome, Spans, Task

if TYPE_CHECKING:
    from penstock.agent_loops.chat import ChatTokens
    from penstock.agent_loops.journal import EpisodeJournal
    from penstock.agent_loops.llm import EpisodeLLM
    from penstock.agent_loops.parts import EpisodeParts
    from penstock.agent_loops.toolbox import ToolBox
    from penstock.sandbox import Sandbox
    from penstock.transfer_queue import Lease


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgentLoopOutput:
    """One segment of an episode as its loop hands it back (P prompt tokens, T response tokens).

    Made by `SegmentBuilder.output()`; the token fields are never edited by hand (invariant 1).
    """

    prompt_ids: Ids
    """[P]"""
    response_ids: Ids
    """[T]"""
    response_mask: Mask
    """[T] 1 = sampled"""
    response_logprobs: Logprobs
    """[T]"""
    version_spans: Spans
    """[S, 3] (policy version, start, end)"""
    turn_starts: Ids
    """[num_turns]"""
    reward: float | None = None
    """None: the run's reward function is asked."""
    turn_rewards: Sequence[float] = ()
    outcome: Outcome = COMPLETED
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[ImageRef] = ()
    """In the order of their places among the ids."""

    @property
    def num_turns(self) -> int:
        return len(self.turn_starts)


class AgentLoopBase(ABC):
    """Runs one episode of one task. A new object is made for every episode.

    Given to it before `setup`: `llm` (token in, token out), `chat` (messages ↔ ids), `tools`, `sandbox`, `config`.
    After the death of its worker an episode runs again from the start in another one with model calls and tools
    answered from the journal, so `run` must be deterministic given those answers: take randomness from `task`.
    """

    llm: EpisodeLLM
    chat: ChatTokens
    tools: ToolBox
    sandbox: Sandbox | None
    config: Mapping[str, Any]

    @classmethod
    def require(cls) -> None:
        """Asked once, before the first lease. Raises `LoadError` where what the loop needs is not installed."""

    def equip(self, parts: EpisodeParts, lease: Lease, journal: EpisodeJournal) -> None:
        """Before `setup`, for loops that replace what they were given (`OpenAIAgentLoop`). Raises `InfraFailure`."""
        self._journal = journal

    async def together(self, branches: Sequence[Awaitable[T]]) -> list[T]:
        """Run parts of the episode side by side (sub-agents); results in order.

        Only in here may model calls and tool turns come in another order on a resumed episode. On the first failure
        the other branches are cancelled and awaited.
        """
        with self._journal.branching():
            return await all_or_none(branches)

    async def setup(self, task: Task) -> None:
        """Before `run`; what it opens, `teardown` closes. Written without ``async`` both run in a thread."""

    @abstractmethod
    async def run(self, task: Task) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The episode. Several outputs are several segments; the reward is the last one's that is not None."""

    async def teardown(self) -> None:
        """Always awaited, also on error and cancellation."""
