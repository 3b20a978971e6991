"""Any async function that takes an `AsyncOpenAI` client is an agent: its samples are trained on, token for token.

    agent(client, task) ──► openai_client ──► session (parent turn? splice : new segment) ──► journal ──► segments

The rules are those of recorded episodes (docs/guide/agent.md): the same prefix tree and journal, no server.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from penstock.agent_loops import AgentLoopOutput, InfraFailure, LoadError
from penstock.common import USERS_FAULTS
from penstock.common.errors import defined_at, finite_number
from penstock.gateway.finish import last_turn, outcome_of
from penstock.gateway.recorded_loop import RecordedLoop
from penstock.transfer_queue import Task

if TYPE_CHECKING:
    import openai

    from penstock.gateway.openai_client import RecordingTransport

Agent = Callable[["openai.AsyncOpenAI", Task], Awaitable[float | None]]


class OpenAIAgentLoop(RecordedLoop):
    """Runs `agent` inside the worker. A function by its path does the same: ``agent.loop=my_agent.py:solve``.

    On a resumed episode the agent runs from its start, and its requests are answered from the journal; its own tools
    run again.
    """

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

    async def run(self, task: Task) -> list[AgentLoopOutput]:
        from penstock.gateway.openai_client import RecordingTransport, make_client

        self._transport = RecordingTransport(self.recorded)
        try:
            async with make_client(self._transport) as client:
                reward = await self.agent(client, task)
        except USERS_FAULTS as error:
            # An agent sees infrastructure failures as `openai` errors; they end the episode even if it handles them.
            if self._transport.failure is not None:
                raise self._transport.failure from error
            raise
        finally:
            await self.close_recording()
        if self._transport.failure is not None:
            raise self._transport.failure
        self.check_replayed()
        number = finite_number(reward)
        if reward is not None and number is None:
            problem = f"the agent returned {reward!r:.80}; return its reward as a finite number, or None"
            raise InfraFailure("loop", problem + defined_at(self.agent))
        if last_turn(self.recorded) is None:
            raise InfraFailure("loop", "the agent returned without asking the model anything")
        return self.recorded_outputs(outcome_of(self.recorded, None), reward=number)


def loop_of(function: Agent, name: str) -> type[OpenAIAgentLoop]:
    """The loop that runs ``async def function(client, task)``. Raises `LoadError` if it takes something else."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise LoadError(f"agent {name} must take (client, task): {error}") from error

    @functools.wraps(function)
    async def agent(self: OpenAIAgentLoop, client: openai.AsyncOpenAI, task: Task) -> float | None:
        return await function(client, task)

    title = getattr(function, "__name__", name)
    return type(title, (OpenAIAgentLoop,), {"agent": agent, "__doc__": function.__doc__})
