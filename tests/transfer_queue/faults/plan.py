"""What all processes of a stage share: the queue, its limits, their folders; gaps in which a trainer dies; and seeds,
which are printed and repeated by ``PENSTOCK_FAULT_SEED``."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.transfer_queue import Limits, TransferQueueConfig

DEADLINE_S = 60.0
"""How long a client waits for Redis: longer than any fault of ours lasts."""


@dataclass(frozen=True)
class FaultPlan:
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
    poison: bool = False
    """Some episodes end every worker process that runs them, see `episodes.is_poison`."""
    movable_clock: bool = False
    """Redis's own clock can be stepped, see `redis_clock`."""
    loses_payloads: bool = False
    """Payloads are deleted from Redis behind the queue's back."""

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


def load_plan(path: Path) -> FaultPlan:
    plain = json.loads(path.read_text(encoding="utf-8"))
    return FaultPlan(**{**plain, "folder": Path(plain["folder"]), "limits": Limits(**plain["limits"])})


def random_limits(chance: random.Random, *, smallest_group: int = 2, fewest_groups: int = 1) -> Limits:
    """Small groups and steps, so that every kind of ending is met; all overage policies, filters and a quota."""
    groups_per_step = chance.randint(fewest_groups, 3)
    return Limits(
        group_size=chance.randint(smallest_group, 4),
        groups_per_step=groups_per_step,
        max_staleness=chance.randint(0, 3),
        overage=chance.choice(["wait", "wait", "mask", "drop"]),
        max_attempts=2,
        max_lost_leases=1000,  # workers are killed from outside
        lease_ttl_s=0.6,
        filter_groups=chance.choice(["none", "none", "zero_variance"]),
        max_filtered_steps=0,
        # As many as a step needs: with fewer, a queue that holds only this source could fill no step.
        quotas=chance.choice([{}, {"a": groups_per_step}]),
        branches=chance.choice([0, 1]),
    )


class Orphaned(SystemExit):
    """The process that started this one is gone."""


def check_parent(parent: int) -> None:
    """Raises `Orphaned` where the stage was killed: its processes must not run on without anybody to stop them."""
    if os.getppid() != parent:
        raise Orphaned(1)


GAPS = (
    "before_step",
    "after_lease",
    "after_step",
    "after_publish",
    "in_spill",
    "in_checkpoint",
    "after_checkpoint",
    "in_commit",
    "after_commit",
)
ANYWHERE = "anywhere"
"""Not a gap: the trainer is killed from outside at a random moment."""
OVERTAKEN = "overtaken"
"""Not a gap: a second trainer claims the run while the first lives."""


class Gaps:
    """Ends the process the `passes`-th time that it comes by the gap of this `name`; never where that is empty."""

    def __init__(self, name: str, passes: int, chance: random.Random) -> None:
        self._name = name
        self._left = passes
        self._chance = chance

    def at(self, name: str) -> None:
        if self._due(name):
            _die()

    def during(self, name: str) -> None:
        """A moment later: while a request is on its way, being done, or being answered."""
        if self._due(name):
            asyncio.get_running_loop().call_later(self._chance.uniform(0, 0.002), _die)

    def _due(self, name: str) -> bool:
        self._left -= name == self._name
        return name == self._name and self._left == 0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


SEED_VARIABLE = "PENSTOCK_FAULT_SEED"


def seeds(rounds: int) -> Iterator[int]:
    """The seed asked for, once, or `rounds` random ones."""
    asked = os.environ.get(SEED_VARIABLE)
    for seed in [int(asked)] if asked else [random.randrange(10**6) for _ in range(rounds)]:
        print(f"{SEED_VARIABLE}={seed}")
        yield seed
