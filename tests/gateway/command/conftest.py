"""Real programs in real boxes as agents, with answers that a test gives."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.agent_loops.conftest import (  # noqa: F401
    EpisodeQueue,
    calling_policy,
    chat_for,
    parts_of,
    queue_of,
    tasks_of,
    tokenizer_for,
)

from penstock.agent_loops import AgentConfig, Episode
from penstock.sandbox import Sandbox, SandboxConfig, make_sandbox
from penstock.testing import FakeClient
from penstock.transfer_queue import Outcome, Trajectory

CLIENT = """
import json, os, sys, time, urllib.error, urllib.request

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]


def post(path, body, base=os.environ["OPENAI_BASE_URL"], key=os.environ["OPENAI_API_KEY"]):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def ask(messages, **more):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}
    return post("/chat/completions", body)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


"""
"""Begins every agent of these tests: a client of a few lines, on what each box's Python has."""
ROOMY = {"max_turns": 20, "max_response_tokens": 5000, "episode_deadline_s": 300.0}
BOXES = SandboxConfig(max_boxes=8, memory_mb=256, cpu_s=60, run_timeout_s=60.0, image="penstock-box:base")
BACKENDS = [pytest.param("bwrap", marks=pytest.mark.bwrap), pytest.param("docker", marks=pytest.mark.docker)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.sandbox.conftest import skip_missing_backends

    skip_missing_backends(items, Path(__file__).parent)


@pytest_asyncio.fixture(params=["bwrap"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    made = make_sandbox(BOXES.model_copy(update={"backend": request.param}), f"tests-{os.getpid()}")
    yield made
    await made.close()


@dataclass
class Ended:
    """One run of an episode."""

    outcome: Outcome
    trajectory: Trajectory | None
    queue: EpisodeQueue

    @property
    def program(self) -> Mapping[str, Any]:
        assert self.trajectory is not None
        return self.trajectory.extra["program"]


RunAgent = Callable[..., Awaitable[Ended]]


@pytest.fixture
def run(queue_of, tasks_of, parts_of, calling_policy, sandbox) -> RunAgent:
    """Runs one lease of one task with `code` as its agent; hand in `queue` again for the next worker's lease."""

    async def go(
        code: str = "",
        *,
        client: Any = None,
        queue: Any = None,
        settings: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        row: Mapping[str, Any] | None = None,
        **services: Any,
    ) -> Ended:
        queue = queue or queue_of(tasks_of(extra_info=dict(row or {})))
        given = {"command": ["python3", "{home}/agent.py"], "files": {"~/agent.py": CLIENT + code}, **(settings or {})}
        agent = AgentConfig(loop="command", **{**ROOMY, **(config or {})}, settings=given)
        parts = parts_of(queue, client or FakeClient(calling_policy()), config=agent, sandbox=sandbox, **services)
        (task,) = tasks_of(extra_info=dict(row or {}))
        outcome = await Episode(parts, queue.lease(task)).run()
        return Ended(outcome, queue.done.get(task.task_id), queue)

    return go
