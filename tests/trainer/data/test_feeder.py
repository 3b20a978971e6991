"""How far ahead tasks are queued, and that losses are made good."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from trainer_support import ProducingQueue, make_trajectory

from penstock.testing import MemoryTransferQueue
from penstock.trainer import DataError, DatasetRow
from penstock.trainer.data.order import StreamedTasks
from penstock.trainer.data.rows import DataStream, Feeder, missing_groups
from penstock.transfer_queue import Announcement, Batch, DataCursor, Limits, Status

LIMITS = Limits(group_size=4, groups_per_step=8, max_staleness=2)


def status(version: int, **groups: int) -> Status:
    return Status(version, version, 0, groups, {}, 0, {}, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (status(0), 32),
        (status(0, queued=8, admitted=20, ready=4), 0),
        (status(5, queued=8, admitted=10, ready=4, shipped=8, trained=40), 10),
        (status(5, queued=8, admitted=10, ready=4, dropped_over_age=7, dead=3), 10),
        (status(37, queued=4, admitted=6), 14),
        (status(38, shipped=8, ready=5), 3),
        (status(39, shipped=8), 0),
        (status(40), 0),
    ],
)
def test_missing_groups_of_forty_steps(given: Status, expected: int) -> None:
    assert missing_groups(given, LIMITS, steps=40) == expected


async def test_tasks_follow_the_stream_and_a_restart_goes_on_where_the_queue_is() -> None:
    limits = Limits(group_size=2, groups_per_step=2, max_staleness=0)
    rows = make_rows(3)
    queue = starved(limits)
    stream = DataStream(3, seed=1, shuffle=True)
    feeder = Feeder(queue, limits, StreamedTasks(rows, stream), steps=5)
    await feeder.start()
    assert feeder.cursor == DataCursor(1, 1)
    places = stream.places(DataCursor(), 7)
    assert [t.task_id for t in queue.waiting] == [name(place) for place in places[:4]]
    assert queue.waiting[3].task_id == "train/0001/00000000"
    assert [t.ground_truth for t in queue.waiting] == [stream.row_index(place) for place in places[:4]]
    assert await feeder.fill() == 0
    for task in queue.waiting[:3]:
        del queue._state.groups[task.task_id]
    again = Feeder(queue, limits, StreamedTasks(rows, stream), steps=5)
    await again.start()
    assert [t.task_id for t in queue.waiting] == [name(place) for place in places[3:]]
    assert await queue.cursor() == again.cursor == DataCursor(2, 1)


async def test_a_dataset_that_changed_between_restarts_gives_no_name_twice() -> None:
    limits = Limits(group_size=2, groups_per_step=2, max_staleness=0)
    queue, names = starved(limits), []
    for count in (6, 3, 9):
        order = StreamedTasks(make_rows(count), DataStream(count, seed=1, shuffle=True))
        feeder = Feeder(queue, limits, order, steps=50)
        await feeder.start()
        names += [t.task_id for t in queue.waiting]
        queue._state.groups.clear()
    assert names == [
        *("train/0000/00000000", "train/0000/00000001", "train/0000/00000002", "train/0000/00000003"),
        *("train/0001/00000000", "train/0001/00000001", "train/0001/00000002", "train/0002/00000000"),
        *("train/0002/00000001", "train/0002/00000002", "train/0002/00000003", "train/0002/00000004"),
    ]


@pytest.mark.parametrize("quota", [1, 4, 6])
async def test_a_source_at_its_quota_does_not_take_the_others_room(quota: int) -> None:
    """Every second row is of a source whose quota is below, at and above its share of a step."""
    limits = Limits(group_size=2, groups_per_step=8, max_staleness=2, quotas={"odd": quota})
    rows = [DatasetRow([{"role": "user", "content": "?"}], ("even", "odd")[n % 2], n, None, {}) for n in range(100)]
    queue = MemoryTransferQueue()
    await queue.create_run(limits, "")
    feeder = Feeder(queue, limits, StreamedTasks(rows, DataStream(100, seed=1, shuffle=True)), steps=25)
    await feeder.start()
    for step in range(25):
        await feeder.fill()
        while leases := await queue.lease_episodes("w", 50, step):
            for lease in leases:
                await queue.complete(lease, make_trajectory(lease.task.task_id, lease.member, step))
        batch = await queue.lease_batch(step)
        assert isinstance(batch, Batch), batch
        await queue.publish_version(Announcement(step + 1, {}))
    assert feeder.cursor >= DataCursor(2, 0)


async def test_a_task_that_the_queue_refuses_ends_the_trainer_for_good() -> None:
    queue, limits = MemoryTransferQueue(), Limits(group_size=2, groups_per_step=2, max_staleness=0)
    await queue.create_run(limits, "")
    rows = [DatasetRow([{"role": "user", "content": "\ud83d"}], "test", "1", None, {})]
    feeder = Feeder(queue, limits, StreamedTasks(rows, DataStream(1, seed=1, shuffle=False)), steps=2)
    with pytest.raises(DataError, match=r"task train/0000/00000000: messages\[0\]\.content: half of a surrogate"):
        await feeder.start()


def starved(limits: Limits) -> ProducingQueue:
    queue = ProducingQueue(limits)
    queue.starved = True
    return queue


def name(place: DataCursor) -> str:
    return f"train/{place.epoch:04d}/{place.index:08d}"


def make_rows(count: int) -> list[DatasetRow]:
    return [DatasetRow([{"role": "user", "content": str(n)}], "test", n, None, {}) for n in range(count)]
