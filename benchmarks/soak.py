"""A whole run in which a random role is killed every ten seconds or so: does it balance at its end, is anything left?

    penstock bench soak --json

The calculator recipe: engine `hf`, boxes of bubblewrap, a real Redis. Killed by SIGKILL: an agent worker, a rollout
server or its engine, the trainer, redis-server, or the supervisor itself, which is then started with ``--resume``. Now
and then the trainer's disk is full at a checkpoint, which ends the run until it is resumed, or a file of the batch log
is cut before the trainer is killed. At the end the run is resumed with two servers, of which one dies for good, and
once more for its last steps; then the accounts must balance, nothing may be left of it on the machine, and the memory
of each role must not have grown. `accounts_percent`: the CPU seconds in the accounts of cost over those that the kernel
has counted for servers and trainers, read every 50 ms.

PENSTOCK_SOAK_MINUTES (30); PENSTOCK_SOAK_PAUSE_S (10): mean seconds between two kills; PENSTOCK_SOAK_SEED (random);
PENSTOCK_SOAK_FOLDER: where the run's folder is kept.
"""

from __future__ import annotations

import os
import random
import secrets
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from benchmarks.support.comparison import say
from benchmarks.support.device_cpu import DeviceCpu
from benchmarks.support.left_behind import left_behind, wait_for_nothing
from benchmarks.support.soak_run import LOOK_S, ROLES, SUPERVISOR, EndedEarly, SoakRun

FULL_DISK, CUT_LOG, LOST_SERVER = "full disk", "cut batch log", "server lost for good"
WEIGHTS = {**dict.fromkeys(ROLES, 2), SUPERVISOR: 1, FULL_DISK: 1, CUT_LOG: 2}
"""How often a role or a fault is chosen. With its supervisor the whole run dies; after that it needs time to train
anything."""
FULL_AT = 8 << 20
"""Bytes: more than a version of the calculator's model takes, less than its checkpoint."""
NOT_SAVED = "was not written: "
"""In what a run says that ends because of its disk."""
LOSES_SERVER = ("rollout.servers=2", "rollout.max_restarts=1")
LOST, LOST_WITHIN_S = "the run continues with 1 of 2 rollout servers", 300.0
GROWN_UP_S = 60.0
"""A process that is younger may still be taking what it needs: on a busy machine a trainer needs 20 s to be there."""
UNTIL_FIRST_STEP_S, UNTIL_END_S = 600.0, 900.0
NEVER = 1_000_000
LAST_STEPS = 2
OF_SUMMARY = (
    "steps",
    "lost",
    "trained_twice",
    "token_mismatches",
    "episodes_failed",
    "staleness_max",
    "lives",
    "restarts",
)


class Memory:
    """Resident memory of each role over the time of the soak, in whatever process it was."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._began = time.monotonic()

    def add(self, seen: dict[str, list[tuple[float, int]]]) -> None:
        minute = (time.monotonic() - self._began) / 60
        for role in seen.keys() & WEIGHTS.keys():
            self._rows[role] += [(minute, size / 1e6) for age_s, size in seen[role] if age_s >= GROWN_UP_S]

    def figures(self) -> dict[str, dict[str, float]]:
        """Role → median of all looks in MB, and growth by least squares in MB per minute."""
        found = {}
        for role, rows in sorted(self._rows.items()):
            minutes, sizes = zip(*rows, strict=True) if rows else ((), ())
            if len(set(minutes)) > 1:
                slope = linear_regression(minutes, sizes).slope
                found[role] = {"mb": round(median(sizes), 1), "mb_per_min": round(slope, 3), "looks": len(rows)}
        return found


class Soak:
    """The kills of one soak. `ended`: why the run ended by itself, each time that it did."""

    def __init__(self, run: SoakRun, seed: int) -> None:
        self._run = run
        self._chance = random.Random(seed)
        self.memory = Memory()
        self.kills: Counter[str] = Counter()
        self.ended: list[str] = []

    def until_first_step(self) -> None:
        deadline = time.monotonic() + UNTIL_FIRST_STEP_S
        while not self._run.steps():
            self._run.check()
            if time.monotonic() > deadline:
                raise EndedEarly(f"no step within {UNTIL_FIRST_STEP_S:.0f} s: {self._run.tail()}")
            self._run.note()
            time.sleep(LOOK_S)  # nothing else waits in this process

    def play(self, minutes: float, pause_s: float) -> None:
        """`pause_s`: mean time between two kills."""
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            self._look_for(self._chance.uniform(0.5, 1.5) * pause_s)
            try:
                self._run.check()
            except EndedEarly as error:
                say(f"soak: {error}")
                if NOT_SAVED in str(error):
                    self.kills[FULL_DISK] += 1
                else:
                    self.ended.append(str(error))
                self._run.start(steps=NEVER, resume=True)
                continue
            self._kill_one()

    def _look_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.memory.add(self._run.note())
            time.sleep(LOOK_S)  # nothing else waits in this process

    def _kill_one(self) -> None:
        """No kill where no process has the role now: a run that starts again begins with its supervisor alone."""
        (fault,) = self._chance.choices([*WEIGHTS], [*WEIGHTS.values()])
        role = "trainer" if fault in (FULL_DISK, CUT_LOG) else fault
        pids = [process.pid for name, process in self._run.parts() if name == role]
        if not pids or (fault == CUT_LOG and not self._run.cut_log()):
            return
        if fault == FULL_DISK:
            for pid in pids:
                self._run.limit_files(pid, FULL_AT)
        elif self._run.kill(self._chance.choice(pids)):
            self.kills[fault] += 1
            say(f"soak: {fault} killed; {self._run.newest_step()} steps so far")
        if role == SUPERVISOR:
            self._run.start(steps=NEVER, resume=True)

    def lose_a_server(self) -> None:
        """Kill one of two servers again and again until the run gives it up and continues with the other."""
        self._run.start(*LOSES_SERVER, steps=NEVER, resume=True)
        deadline = time.monotonic() + LOST_WITHIN_S
        while LOST not in self._run.tail():
            self._run.check()
            if time.monotonic() > deadline:
                raise EndedEarly(f"no server left the run within {LOST_WITHIN_S:.0f} s: {self._run.tail()}")
            for role, process in self._run.parts():
                if role == "rollout" and "rollout-1" in process.cmdline():
                    self._run.kill(process.pid)
            self._look_for(LOOK_S)
        self.kills[LOST_SERVER] += 1
        goal = self._run.newest_step() + LAST_STEPS
        while self._run.newest_step() < goal:
            self._run.check()
            if time.monotonic() > deadline + UNTIL_FIRST_STEP_S:
                raise EndedEarly(f"no step without the server that is lost: {self._run.tail()}")
            self._look_for(LOOK_S)


def measure() -> dict[str, Any]:
    minutes, pause_s = (float(os.environ.get(f"PENSTOCK_SOAK_{n}", d)) for n, d in (("MINUTES", 30), ("PAUSE_S", 10)))
    seed = int(os.environ.get("PENSTOCK_SOAK_SEED", random.randrange(10**6)))
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        kept = Path(os.environ.get("PENSTOCK_SOAK_FOLDER", folder)).resolve()
        kept.mkdir(parents=True, exist_ok=True)
        return _measure(SoakRun(kept, f"soak-{secrets.token_hex(3)}"), minutes, pause_s, seed)


def _measure(run: SoakRun, minutes: float, pause_s: float, seed: int) -> dict[str, Any]:
    soak = Soak(run, seed)
    run.start(steps=NEVER)
    try:
        with DeviceCpu(run) as devices:
            soak.until_first_step()
            soak.play(minutes, pause_s)
            run.stop()
            soak.lose_a_server()
            run.stop()
            trained = run.steps()
            run.start(steps=run.newest_step() + LAST_STEPS, resume=True)
            summary = run.finish(UNTIL_END_S)
        left = wait_for_nothing(lambda: left_behind(run.root, run.started, run.workers, run.ports))
    finally:
        run.end()
    figures = {name: summary.get(name) for name in OF_SUMMARY}
    figures |= {"kills": dict(soak.kills), "ended_by_itself": soak.ended, "steps_with_repeats": trained}
    figures |= {"versions_seen": len(run.contents), "versions_with_two_contents": run.versions_with_two_contents()}
    accounts = [summary["accounts"].get(resource, {}) for resource in ("rollout_s", "trainer_s")]
    counted = sum(amount for of_resource in accounts for amount in of_resource.values())
    figures |= {"accounts": summary["accounts"], "accounts_percent": round(100 * counted / devices.seconds, 2)}
    figures |= {"left_behind": left, "memory": soak.memory.figures(), "processes": len(run.started)}
    return {
        "bench": "soak",
        "ratio": {},
        "figures": figures,
        "setup": {"minutes": minutes, "pause_s": pause_s, "seed": seed},
    }
