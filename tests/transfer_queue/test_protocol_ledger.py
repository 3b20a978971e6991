"""The ledger of `TransferQueue`: each episode has one fate, each report counts once. One suite for all stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from queue_samples import INFRA, LIMITS, at, finish_all, tasks, train, trajectory

from penstock.transfer_queue import Fate, Limits, TransferQueue, UsageReport

FILTERED = replace(LIMITS, groups_per_step=1, filter_groups="zero_variance")


async def fates_of(queue: TransferQueue) -> dict[str, tuple[Fate, int]]:
    """Episode → its fate and sampled tokens; none has two."""
    rows = [(name, (entry.fate, n)) for entry in await queue.ledger(0) if entry.fate for name, n in entry.episodes]
    fates = dict(rows)
    assert len(fates) == len(rows), rows
    return {name: (fate, tokens) for name, (fate, tokens) in fates.items() if fate is not None}


async def play(queue: TransferQueue, rewards: Sequence[float | None], version: int = 0, tokens: int = 2) -> None:
    leases = await queue.lease_episodes("worker", len(rewards), version)
    for lease, reward in zip(leases, rewards, strict=True):
        await queue.complete(lease, trajectory(lease, reward=reward, tokens=tokens))


async def test_trained_filtered_and_unrewarded_episodes_have_their_fate_once(make_queue) -> None:
    queue = await make_queue(replace(FILTERED, group_size=3))
    await queue.submit(tasks(2), cursor=at(2))
    await play(queue, [1.0, 1.0, 1.0])
    await play(queue, [1.0, None, 0.0], tokens=5)
    filtered = {f"train/0000#{m}": (Fate.FILTERED, 2) for m in range(3)}
    unrewarded = {"train/0001#1": (Fate.UNREWARDED, 5)}
    assert await fates_of(queue) == filtered | unrewarded, "what is not trained yet has none"
    await train(queue, 0)
    await queue.commit(1)
    trained = {f"train/0001#{m}": (Fate.TRAINED, 5) for m in (0, 2)}
    assert await fates_of(queue) == filtered | unrewarded | trained


async def test_episodes_that_are_given_up_take_their_group_along(make_queue) -> None:
    queue = await make_queue(Limits(group_size=2, groups_per_step=1, max_staleness=0, max_attempts=1))
    await queue.submit(tasks(1), cursor=at(1))
    first, second = await queue.lease_episodes("worker", 2, 0)
    await queue.complete(first, trajectory(first))
    await queue.fail(second, INFRA)
    assert await fates_of(queue) == {
        first.episode_id: (Fate.DEAD_LETTER, 2),
        second.episode_id: (Fate.DEAD_LETTER, 0),
    }


async def test_groups_over_age_take_their_unfinished_episodes_along(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, groups_per_step=1, overage="drop", max_staleness=1))
    await queue.submit(tasks(4), cursor=at(4))
    slow, _ = await queue.lease_episodes("slow", 2, 0)
    await queue.complete(slow, trajectory(slow))
    for step in range(2):
        await finish_all(queue, 2, step)
        await train(queue, step)
    await queue.lease_batch(2)
    fates = await fates_of(queue)
    assert {name: fate for name, fate in fates.items() if name.startswith("train/0000")} == {
        "train/0000#0": (Fate.OVER_AGE, 2),
        "train/0000#1": (Fate.OVER_AGE, 0),
    }


async def test_lost_payloads_have_a_fate_and_so_has_their_group(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, groups_per_step=1, min_group=2))
    await queue.submit(tasks(1), cursor=at(1))
    await finish_all(queue)
    await queue.lease_batch(0)
    await queue.drop_lost(0, ["train/0000#1"])
    assert await fates_of(queue) == {f"train/0000#{m}": (Fate.PAYLOAD_LOST, 2) for m in range(2)}


async def test_steps_that_a_checkpoint_knows_better_are_trained(make_queue) -> None:
    queue = await make_queue(replace(LIMITS, groups_per_step=1))
    await queue.submit(tasks(1), cursor=at(1))
    await finish_all(queue)
    await queue.commit(1, {0: [["train/0000#0", "train/0000#1"]]})
    fates = await fates_of(queue)
    assert {name: fate for name, (fate, _) in fates.items()} == {f"train/0000#{m}": Fate.TRAINED for m in range(2)}


async def test_reports_come_in_order_and_are_trimmed(make_queue) -> None:
    queue = await make_queue(LIMITS)
    reports = [
        UsageReport(f"id{n}", f"rollout-{n}", {"train/0#0": {"tokens": 3.0, "rollout_s": 0.5}}) for n in range(3)
    ]
    for report in [*reports, reports[0]]:  # a repeat counts once
        await queue.report_usage(report)
    entries = await queue.ledger(0)
    assert [entry.usage for entry in entries] == reports
    numbers = [entry.number for entry in entries]
    assert numbers == sorted(set(numbers))
    assert [entry.number for entry in await queue.ledger(numbers[0], limit=1)] == numbers[1:2]
    await queue.trim_ledger(numbers[1])
    await queue.trim_ledger(numbers[1])
    assert [entry.number for entry in await queue.ledger(0)] == numbers[2:]
