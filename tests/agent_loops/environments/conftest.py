"""Episodes on environments, with answers that a test gives."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.agent_loops import AgentConfig, Episode
from penstock.agent_loops.base import SharedParts
from penstock.testing import FakeClient
from penstock.transfer_queue import Outcome, Trajectory

HUBS = Path(__file__).parents[3] / ".hubs"


def hub(name: str, package: str) -> Any:
    """Skips a test whose package is not there, with what installs it."""
    missing = not (HUBS / name / package).exists()
    return pytest.mark.skipif(missing, reason=f"{package} is missing: scripts/setup-hubs installs it")


@dataclass
class Played:
    """One run of an episode."""

    outcome: Outcome
    trajectory: Trajectory | None
    client: FakeClient
    queue: Any

    @property
    def done(self) -> Trajectory:
        assert self.trajectory is not None, self.outcome
        return self.trajectory

    @property
    def prompts(self) -> list[list[int]]:
        return [request.token_ids for request in self.client.requests]


Play = Callable[..., Awaitable[Played]]


@pytest_asyncio.fixture
async def shared() -> AsyncIterator[SharedParts]:
    parts = SharedParts()
    yield parts
    await parts.close()


@pytest.fixture
def play(queue_of, tasks_of, parts_of, chat_for, shared: SharedParts) -> Play:
    """One lease of one task. `says`: the model's answers, the last one repeated, or a function of the context."""

    async def go(
        loop: Any,
        says: Sequence[str] | Callable[[str], str],
        settings: Mapping[str, Any] | None = None,
        row: Mapping[str, Any] | None = None,
        queue: Any = None,
        fails_at: int | None = None,
        **config: Any,
    ) -> Played:
        chat = chat_for()

        def reply(context: list[int]) -> list[int]:
            count = len(client.requests) - 1
            if count == fails_at:
                raise RuntimeError("the worker dies here")
            said = says(chat.decode(context)) if callable(says) else says[min(count, len(says) - 1)]
            return [*chat.encode(said), chat.turn_end_id]

        client = FakeClient(reply)
        given = {"max_turns": 12, "max_response_tokens": 20_000, "max_new_tokens": 1000, "episode_deadline_s": 300.0}
        agent = AgentConfig(**{**given, "settings": dict(settings or {}), **config})
        (task,) = tasks_of(extra_info=dict(row or {}))
        task = dataclasses.replace(task, messages=[{"role": "system", "content": "Act."}])
        queue = queue or queue_of([task])
        parts = parts_of(queue, client, config=agent, shared=shared, reward=None)
        if not isinstance(loop, str):
            parts = dataclasses.replace(parts, find_loop=lambda name: loop)
        else:
            parts = dataclasses.replace(parts, config=agent.model_copy(update={"loop": loop}))
        outcome = await Episode(parts, queue.lease(task)).run()
        return Played(outcome, queue.done.get(task.task_id), client, queue)

    return go
