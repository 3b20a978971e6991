from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families
from queue_samples import LIMITS, at, finish_all, tasks, train

from penstock.transfer_queue import MemoryTransferQueue, QueueGauges, ServerInfo, exposition

SERVERS = [ServerInfo("s1", "http://b", 1), ServerInfo("s0", "http://a", 0)]


async def test_gauges_say_what_the_status_says() -> None:
    now = 100.0
    queue = MemoryTransferQueue(clock=lambda: now)
    await queue.create_run(replace(LIMITS, max_staleness=2), "x")
    await queue.submit(tasks(9), cursor=at(9))
    await finish_all(queue)
    await train(queue, 0)
    await queue.add_wait("trainer", "batch", 1.5)
    now = 107.0
    status = await queue.status()
    families = {f.name: f for f in text_string_to_metric_families(exposition("r1", status, SERVERS).decode())}
    values = {
        (name, *sorted(set(s.labels.values()) - {"r1"})): s.value for name, f in families.items() for s in f.samples
    }
    assert values["penstock_queue_version",] == 1
    assert values["penstock_queue_groups", "ready"] == 4
    assert values["penstock_queue_groups", "queued"] == 3
    assert values["penstock_queue_episodes", "completed"] == 12
    assert values["penstock_queue_age_seconds", "queued"] == 7
    assert values["penstock_queue_waited_seconds", "trainer:batch"] == 1.5
    assert values["penstock_queue_bytes",] == status.bytes > 0
    assert values["penstock_queue_over_age_share", "10"] == 0
    assert values["penstock_queue_server_version_lag", "s0"] == 1
    assert values["penstock_queue_server_version_lag", "s1"] == 0
    assert all(s.labels["run"] == "r1" for family in families.values() for s in family.samples)


def test_no_status_no_gauges() -> None:
    assert list(QueueGauges("r1", lambda: None).collect()) == []
