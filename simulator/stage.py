"""Simulated time, and stages: machines that several jobs share (rollout servers, box starts, the trainer).

All running jobs of a stage advance at one speed, which depends on how many run: so one number, the progress that a job
present from the beginning would have made, says when each job ends (processor sharing, exact between events).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

Act = Callable[[], None]


class StuckSimulation(Exception):
    """Nothing is due any more and the goal is not reached: the described cluster can make no progress."""


class Clock:
    """Time moves only in `run`. Acts planned for the same moment run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._planned = 0

    def after(self, delay_s: float, act: Act) -> None:
        self._planned += 1
        heapq.heappush(self._due, (self.now_s + max(0.0, delay_s), self._planned, act))

    def run(self, finished: Callable[[], bool]) -> None:
        """Until `finished`. Raises `StuckSimulation` where nothing is left to happen before that."""
        while not finished():
            if not self._due:
                raise StuckSimulation(f"nothing more happens after {self.now_s:.1f} s")
            self.now_s, _, act = heapq.heappop(self._due)
            act()


Speed = Callable[[int], float]
"""Work per second of one job, by the number that run."""


@dataclass(slots=True)
class Job:
    work: float
    done: Callable[[Job], None]
    entered: float = 0.0
    """The stage's progress when the job began to run; it ends at `entered + work`."""


class Host:
    """Cores that stages of one machine share equally, `background` strangers among them: where all together ask for
    more than there is, all become slower."""

    def __init__(self, clock: Clock, cores: float, background: float = 0.0) -> None:
        self.cores = cores
        self.wanted_s = 0.0
        """Summed over time: cores that the stages asked for."""
        self.background = background
        self.share = 1.0
        self.stages: list[Stage] = []
        self._clock, self._settled_s, self._wanted = clock, clock.now_s, 0.0

    def settle(self) -> None:
        self.wanted_s += self._wanted * (self._clock.now_s - self._settled_s)
        self._settled_s = self._clock.now_s

    def rebalance(self) -> None:
        self.settle()
        self._wanted = sum(stage.demand for stage in self.stages)
        demand = self.background + self._wanted
        share = min(1.0, self.cores / demand) if demand else 1.0
        if share == self.share:
            return
        for stage in self.stages:
            stage.settle()
        self.share = share
        for stage in self.stages:
            stage.plan()


class Stage:
    """At most `capacity` jobs run, further ones wait in order. A pause stops progress, not the queue; pauses nest."""

    def __init__(self, clock: Clock, speed: Speed, capacity: int, host: Host | None = None, one_core: bool = False):
        self.progress = 0.0
        self.busy_s = 0.0
        self.work_done = 0.0
        self.present_s = 0.0
        """Summed over jobs: seconds in which they waited or ran here."""
        self.waiting: deque[Job] = deque()
        self._clock, self._speed, self._capacity, self._host = clock, speed, capacity, host
        self._one_core = one_core
        self._running: list[tuple[float, int, Job]] = []
        self._entered = 0
        self._settled_s = clock.now_s
        self._plan = 0
        self._pauses = 0
        if host is not None:
            host.stages.append(self)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def load(self) -> int:
        return len(self._running) + len(self.waiting)

    @property
    def demand(self) -> float:
        """Cores asked for: one for the whole stage, or one per job."""
        if self._pauses:
            return 0.0
        return float(min(1, self.running) if self._one_core else self.running)

    def submit(self, work: float, done: Callable[[Job], None]) -> Job:
        self.settle()
        job = Job(work, done)
        self.waiting.append(job)
        self._fill()
        return job

    def withdraw(self, job: Job) -> float:
        """A job that waits or runs here leaves; returns what is left of its work."""
        self.settle()
        if any(one is job for one in self.waiting):
            self.waiting = deque(one for one in self.waiting if one is not job)
            return job.work
        self._running = [one for one in self._running if one[2] is not job]
        heapq.heapify(self._running)
        self._fill()
        return max(0.0, job.entered + job.work - self.progress)

    def pause(self) -> None:
        self.settle()
        self._pauses += 1
        self._changed()

    def resume(self) -> None:
        self.settle()
        self._pauses -= 1
        self._changed()

    def settle(self) -> None:
        """Bring progress and accounts to this moment, at the speed that held since the last change."""
        passed_s = self._clock.now_s - self._settled_s
        self._settled_s = self._clock.now_s
        self.present_s += passed_s * self.load
        if self._running and passed_s > 0:
            progress = passed_s * self._rate()
            self.progress += progress
            self.work_done += progress * len(self._running)
            self.busy_s += passed_s

    def plan(self) -> None:
        """Say when the next job ends; an earlier word about it no longer counts."""
        self._plan += 1
        rate = self._rate()
        if not self._running or rate <= 0:
            return
        plan, remaining = self._plan, self._running[0][0] - self.progress

        def end_first() -> None:
            if plan == self._plan:
                self.settle()
                end, _, job = heapq.heappop(self._running)
                self.progress = end  # exactly, so that rounding never leaves a job with a last 1e-12 of work
                self._fill()
                job.done(job)

        self._clock.after(remaining / rate, end_first)

    def _rate(self) -> float:
        if self._pauses or not self._running:
            return 0.0
        return self._speed(len(self._running)) * (self._host.share if self._host else 1.0)

    def _fill(self) -> None:
        while self.waiting and len(self._running) < self._capacity:
            job = self.waiting.popleft()
            job.entered = self.progress
            self._entered += 1
            heapq.heappush(self._running, (job.entered + job.work, self._entered, job))
        self._changed()

    def _changed(self) -> None:
        if self._host is not None:
            self._host.rebalance()
        self.plan()
