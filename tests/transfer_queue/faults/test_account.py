"""The account of a stage counts planted records correctly."""

from __future__ import annotations

from pathlib import Path

from faults.account import Books
from faults.episodes import Records
from faults.plan import FaultPlan
from penstock.transfer_queue import Limits


def test_a_version_announced_with_other_weights_is_counted(tmp_path: Path) -> None:
    limits = Limits(group_size=2, groups_per_step=1, max_staleness=0)
    plan = FaultPlan(tmp_path, "redis://nowhere", "run", "", 1, limits, checkpoint_every=1)
    trainer, worker = Records(tmp_path / "trainer.jsonl"), Records(tmp_path / "told" / "worker.jsonl")
    for records in (trainer, trainer, worker):
        records.write("version", version=1, contents="aa")
    trainer.write("version", version=2, contents="bb")
    assert Books(plan, set()).versions_with_two_contents() == []
    worker.write("version", version=2, contents="cc")
    assert Books(plan, set()).versions_with_two_contents() == [2]
    for records in (trainer, worker):
        records.close()
