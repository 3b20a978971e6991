"""Any async function that takes an `AsyncOpenAI` client is an agent: its samples are trained on, token for token.

    agent(client, task) ──► openai_client ──► session (parent turn? splice : new segment) ──► journal ──► segments

The rules are those of recorded episodes (docs/recorded_episodes.md): the same prefix tree and journal, no server.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock.agent_loops import (
    AgentLoopBase,
    AgentLoopOutput,
    ChatTokens,
    EpisodeJournal,
    EpisodeRestart,
    InfraFailure,
    LoadError,
    WorkerServices,
)
from penstock.gateway.context import GatewayContext, detokenizer
from penstock.gateway.finish import last_turn, outcome_of, tool_calls_of
from penstock.gateway.journal import ANSWER, NOTED
from penstock.gateway.session import GatewaySession
from penstock.gateway.wire import Detokenizer
from penstock.transfer_queue import Lease, Task

if TYPE_CHECKING:
    import openai

    from penstock.gateway.openai_client import RecordingTransport

Agent = Callable[["openai.AsyncOpenAI", Task], Awaitable[float | None]]
MODEL = "policy"
"""Name of the model for agents inside a worker, besides `agent.capture.model_aliases`."""


class OpenAIAgentLoop(AgentLoopBase):
    """Runs `agent` inside the worker. A function by its path does the same: ``agent.loop=my_agent.py:solve``.

    On a resumed episode the agent runs from its start, and its requests are answered from the journal; its own tools
    run again.
    """

    recorded: GatewaySession
    _transport: RecordingTransport

    @abstractmethod
    async def agent(self, client: openai.AsyncOpenAI, task: Task) -> float | None:
        """Runs one episode. Returns its reward; None: ``agent.reward`` computes it."""

    @classmethod
    def require(cls) -> None:
        missing = [name for name in ("openai", "httpx2") if importlib.util.find_spec(name) is None]
        if missing:
            raise LoadError(
                f"{cls.__name__} runs an agent that takes an OpenAI client, and {' and '.join(missing)} is not "
                "installed: pip install 'penstock[openai]'"
            )

    def equip(self, services: WorkerServices, lease: Lease, journal: EpisodeJournal) -> None:
        """The session counts calls, ids and budget; the rest of the episode reads them there."""
        super().equip(services, lease, journal)
        entries = journal.hand_over((ANSWER, NOTED))
        lease = replace(lease, journal=entries)
        self.recorded = GatewaySession(_context_of(services), lease, "", own_journal=journal)
        self.llm, self.chat = self.recorded.llm, self.recorded.history.chat
        self.llm.segments = self.recorded.history.segments

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        from penstock.gateway.openai_client import RecordingTransport, make_client

        self._transport = RecordingTransport(self.recorded)
        try:
            async with make_client(self._transport) as client:
                reward = await self.agent(client, task)
        except Exception as error:
            self._raise_ours(error)
            raise
        finally:
            await self._close()
        self._raise_ours(None)
        self._check_replayed()
        return self._outputs(_number(reward))

    async def _close(self) -> None:
        """Cancels answers that the agent left in progress, before segments are read."""
        self.recorded.end("the agent has returned")
        await self.recorded.in_flight.ended()

    def _raise_ours(self, error: Exception | None) -> None:
        """An agent sees infrastructure failures as `openai` errors; they end the episode even if it handles them."""
        if self._transport.failure is not None:
            raise self._transport.failure from error

    def _check_replayed(self) -> None:
        if self.recorded.replay.left:
            raise EpisodeRestart(f"the agent did not ask again for {self.recorded.replay.left} recorded answers")

    def _outputs(self, reward: float | None) -> list[AgentLoopOutput]:
        """The segment of the last answer comes last: its end is the episode's."""
        last = last_turn(self.recorded)
        if last is None:
            raise InfraFailure("loop", "the agent returned without asking the model anything")
        self.tools.counts.calls += tool_calls_of(self.recorded)
        outcome = outcome_of(self.recorded, None)
        others = [segment for segment in self.recorded.history.segments if segment is not last.segment]
        outputs = [segment.output(outcome=outcome) for segment in others]
        return [*outputs, last.segment.output(outcome=outcome, reward=reward)]


def loop_of(function: Agent, name: str) -> type[OpenAIAgentLoop]:
    """The loop that runs ``async def function(client, task)``. Raises `LoadError` where it takes something else."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise LoadError(f"agent {name} must take (client, task): {error}") from error

    async def agent(self: OpenAIAgentLoop, client: openai.AsyncOpenAI, task: Task) -> float | None:
        return await function(client, task)

    title = getattr(function, "__name__", name)
    return type(title, (OpenAIAgentLoop,), {"agent": agent, "__doc__": function.__doc__})


def _context_of(services: WorkerServices) -> GatewayContext:
    return GatewayContext(
        worker=services.worker,
        config=services.config,
        queue=services.queue,
        client=services.client,
        chat=services.chat,
        detokenizer=_text_of(services.chat),
        model=MODEL,
        reward=services.reward,
        mismatches=services.mismatches,
    )


@lru_cache(maxsize=4)
def _text_of(chat: ChatTokens) -> Detokenizer:
    """Cached per worker, because it reads the whole vocabulary."""
    return detokenizer(chat)


def _number(reward: Any) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise InfraFailure("loop", f"the agent returned {reward!r}; return its reward as a finite number, or None")
    return float(reward)
