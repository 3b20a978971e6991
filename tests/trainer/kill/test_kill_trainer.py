"""A trainer killed with -9 in every gap between step, records, spill, checkpoint and commit, and at any moment.

Each run ends with every trajectory in exactly one committed step, and with the uninterrupted run's weights to the bit.
``PENSTOCK_KILLS=100`` goes on with gaps drawn at random until so many trainers were killed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from faults.plan import ANYWHERE, seeds
from kill_stage import KilledRun, Nursery, Tally, drawn
from planted import END, GAPS, RESUME

pytestmark = [
    pytest.mark.deep,
    pytest.mark.redis,
    pytest.mark.torch,
    pytest.mark.crash,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="session"),
]
KILLS_VARIABLE = "PENSTOCK_KILLS"
KILLS_IN_A_RUN = 9
MOST_RUNS_IN_VAIN = 20
"""So many runs, one after the other, may come to their end before a life comes to its gap."""

Make = Callable[[str], KilledRun]


async def test_a_trainer_killed_in_every_gap(make: Make, nursery: Nursery, reference: dict[str, Any]) -> None:
    wanted = int(os.environ.get(KILLS_VARIABLE, "0"))
    for seed in seeds(1):
        chance, tally, vain = random.Random(seed), Tally(), 0
        waiting = chance.sample([*GAPS, ANYWHERE], k=len(GAPS) + 1)
        while waiting or sum(tally.kills.values()) < wanted:
            waiting = waiting or chance.choices([*GAPS, ANYWHERE], k=KILLS_IN_A_RUN)
            gaps = in_order(waiting[:KILLS_IN_A_RUN])
            run = make(f"run-{tally.runs}")
            killed = await run.play(nursery, drawn(gaps, chance), seed + tally.runs)
            await run.check(reference)
            tally.runs += 1
            tally.kills.update(killed)
            waiting = gaps[len(killed) :] + waiting[KILLS_IN_A_RUN:]
            vain = 0 if killed else vain + 1
            assert vain <= MOST_RUNS_IN_VAIN, f"never killed in: {waiting}"
        print(tally)
        assert set(tally.kills) >= set(GAPS)


def in_order(gaps: Sequence[str]) -> list[str]:
    """A checkpoint is loaded when there is one, whole; the end comes last."""
    resume, end = [gap for gap in gaps if gap in RESUME], [gap for gap in gaps if gap in END]
    others = [gap for gap in gaps if gap not in (*RESUME, *END)]
    return [*others, *(["after_seal"] if "after_load" in resume else []), *resume, *end]
