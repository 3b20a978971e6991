"""The whole life of a run with every role under its own Redis user, and what each is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from queue_samples import INFRA, LIMITS, at, tasks, trajectory, turn

from penstock.transfer_queue import (
    Announcement,
    Archive,
    Batch,
    QueueError,
    RedisServer,
    RedisTransferQueue,
    ServerInfo,
    TransferQueueConfig,
    TurnCall,
    WeightUpdate,
)
from penstock.transfer_queue.redis import RIGHTS, role_users

pytestmark = pytest.mark.redis
PASSWORD = "a-test-password"
CONFIG = TransferQueueConfig(deadline_s=120.0)
ENGINE = TurnCall("engine", "s0", 1, holds=True, ttl_s=30.0)
PASSWORDS = {role: f"{role}-password" for role in RIGHTS}


@pytest.fixture
async def queues(tmp_path: Path) -> AsyncIterator[dict[str, RedisTransferQueue]]:
    """Role → its queue of one run that its owner has created."""
    log = Archive(tmp_path / "log")
    async with RedisServer(tmp_path / "redis", PASSWORD, users=role_users("mine", PASSWORDS)) as server:
        made = {
            role: await RedisTransferQueue.connect(
                server.url, "mine", CONFIG, password, role, archive=log if role == "trainer" else None
            )
            for role, password in PASSWORDS.items()
        }
        await made["owner"].create_run(LIMITS, "config: 1")
        yield made
        for queue in made.values():
            await queue.close()


async def test_each_role_can_do_its_work(queues: dict[str, RedisTransferQueue]) -> None:
    owner, trainer, agent, rollout, watch = (queues[role] for role in RIGHTS)
    for queue in queues.values():
        assert await queue.config() == "config: 1"
    await trainer.submit(tasks(6), cursor=at(6))
    await rollout.heartbeat(ServerInfo("s0", "http://s0", 0))
    assert [info.server_id for info in await agent.servers()] == ["s0"]
    assert [info.server_id for info in await watch.servers()] == ["s0"]
    for lease in await agent.lease_episodes("w", 8, 0):
        await agent.journal(lease, turn(1), 0)
        assert await agent.renew([lease]) == []
        await agent.complete(lease, trajectory(lease))
    await agent.prove_reward("judge 1f mine")
    assert await rollout.is_reward_proven("judge 1f mine")
    await rollout.prove_reward("judge 1f another")
    await agent.add_wait("agent", "lease", 0.5)
    assert (await rollout.status()).episodes["completed"] == 8
    await watch_everything(watch)
    for step in (0, 1):
        batch = await trainer.lease_batch(step)
        assert isinstance(batch, Batch)
        assert len(await trainer.read([episode for group in batch.groups for episode in group])) == 4
        assert await trainer.publish_version(Announcement(step + 1, {}))
    assert (
        await trainer.spill(0, [episode for group in (await trainer.lease_batch(0)).groups for episode in group]) == 4
    )
    await trainer.commit(2)
    latest, mark = await rollout.latest_version(), await rollout.latest_mark()
    assert latest is not None
    assert mark is not None
    assert latest.version == mark.version == 2
    await rollout.report_update(WeightUpdate("s0", 2, 0.1, 0.1, 0.1, 3))
    assert (await rollout.take_turn(ENGINE)).fence
    assert (await trainer.take_turn(TurnCall("trainer", "t", 1, holds=True, ttl_s=30.0))).fence == 0
    assert [one.holds for one in (await watch.turns()).holders] == [True, False]
    await rollout.deregister("s0")
    (recorded,) = await rollout.lease_episodes("s0", 1, 2)
    await rollout.journal(recorded, turn(1), 0)
    assert len((await rollout.adopt(recorded.episode_id, recorded.fence)).journal) == 1
    await rollout.complete(recorded, trajectory(recorded))
    given_up = await agent.lease_episodes("w", 2, 2)
    await agent.release(given_up[1])
    while await agent.fail(given_up[0], INFRA):
        (given_up[0], *_) = await agent.lease_episodes("w", 1, 2)
    await watch_everything(watch)
    assert (await watch.status()).committed_step == 2
    assert await owner.drop_run() > 0


async def watch_everything(watch: RedisTransferQueue) -> None:
    await watch.status()
    await watch.held()
    await watch.updates()
    await watch.dead_letters()
    await watch.cursor()
    await watch.turn_reports()


async def test_no_role_can_do_the_work_of_another(queues: dict[str, RedisTransferQueue]) -> None:
    trainer, agent, rollout, watch = (queues[role] for role in ("trainer", "agent", "rollout", "watch"))
    await trainer.submit(tasks(2), cursor=at(2))
    for lease in await agent.lease_episodes("w", 4, 0):
        await agent.complete(lease, trajectory(lease))
    assert isinstance(await trainer.lease_batch(0), Batch)
    before = await watch.status()
    for queue in (agent, rollout, watch):
        await refused(queue.publish_version(Announcement(1, {})))
        await refused(queue.lease_batch(1))
        await refused(queue.commit(1, {0: [["train/0000#0", "train/0000#1"]]}))
        await refused(queue.create_run(LIMITS, "config: 1"))
        await refused(queue.claim_head("a thief", 30.0))
    for queue in (rollout, watch):
        await refused(queue.drop_run())
    await refused(watch.lease_episodes("thief", 1, 0))
    await refused(watch.adopt("train/0000#0", 1))
    await refused(watch.submit(tasks(1, start=10), cursor=at(10)))
    await refused(agent.heartbeat(ServerInfo("false", "http://false", 9)))
    await refused(watch.deregister("s0"))
    await refused(watch.prove_reward("judge 1f mine"))
    for queue in (agent, watch):
        await refused(queue.take_turn(ENGINE))
    assert await watch.status() == before
    assert await queues["owner"].config() == "config: 1"


async def refused(call) -> None:
    with pytest.raises(QueueError, match="Rights per role"):
        await call
