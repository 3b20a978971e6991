"""Many kills of redis-server, of the trainer in every gap and of agent workers: what is lost, what is twice?

penstock bench faults --json; PENSTOCK_FAULT_KILLS (200) of Redis and of the trainer each, PENSTOCK_FAULT_SEED.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "transfer_queue"))

from faults.account import Account
from faults.havoc import kill_redis
from faults.plan import ANYWHERE, GAPS
from faults.stage import Stage

KILLS_PER_STAGE = 25
"""A new stage has other limits: its group size, staleness, overage policy, filter and quota are random."""
REDIS_PAUSE_S, WORKER_PAUSE_S = 1.2, 3.0


def measure() -> dict[str, Any]:
    kills = int(os.environ.get("PENSTOCK_FAULT_KILLS", "200"))
    seed = int(os.environ.get("PENSTOCK_FAULT_SEED", random.randrange(10**6)))
    return asyncio.run(_measure(kills, seed))


async def _measure(kills: int, seed: int) -> dict[str, Any]:
    began, accounts = time.monotonic(), []
    gaps = cycle([*GAPS, ANYWHERE])
    restarts = {"worker": 0, "trainer": 0, "redis": 0}
    for number, count in enumerate(_portions(kills)):
        account, started = await _one_stage(seed + number, count, list(islice(gaps, count)))
        accounts.append(account)
        restarts = {name: restarts[name] + started[name] for name in restarts}
        print(f"{time.monotonic() - began:.0f} s: {account.line}", file=sys.stderr, flush=True)
    wrong = [text for account in accounts for text in (*account.lost, *account.twice, *account.wrong)]
    figures = {
        **{name: sum(getattr(account, name) for account in accounts) for name in ("acknowledged", "trained", "steps")},
        "owed": sum(account.owed for account in accounts),
        "lost": sum(len(account.lost) for account in accounts),
        "twice": sum(len(account.twice) for account in accounts),
        "wrong": wrong,
        "kills": _kills(accounts),
        "restarts": restarts,
        "took_s": round(time.monotonic() - began, 1),
    }
    setup = {"seed": seed, "redis_kills": kills, "trainer_kills": kills, "appendfsync": "always and everysec by turns"}
    return {"bench": "faults", "ratio": {}, "figures": figures, "setup": setup}


def _portions(kills: int) -> Iterator[int]:
    while kills > 0:
        yield min(kills, KILLS_PER_STAGE)
        kills -= KILLS_PER_STAGE


async def _one_stage(seed: int, kills: int, gaps: list[str]) -> tuple[Account, dict[str, int]]:
    async with Stage(seed, fsync=("always", "everysec")[seed % 2]) as stage:
        stage.chance.shuffle(gaps)
        workers_killed = max(1, round(kills * REDIS_PAUSE_S / WORKER_PAUSE_S))
        account = await stage.play(
            stage.every(REDIS_PAUSE_S, lambda: kill_redis(stage.server, stage.chance), name="redis", times=kills),
            stage.every(WORKER_PAUSE_S, stage.kill_worker, times=workers_killed),
            gaps=gaps,
        )
        account.wrong += [f"{key} is left in Redis" for key in await stage.leftovers()]
        return account, {**stage.troupe.restarts, "redis": kills}


def _kills(accounts: list[Account]) -> dict[str, int]:
    names = sorted({name for account in accounts for name in account.kills})
    return {name: sum(account.kills.get(name, 0) for account in accounts) for name in names}
