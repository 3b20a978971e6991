"""An environment of verifiers, unmodified, as the program of a box: the recipe's own settings and files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.agent_loops.environments.conftest import HUBS, hub
from tests.gateway.conftest import sampled, whole

from penstock.agent_loops import Episode
from penstock.agent_loops.rewards import load_reward
from penstock.deploy import load_config
from penstock.sandbox import Sandbox, make_sandbox
from penstock.testing import FakeClient
from penstock.transfer_queue import OutcomeKind

pytestmark = [pytest.mark.hubs, pytest.mark.bwrap, pytest.mark.deep, hub("verifiers", "verifiers")]
ROOT = Path(__file__).parents[3]
CONFIG = load_config(ROOT / "recipes/hubs/verifiers.yaml")
FOLDERS = {"/site-packages": str(HUBS / "verifiers"), "/recipe": str(ROOT / "recipes/hubs")}


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = make_sandbox(CONFIG.sandbox.model_copy(update={"folders": FOLDERS}), f"tests-{os.getpid()}")
    yield made
    await made.close()


@pytest.fixture
def rollout(queue_of, tasks_of, parts_of, chat_for, sandbox: Sandbox) -> Callable[..., Any]:
    async def go(*says: str, seed: int = 5, **settings: Any) -> Any:
        chat = chat_for()

        def reply(context: list[int]) -> list[int]:
            return [*chat.encode(says[min(len(client.requests), len(says)) - 1]), chat.turn_end_id]

        client = FakeClient(reply)
        config = CONFIG.agent.model_copy(
            update={
                "settings": {**CONFIG.agent.settings, **settings},
                "max_new_tokens": 200,
                "max_response_tokens": 2000,
            }
        )
        task = replace(tasks_of()[0], extra_info={"seed": seed})
        queue = queue_of([task])
        reward = load_reward(config, ROOT)
        outcome = await Episode(
            parts_of(queue, client, config=config, sandbox=sandbox, reward=reward), queue.lease(task)
        ).run()
        return outcome, queue.done.get(task.task_id), client

    return go


async def test_a_rollout_is_recorded_token_for_token_and_graded_by_its_rubric(rollout) -> None:
    outcome, trajectory, client = await rollout("I think 3.", "It is 11.")
    assert (outcome.kind, trajectory.reward) == (OutcomeKind.COMPLETED, 1.0), (outcome, trajectory)
    (segment,) = trajectory.segments
    assert (segment.num_turns, trajectory.metrics["reward/right"]) == (2, 1.0)
    assert whole(segment)[: len(client.requests[-1].token_ids)] == client.requests[-1].token_ids
    assert len(sampled(segment)) > 4


async def test_settings_reach_taskset_and_agent(rollout) -> None:
    """The harness `bash` is the default of an environment that names none."""
    settings = '{"taskset": {"terms": 3}, "agent": {"harness": {"id": "bash"}}}'
    command = ["python3", "-P", "/recipe/verifiers_episode.py", "small_sums", "{seed}", settings]
    outcome, trajectory, _ = await rollout("It is 18.", command=command)
    assert (outcome.kind, trajectory.reward) == (OutcomeKind.COMPLETED, 1.0), (outcome, trajectory)
    assert trajectory.segments[0].num_turns == 1


async def test_a_wrong_answer_is_a_zero_and_an_environment_that_is_not_there_a_failure(rollout) -> None:
    outcome, trajectory, _ = await rollout("no", "no")
    assert (outcome.kind, trajectory.reward) == (OutcomeKind.COMPLETED, 0.0)
    command = ["python3", "-P", "/recipe/verifiers_episode.py", "no_such_environment", "0"]
    outcome, trajectory, _ = await rollout("no", command=command)
    assert (outcome.kind, trajectory) == (OutcomeKind.INFRA_ERROR, None)
    assert "never asked the model" in outcome.reason
