"""A run whose episodes are forked at random turns while its agent workers are killed at random.

Its archive says what was trained: a branch that is missing or stands there twice, and one whose beginning is not its
parent's, id for id.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.comparison import say
from benchmarks.support.left_behind import left_behind, wait_for_nothing
from benchmarks.support.soak_run import SoakRun
from penstock.transfer_queue import Archive, Trajectory

GROUP_SIZE = 8
FORKED = (
    *(f"group_size={GROUP_SIZE}", "agent.forks.branches=3", "agent.forks.turn=random", "agent.max_turns=3"),
    *("trainer.advantage=tree_rl", "data.eval=null"),
)
END_S = 1200.0


def fork_figures(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Trains `steps` steps, after most of which a worker is killed, and returns the figures ``forks…`` of the run.

    Raises `EndedEarly`.
    """
    run, kills, chance = SoakRun(folder, "forked"), 0, random.Random(seed)
    run.start(*FORKED, steps=steps)
    try:
        killed_at = 0
        while (step := run.newest_step()) < steps - 1:
            run.check()
            run.note()
            if step > killed_at:
                killed_at, kills = step + chance.randrange(2), kills + _kill_worker(run, chance)
            time.sleep(chance.uniform(0.1, 1.0))  # no event loop runs in this process
        summary = run.finish(END_S)
        leftovers = wait_for_nothing(lambda: left_behind(run.root, run.started, run.workers, run.ports))
    finally:
        run.end()
    return figures_of(_trained(Archive(run.root / "archive"), steps), summary) | {
        "forks_kills": kills,
        "forks_left_behind": leftovers,
    }


def _kill_worker(run: SoakRun, chance: random.Random) -> bool:
    pids = [process.pid for role, process in run.parts() if role == "agent"]
    if not pids:
        return False
    say("forks: a worker is killed")
    return run.kill(chance.choice(pids))


def _trained(archive: Archive, steps: int) -> list[list[Trajectory]]:
    groups = []
    for step, names in archive.batches(0, steps).items():
        episodes = archive.read(step, [name for group in names for name in group])
        groups += [[episodes[name] for name in group] for group in names]
    return groups


def figures_of(groups: Sequence[Sequence[Trajectory]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """`groups`: all that were trained. A member that is in none must be counted under a reason in the summary."""
    episodes = [one for group in groups for one in group]
    branches = [one for one in episodes if "origin" in one.extra]
    known = {one.episode_id: one for one in episodes}
    missing = sum(GROUP_SIZE - len(group) for group in groups)
    counted = sum(summary[f"episodes_{reason}"] for reason in ("failed", "unrewarded", "payload_lost"))
    times = Counter(one.episode_id for one in branches)
    return {
        "forks": len(branches),
        "forks_lost": max(0, missing - counted) + summary["lost"],
        "forks_twice": sum(count - 1 for count in times.values()),
        "forks_different": sum(not _shares_beginning(one, known) for one in branches),
    }


def _shares_beginning(branch: Trajectory, known: Mapping[str, Trajectory]) -> bool:
    """Returns True as well if the parent was not trained: it has no reward, or its step lost it."""
    origin = branch.extra["origin"]
    parent = known.get(origin["parent"])
    if parent is None:
        return True
    (own,), (others,) = branch.segments, parent.segments
    place = int(others.turn_starts[origin["turn"]])
    same_ids = own.response_ids[:place].tolist() == others.response_ids[:place].tolist()
    same_logprobs = own.response_logprobs[:place].tobytes() == others.response_logprobs[:place].tobytes()
    return same_ids and same_logprobs and own.prompt_ids.tolist() == others.prompt_ids.tolist()
