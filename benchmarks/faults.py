"""Many kills of redis-server, of the trainer in every gap and of agent workers: what is lost, what is twice?

Beside the kills: rows that end their workers, second heads, second trainers, a Redis whose clock steps by up to an
hour, whose payloads vanish, and which once loads its file for two minutes; batch logs that are cut, episodes that are
ended twice under one fence.

penstock bench faults --json; PENSTOCK_FAULT_KILLS (200) of Redis and of the trainer each, half as many of workers;
PENSTOCK_FAULT_SEED; PENSTOCK_FAULT_LOAD_S (120).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "transfer_queue"))

from faults.account import Account
from faults.intruders import Wedged
from faults.mix import play_mix

from penstock.transfer_queue import QueueError

KILLS_PER_STAGE = 25
"""A new stage has other limits: its group size, staleness, overage policy, filter and quota are random."""
OF_ACCOUNTS = (
    *("acknowledged", "trained", "steps", "owed", "poison_rows", "lost_payloads"),
    "versions_with_two_contents",
)
OF_COUNTS = (
    *("strangers_refused", "trainers_fenced", "clock_steps", "payloads_deleted", "logs_cut", "completions_repeated"),
    *("loads", "loaded_s"),
)


@dataclass
class Campaign:
    """What all stages came to."""

    accounts: list[Account] = field(default_factory=list)
    restarts: Counter[str] = field(default_factory=Counter)
    wedged: int = 0
    broken: list[str] = field(default_factory=list)
    """What ended stages before their account could be drawn up."""

    def figures(self) -> dict[str, Any]:
        wrong = [text for account in self.accounts for text in (*account.lost, *account.twice, *account.wrong)]
        kills = sum((Counter(account.kills) for account in self.accounts), Counter[str]())
        return {
            **{name: sum(getattr(account, name) for account in self.accounts) for name in OF_ACCOUNTS},
            "lost": sum(len(account.lost) for account in self.accounts),
            "twice": sum(len(account.twice) for account in self.accounts),
            "wedged": self.wedged,
            "wrong": [*wrong, *self.broken],
            **{name: sum(account.counts.get(name, 0) for account in self.accounts) for name in OF_COUNTS},
            "kills": dict(sorted(kills.items())),
            "restarts": dict(self.restarts),
        }


def measure() -> dict[str, Any]:
    kills = int(os.environ.get("PENSTOCK_FAULT_KILLS", "200"))
    seed = int(os.environ.get("PENSTOCK_FAULT_SEED", random.randrange(10**6)))
    load_s = float(os.environ.get("PENSTOCK_FAULT_LOAD_S", "120"))
    return asyncio.run(_measure(kills, seed, load_s))


async def _measure(kills: int, seed: int, load_s: float) -> dict[str, Any]:
    began, campaign, done = time.monotonic(), Campaign(), 0
    for number, count in enumerate(_portions(kills)):
        line = await _one_stage(campaign, seed + number, count, done, load_s if number == 0 else 0.0)
        done += count
        print(f"{time.monotonic() - began:.0f} s: {line}", file=sys.stderr, flush=True)
    figures = {**campaign.figures(), "took_s": round(time.monotonic() - began, 1)}
    setup = {"seed": seed, "redis_kills": kills, "trainer_kills": kills, "appendfsync": "always and everysec by turns"}
    return {"bench": "faults", "ratio": {}, "figures": figures, "setup": {**setup, "load_s": load_s}}


def _portions(kills: int) -> Iterator[int]:
    while kills > 0:
        yield min(kills, KILLS_PER_STAGE)
        kills -= KILLS_PER_STAGE


async def _one_stage(campaign: Campaign, seed: int, kills: int, first_gap: int, load_s: float) -> str:
    try:
        account, restarts = await play_mix(seed, kills, first_gap=first_gap, load_s=load_s)
    except* Wedged as wedges:
        campaign.wedged += 1
        line = str(wedges.exceptions)
    except* (AssertionError, QueueError) as errors:
        line = f"seed {seed}: {errors.exceptions}"
        campaign.broken.append(line)
    else:
        campaign.accounts.append(account)
        campaign.restarts.update(restarts)
        line = "\n".join([account.line, *account.lost, *account.twice, *account.wrong])
    return line
