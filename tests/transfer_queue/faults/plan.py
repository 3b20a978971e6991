"""What all processes of a stage are told: where the queue is, under which limits, and where they write."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.transfer_queue import Limits, TransferQueueConfig

DEADLINE_S = 60.0
"""How long a client waits for Redis: longer than any fault of ours lasts."""


@dataclass(frozen=True)
class Plan:
    """Written to ``plan.json`` before any process starts."""

    folder: Path
    url: str
    run: str
    password: str
    seed: int
    limits: Limits
    checkpoint_every: int
    may_lose_tail: bool = False
    """Redis may lose its newest writes, as a machine with ``everysec`` does: what was finished may be owed again."""

    @property
    def config(self) -> TransferQueueConfig:
        return TransferQueueConfig(deadline_s=DEADLINE_S)

    @property
    def finishing(self) -> bool:
        """No more tasks are fed: the trainer ends when all that were are trained."""
        return (self.folder / "finish").exists()

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def save(self) -> Path:
        path = self.folder / "plan.json"
        path.write_text(json.dumps({**asdict(self), "folder": str(self.folder)}), encoding="utf-8")
        return path


def load_plan(path: Path) -> Plan:
    plain = json.loads(path.read_text(encoding="utf-8"))
    return Plan(**{**plain, "folder": Path(plain["folder"]), "limits": Limits(**plain["limits"])})


def random_limits(chance: random.Random) -> Limits:
    """Small groups and steps, so that every kind of ending is met; all overage policies, filters and a quota."""
    groups_per_step = chance.randint(1, 3)
    return Limits(
        group_size=chance.randint(2, 4),
        groups_per_step=groups_per_step,
        max_staleness=chance.randint(0, 3),
        overage=chance.choice(["wait", "wait", "mask", "drop"]),
        max_attempts=2,
        lease_ttl_s=0.6,
        filter_groups=chance.choice(["none", "none", "zero_variance"]),
        max_filtered_steps=0,
        # As many as a step needs: with fewer, a queue that holds only this source could fill no step.
        quotas=chance.choice([{}, {"a": groups_per_step}]),
    )


class Orphaned(SystemExit):
    """The process that started this one is gone."""


def check_parent(parent: int) -> None:
    """Raises `Orphaned` where the stage was killed: its processes must not run on without anybody to stop them."""
    if os.getppid() != parent:
        raise Orphaned(1)
