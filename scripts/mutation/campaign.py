"""Plants the mistakes, runs the tests that concern each, and keeps the verdicts."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mutation.points import Point, points_of
from mutation.runs import Outcome, fork, outcome_of, read_notes, reap, run_check, run_chosen
from mutation.suite import Suite
from mutation.tree import Planted, copy_tree

PATIENCE = 5.0
CHECK: Sequence[str] = ()
"""Asked for in place of tests: a run of `Limits.check`."""
CHECK_WITHIN_S = 600.0
Trial = Generator[Sequence[str], Outcome, dict[str, Any]]
"""Asks for runs of tests, is sent their outcomes, returns the verdict."""


def draw(root: Path, files: Sequence[str], seed: int) -> list[Point]:
    """All lines that can hold a mistake, in random order, with one point of each: the same for the same seed."""

    def number(*parts: object) -> str:
        return hashlib.sha256(":".join(map(str, (seed, *parts))).encode()).hexdigest()

    drawn = []
    for file in files:
        lines: dict[int, list[Point]] = {}
        for point in points_of(file, (root / file).read_bytes()):
            lines.setdefault(point.line, []).append(point)
        drawn += [min(points, key=lambda point: number("point", point.key)) for points in lines.values()]
    return sorted(drawn, key=lambda point: number("line", point.path, point.line))


class State:
    """What is known so far; in a file of JSON lines, if one is named, so that a stopped run can go on."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.measured: dict[str, Any] | None = None
        self.verdicts: dict[str, dict[str, Any]] = {}
        self.sound: set[str] = set()
        """Tests that noticed something and pass without any mistake."""
        self.flaky: set[str] = set()
        """Tests that noticed something and fail without it too."""
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._apply(json.loads(line))
            self.verdicts = {key: one for key, one in self.verdicts.items() if one["status"] != "not judged"}

    def add(self, **entry: Any) -> None:
        self._apply(entry)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def _apply(self, entry: dict[str, Any]) -> None:
        self.measured = entry.get("measured", self.measured)
        if "verdict" in entry:
            self.verdicts[entry["key"]] = entry["verdict"]
        self.sound.update(entry.get("sound", ()))
        self.flaky.update(entry.get("flaky", ()))
        if "flaky" in entry:
            self.verdicts = {key: one for key, one in self.verdicts.items() if one["by"] not in self.flaky}


@dataclass(frozen=True)
class Limits:
    count: int
    """Mutants to judge, the skipped ones not counted. One that cannot be judged counts: else a tree whose tests cannot
    be collected would be gone through whole."""
    jobs: int
    """Mutants at once."""
    first: int
    """Tests in a mutant's first run."""
    budget_s: float
    """Measured seconds of tests per mutant."""
    grace_s: float
    """A run of tests hangs if it takes longer than this and PATIENCE × their measured seconds."""
    check: str
    """Command that judges what all tests pass, in Python; empty for none."""


@dataclass
class Run:
    """A run of tests that is under way."""

    trial: Trial
    copy: Path
    key: str
    notes: Path
    deadline: float


class Campaign:
    """Judges the first points of `order`, several at a time, each in a copy of the tree of its own."""

    def __init__(self, root: Path, work: Path, order: Sequence[Point], suite: Suite, *, state: State, limits: Limits):
        self._root, self._order, self._suite = root, order, suite
        self._state, self._limits = state, limits
        self._free = [work / f"copy{number}" for number in range(limits.jobs)]
        self._runs: dict[int, Run] = {}
        self._plants = itertools.count(1)
        suite.failing |= state.flaky
        for copy in self._free:
            if not copy.exists():
                copy_tree(root, copy)

    def verdicts(self) -> list[dict[str, Any]]:
        return [self._state.verdicts[point.key] for point in self._wanted() if point.key in self._state.verdicts]

    def run(self) -> None:
        """Judge, until every test that noticed something is known to pass without a mistake."""
        try:
            if self._limits.check:
                self._check_copies()
            while self._judge() or self._verify():
                pass
        finally:
            for pid, run in self._runs.items():
                reap(pid, kill=True)
                run.trial.close()

    def _wanted(self) -> Iterator[Point]:
        planted = 0
        for point in self._order:
            if planted == self._limits.count:
                return
            yield point
            verdict = self._state.verdicts.get(point.key)
            planted += verdict is None or verdict["status"] != "skipped"

    def _trial(self, point: Point, copy: Path) -> Trial:
        source = (self._root / point.path).read_bytes()
        before, after = point.show(source)
        verdict = {"path": point.path, "line": point.line, "operator": point.operator, "before": before, "after": after}
        candidates = self._suite.candidates(point)
        if candidates is None:
            return verdict | {
                "status": "skipped",
                "cause": "all tests of the line fail anyway",
                "by": "",
                "seconds": 0.0,
            }
        began, run, found = time.monotonic(), 0, {"status": "survived", "cause": "", "by": ""}
        doubtful: Sequence[str] = ()
        with Planted(copy / point.path, point.plant(source), next(self._plants)):
            for batch in self._suite.batches(candidates, self._limits.first, self._limits.budget_s):
                outcome = yield batch
                if outcome.cause == "hung" or outcome.names_no_test:
                    outcome = yield batch  # a busy machine is slow once, an endless loop always
                run += len(outcome.passed) + bool(outcome.by)
                if outcome.cause:
                    found = {"status": "noticed", "cause": outcome.cause, "by": outcome.by}
                    doubtful = batch if outcome.names_no_test else ()
                    break
            else:
                if self._limits.check and point.path.endswith(".py") and (yield CHECK).cause == "failed":
                    found = {"status": "noticed", "cause": "check", "by": ""}
        if doubtful and (yield doubtful).names_no_test:
            found["status"] = "not judged"  # the same run does no better without the mistake
        seconds = round(time.monotonic() - began, 1)
        return verdict | found | {"tests_run": run, "tests": len(candidates), "seconds": seconds}

    def _judge(self) -> bool:
        """Judge the points that have no verdict yet; returns whether there were any."""
        todo = [point for point in self._wanted() if point.key not in self._state.verdicts]
        for point in todo:
            copy = self._free.pop()
            self._advance(self._trial(point, copy), copy, point.key, None)
            while not self._free:
                self._collect()
        while self._runs:
            self._collect()
        return bool(todo)

    def _advance(self, trial: Trial, copy: Path, key: str, outcome: Outcome | None) -> None:
        """Start the next run of a trial; keep its verdict where there is none."""
        try:
            tests = next(trial) if outcome is None else trial.send(outcome)
        except StopIteration as stop:
            self._free.append(copy)
            self._state.add(key=key, verdict=stop.value)
            self._print(stop.value)
            return
        pid, notes, deadline = self._start(copy, tests, "-x")
        self._runs[pid] = Run(trial, copy, key, notes, deadline)

    def _start(self, copy: Path, tests: Sequence[str], *options: str) -> tuple[int, Path, float]:
        notes = copy.with_suffix(".notes")
        notes.unlink(missing_ok=True)
        if tests is CHECK:
            action, within_s = partial(run_check, self._limits.check), CHECK_WITHIN_S
        else:
            action, within_s = partial(run_chosen, tests, notes, *options), PATIENCE * self._suite.seconds(tests)
        with copy.with_suffix(".output").open("wb") as output:
            pid = fork(copy, output.fileno(), action)
        return pid, notes, time.monotonic() + self._limits.grace_s + within_s

    def _wait(self, pid: int, notes: Path, deadline: float) -> Outcome:
        while not (ending := reap(pid, kill=time.monotonic() > deadline))[0]:
            time.sleep(0.02)
        return outcome_of(notes, ending[1])

    def _check_copies(self) -> None:
        """The check passes without a mistake; what it keeps for its next run is there then."""
        started = [(copy, self._start(copy, CHECK)) for copy in self._free]
        outcomes = [(copy, self._wait(*run)) for copy, run in started]
        for copy, outcome in outcomes:
            if outcome.cause:
                said = copy.with_suffix(".output").read_text(errors="replace")[-2000:]
                raise SystemExit(f"mutate: {self._limits.check!r} {outcome.cause} without a mistake:\n{said}")

    def _collect(self) -> None:
        """Go on with the trials whose run has ended, or has to."""
        time.sleep(0.02)
        for pid, run in [*self._runs.items()]:
            ended, code = reap(pid, kill=time.monotonic() > run.deadline)
            if ended:
                del self._runs[pid]
                self._advance(run.trial, run.copy, run.key, outcome_of(run.notes, code))

    def _verify(self) -> bool:
        """Run what noticed mutants without any mistake; False once all of it is known to pass.

        Verdicts of a test that fails, crashes or hangs are forgotten. Tests behind a crash wait for the next run.
        """
        noticed = {verdict["by"] for verdict in self.verdicts() if verdict["status"] == "noticed"}
        tests = sorted(noticed - self._state.sound - {""}, key=lambda test: (self._suite.seconds([test]), test))
        if not tests:
            return False
        print(f"mutate: {len(tests)} tests that noticed something run without a mistake", file=sys.stderr)
        pid, notes, deadline = self._start(self._free[0], tests)
        outcome = self._wait(pid, notes, deadline)
        failed = {entry["failed"] for entry in read_notes(notes) if "failed" in entry} | {outcome.by} - {""}
        passed = set(outcome.passed) - failed
        if outcome.cause in ("", "failed") or not failed | passed:
            failed = set(tests) - passed
        self._suite.failing |= failed
        self._state.add(sound=sorted(passed), flaky=sorted(failed))
        return True

    def _print(self, verdict: dict[str, Any]) -> None:
        judged = sum(one["status"] != "skipped" for one in self.verdicts())
        place = f"{verdict['path']}:{verdict['line']}"
        how = f"{verdict['operator']}  {verdict['seconds']} s  {verdict['cause']} {verdict['by']}"
        print(f"[{judged}/{self._limits.count}] {verdict['status']:<10} {place}  {how}", file=sys.stderr, flush=True)
