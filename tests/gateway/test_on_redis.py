"""The life of recorded episodes in Redis, under the rights of a rollout server and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.gateway.conftest import USER, Bench, back, say

from penstock.agent_loops import AgentConfig, ChatTokens
from penstock.gateway.errors import Gone, NotNow
from penstock.transfer_queue import (
    DataCursor,
    Outcome,
    OutcomeKind,
    RedisServer,
    RedisTransferQueue,
    Task,
    TransferQueueConfig,
)
from penstock.transfer_queue.redis import role_users

pytestmark = pytest.mark.redis
MORE = {"role": "user", "content": "And 1+1?"}
FAILED = Outcome(OutcomeKind.INFRA_ERROR, "my box died", "agent")


@pytest.fixture
async def bench(tmp_path: Path, chat_for: Callable[..., ChatTokens]) -> AsyncIterator[Bench]:
    users = role_users("mine", {"rollout": "rollout-password"})
    async with RedisServer(tmp_path / "redis", "a-test-password", users=users) as server:
        owner = await RedisTransferQueue.connect(server.url, "mine", TransferQueueConfig(), "a-test-password")
        made = Bench(chat_for(), AgentConfig(max_turns=20, max_response_tokens=9999))
        await owner.create_run(made.limits, "config: 1")
        await owner.submit([Task("train/0", "train", [USER], "sums", "46")], cursor=DataCursor(0, 1))
        await owner.close()
        queue = await RedisTransferQueue.connect(
            server.url, "mine", TransferQueueConfig(), "rollout-password", "rollout"
        )
        made.parts = replace(made.parts, queue=queue)
        made.restart()
        yield made
        await made.manager.close()
        await queue.close()


async def test_taken_over_finished_twice_and_given_back(bench: Bench) -> None:
    episode = await bench.manager.open(0.0)
    first = await say(episode)
    again = await bench.restart().find(episode.handle)
    await say(again, [USER, back(first), MORE])
    await again.note(reward=0.5, turn_rewards=[0.1, 0.2])
    ending = await bench.manager.finish(episode.handle, None)
    assert (ending.outcome, ending.reward, ending.turns, ending.segments) == ("completed", 0.5, 2, 1)
    assert await bench.restart().finish(episode.handle, None) == ending
    other = await bench.manager.open(0.0)
    await say(other)
    assert (await bench.manager.finish(other.handle, FAILED)).tried_again
    with pytest.raises(Gone):
        await bench.restart().finish(other.handle, None)
    retried = await bench.manager.open(0.0)
    assert (retried.lease.attempt, len(retried.history.turns)) == (1, 0)
    with pytest.raises(NotNow, match="no episode is queued; 1 are being run"):
        await bench.manager.open(0.0)
