"""Runs of `penstock bench compare`: programs that are followed to their goal, and what they have cost until then."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.child import stop_run
from benchmarks.support.grpo_plan import GrpoStep, goal_reached
from benchmarks.support.reaper import reaped, tree_cpu_s
from penstock.common import JsonlTail

LOOK_S = 0.05


class ProgramFailed(Exception):
    """A program ended with an error, or took too long; the message ends with its last lines."""


@dataclass(frozen=True)
class Progress:
    """One program on one seed, from its start to its goal."""

    steps: tuple[GrpoStep, ...]
    """To the goal, or all where it was not reached"""
    cpu_s: float
    """Of the whole process tree when the last of them was seen, as the kernel counts"""
    cpu_first_s: float
    """When the first was seen: start included"""
    cpu_end_s: float
    """When the program had ended"""
    goal: float

    @property
    def reached(self) -> bool:
        return goal_reached([step.reward for step in self.steps], self.goal)

    @property
    def wall_s(self) -> float:
        return self.steps[-1].wall_s

    @property
    def cpu_per_step(self) -> float:
        """Start included"""
        return self.cpu_s / len(self.steps)

    @property
    def cpu_per_later_step(self) -> float:
        """Without the start and the first step; NaN where there is one step."""
        later = len(self.steps) - 1
        return (self.cpu_s - self.cpu_first_s) / later if later else math.nan

    @property
    def episodes(self) -> int:
        return sum(step.episodes for step in self.steps)

    @property
    def sampled_tokens(self) -> int:
        return sum(step.sampled_tokens for step in self.steps)


@dataclass(frozen=True)
class Program:
    """A command that ends by itself, and writes a line of JSON per step on its way."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Added to this process's"""
    log: Path
    step_of: Callable[[Mapping[str, Any], float], GrpoStep]
    """A line of the log, and seconds since the start"""
    output: Path
    """What it prints"""

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.environment}
        with self.output.open("wb") as output:
            return subprocess.Popen(
                reaped(self.command), stdout=output, stderr=output, env=environment, cwd=tempfile.gettempdir()
            )

    def last_lines(self) -> str:
        return "\n" + self.output.read_text(errors="replace")[-2000:]


def follow(program: Program, timeout_s: float, goal: float) -> Progress:
    """Run it to its end. `goal`: mean reward up to which it counts. Raises `ProgramFailed`."""
    before, began = _children_cpu_s(), time.monotonic()
    process = program.start()
    watch, tail = _Watch(goal), JsonlTail(program.log)
    steps = lambda: [program.step_of(row, time.monotonic() - began) for row in tail.read()]  # noqa: E731
    try:
        while process.poll() is None:
            watch.see(steps(), lambda: tree_cpu_s(process.pid))
            if time.monotonic() - began > timeout_s:
                raise ProgramFailed(
                    f"longer than {timeout_s:.0f} s; PENSTOCK_BENCH_RUN_TIMEOUT_S allows more{program.last_lines()}"
                )
            time.sleep(LOOK_S)  # nothing else waits in this process
    finally:
        stop_run(process)
    cpu_end_s = _children_cpu_s() - before
    watch.see(steps(), lambda: cpu_end_s)
    if process.returncode or not watch.steps:
        name = " ".join(program.command[:3])
        raise ProgramFailed(f"{name}: exit status {process.returncode}, {len(watch.steps)} steps{program.last_lines()}")
    return watch.progress(cpu_end_s)


class _Watch:
    """What a program had cost when each step was seen, up to the goal."""

    def __init__(self, goal: float) -> None:
        self._goal = goal
        self.steps: list[GrpoStep] = []
        self._cpu: list[float] = []

    def see(self, steps: Sequence[GrpoStep], cpu_s: Callable[[], float]) -> None:
        """What comes after the goal, on a program's way to its end, counts for nothing.

        `cpu_s`: reads all processes of the machine, so it is asked once per step alone.
        """
        for step in steps:
            if goal_reached([one.reward for one in self.steps], self._goal):
                return
            self.steps.append(step)
            self._cpu.append(cpu_s())

    def progress(self, cpu_end_s: float) -> Progress:
        return Progress(tuple(self.steps), self._cpu[-1], self._cpu[0], cpu_end_s, self._goal)


def _children_cpu_s() -> float:
    """CPU seconds of all ended children of this process, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
