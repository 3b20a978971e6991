from __future__ import annotations

from dataclasses import replace

from ledger_samples import LIMITS, at, finish_all, tasks, train
from prometheus_client.parser import text_string_to_metric_families

from penstock.transfer_queue.gauges import LedgerGauges, exposition
from penstock.transfer_queue.ledger import ServerInfo
from penstock.transfer_queue.memory import MemoryLedger

SERVERS = [ServerInfo("s1", "http://b", 1), ServerInfo("s0", "http://a", 0)]


async def test_gauges_say_what_the_status_says() -> None:
    now = 100.0
    ledger = MemoryLedger(clock=lambda: now)
    await ledger.create_run(replace(LIMITS, max_staleness=2), "x")
    await ledger.submit(tasks(9), cursor=at(9))
    await finish_all(ledger)
    await train(ledger, 0)
    await ledger.add_wait("trainer", "batch", 1.5)
    now = 107.0
    status = await ledger.status()
    families = {f.name: f for f in text_string_to_metric_families(exposition("r1", status, SERVERS).decode())}
    values = {
        (name, *sorted(set(s.labels.values()) - {"r1"})): s.value for name, f in families.items() for s in f.samples
    }
    assert values["penstock_ledger_version",] == 1
    assert values["penstock_ledger_groups", "ready"] == 4
    assert values["penstock_ledger_groups", "queued"] == 3
    assert values["penstock_ledger_episodes", "completed"] == 12
    assert values["penstock_ledger_age_seconds", "queued"] == 7
    assert values["penstock_ledger_waited_seconds", "trainer:batch"] == 1.5
    assert values["penstock_ledger_bytes",] == status.bytes > 0
    assert values["penstock_ledger_over_age_share", "10"] == 0
    assert values["penstock_ledger_server_version_lag", "s0"] == 1
    assert values["penstock_ledger_server_version_lag", "s1"] == 0
    assert all(s.labels["run"] == "r1" for family in families.values() for s in family.samples)


def test_no_status_no_gauges() -> None:
    assert list(LedgerGauges("r1", lambda: None).collect()) == []
