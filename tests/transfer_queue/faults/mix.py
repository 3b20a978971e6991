"""Every kind of fault in one stage, in proportion to the kills of redis-server and of the trainer.

redis:    killed `kills` times, once of them it loads for long | trainers: die in every gap, and are overtaken
workers:  killed half as often, and by poison rows             | strangers, a stepping clock, lost payloads, cut logs
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import cycle, islice

from faults.account import Account
from faults.havoc import kill_redis
from faults.plan import ANYWHERE, GAPS, OVERTAKEN, random_limits
from faults.stage import Stage

KILLS_EVERY_S = 1.2
"""Of redis-server, on average."""
MAX_LOST_LEASES = 4
EVERY_GAP = (*GAPS, ANYWHERE, OVERTAKEN)


async def play_mix(seed: int, kills: int, *, first_gap: int = 0, load_s: float = 0.0) -> tuple[Account, dict[str, int]]:
    """The account of one stage, and how often its processes were started again.

    `kills` of redis-server and of the trainer each, half as many of workers. `first_gap`: where in `EVERY_GAP` to
    begin. With `load_s`, Redis loads its file for so long once. Raises `Wedged` and `ProcessFailed`, in a group.
    """
    # Groups that can spare a payload, see `Intruders.lose_payload`.
    limits = random_limits(random.Random(seed), smallest_group=3, fewest_groups=2)
    limits = replace(limits, max_lost_leases=MAX_LOST_LEASES)
    kinds = {"poison": True, "movable_clock": True, "loses_payloads": True}
    async with Stage(seed, fsync=("always", "everysec")[seed % 2], limits=limits, **kinds) as stage:
        gaps = list(islice(cycle(EVERY_GAP), first_gap, first_gap + kills))
        stage.chance.shuffle(gaps)
        others, intruders = math.ceil(kills / 2), stage.intruders
        lasting_s = kills * KILLS_EVERY_S

        async def redis() -> None:
            kill = lambda: kill_redis(stage.server, stage.chance)  # noqa: E731
            await stage.every(KILLS_EVERY_S, kill, name="redis", times=kills - kills // 2)
            if load_s:
                await intruders.load_for_long(load_s)
            await stage.every(KILLS_EVERY_S, kill, name="redis", times=kills // 2)

        account = await stage.play(
            redis(),
            stage.every(lasting_s / others, stage.troupe.kill_worker, times=others),
            stage.every(lasting_s / others, intruders.second_head, times=others),
            stage.every(lasting_s / others, intruders.step_clock, times=others),
            stage.every(lasting_s / others, lambda: intruders.lose_payload(stage.client), times=others),
            stage.every(lasting_s / others, intruders.cut_log, times=others),
            gaps=gaps,
        )
        account.wrong += [f"{key} is left in Redis" for key in await stage.leftovers()]
        return account, {**stage.troupe.restarts, "redis": kills + intruders.counts["loads"]}
