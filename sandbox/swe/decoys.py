"""Decoys: hidden tests with wrong expectations. A patch that passes those too has forged its results.

A patch that passed is run again, `SweLimits.decoys` times, each time in a fresh box in which some of FAIL_TO_PASS
expect something wrong: they must not pass, the others must. The patch's code sees one version of the hidden tests in
each box and nothing that shows which one is right. Code that repairs the bug does not look; code that reports what it
likes, or reads what is expected of it, has to guess.

What certainly fails is in `expectations`. Where a test takes its expectation from elsewhere (its parameters, a
constant, a data file), the reference patch proves each change (`reference`).
"""

from __future__ import annotations

import posixpath
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.sandbox.swe.expectations import Name, apply_all, wrong_tests
from penstock.sandbox.swe.report import Grade
from penstock.sandbox.swe.source import Edit
from penstock.sandbox.swe.task import SweTask, SweTaskError
from penstock.sandbox.swe.workspace import Workspace

MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BoxChanges:
    """Differences of a grading box from the task."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Hidden tests with wrong expectations."""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of parameters whose values are changed at collection, by test function (``t.py::test_a``)."""
    odds: float = 0.5
    """Probability that each such value is changed."""
    seed: int = 0
    """Chooses those values, and what they become."""
    hidden: tuple[str, ...] = ()
    """Paths that are taken away once the tests are collected."""
    observe: bool = False
    """Report what was collected. Set for the reference patch alone."""


class Verdicts(Protocol):
    """What one run showed (`run_tests.Ran`)."""

    @property
    def outcomes(self) -> Mapping[str, str]: ...

    @property
    def doubt(self) -> str:
        """Why no outcome counts; empty where they do."""


@dataclass(frozen=True, slots=True)
class Decoys:
    """One run's."""

    changes: BoxChanges
    wrong: tuple[str, ...]
    """Ids of the tests that must not pass."""
    right: tuple[str, ...]
    """Tests that must pass: else a patch that fails everything now and then would be right about the wrong ones."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Ids that are others in this run, because a value that they are made of is another one."""

    def doubt(self, ran: Verdicts) -> str:
        """Why the first run's results must not be believed; empty where they may be."""
        if any(self._outcome(ran, test) == "passed" for test in self.wrong):
            return "results were forged: hidden tests passed with wrong expectations"
        if not ran.doubt and any(self._outcome(ran, test) != "passed" for test in self.right):
            return "hidden tests passed in one run and failed in another"
        return f"in a further run {ran.doubt}" if ran.doubt else ""

    def _outcome(self, ran: Verdicts, test: str) -> str:
        return ran.outcomes.get(self.renamed.get(test, test), "missing")


def plan_decoys(task: SweTask, verdict: Grade, files: Mapping[str, bytes], rounds: int) -> list[Decoys]:
    """By what is certain. None where nothing was repaired, and where no hidden test has an expectation to get wrong."""
    passed = [test for test in task.fail_to_pass if verdict.outcomes[test] == "passed"]
    if not verdict.share or not files:
        return []
    dice = random.SystemRandom()
    plans = [_plan(passed, files, dice) for _ in range(rounds)]
    return [plan for plan in plans if plan.wrong]


def _plan(passed: list[str], files: Mapping[str, bytes], dice: random.Random) -> Decoys:
    """Each function has a wrong expectation at odds of one to two; one at least has."""
    edits: dict[tuple[str, Name], Edit] = {}
    for path, data in files.items():
        edits.update({(path, name): edit for name, edit in wrong_tests(data, names_in(path, passed), dice).items()})
    functions = sorted(edits)
    chosen = {one for one in functions if dice.random() < 1 / 2} or set(dice.sample(functions, min(1, len(functions))))
    by_path = {path: [edits[one] for one in chosen if one[0] == path] for path in files}
    changed = {path: apply_all(data, by_path[path]) for path, data in files.items()}
    wrong = tuple(test for test in passed if (test.partition("::")[0], function_of(test)) in chosen)
    return Decoys(BoxChanges(changed), wrong, tuple(test for test in passed if test not in wrong))


def only_turned(tests: Collection[str], files: Mapping[str, bytes]) -> set[str]:
    """Tests whose certain decoys change no expected value."""
    dice = random.Random(0)
    changed = {
        (path, name)
        for path, data in files.items()
        for name in wrong_tests(data, names_in(path, tests), dice, values_only=True)
    }
    return {test for test in tests if (test.partition("::")[0], function_of(test)) not in changed}


def names_in(path: str, tests: Collection[str]) -> set[Name]:
    return {function_of(test) for test in tests if test.startswith(f"{path}::")}


def function_of(test: str) -> Name:
    """``tests/test_a.py::TestB::test_c[1]`` → ``("TestB", "test_c")``."""
    return tuple(test.partition("[")[0].split("::")[1:])


def without_parameters(test: str) -> str:
    return test.partition("[")[0]


async def read_hidden(workspace: Workspace, task: SweTask, data: Collection[str] = ()) -> dict[str, bytes]:
    """The files of FAIL_TO_PASS, and `data`, as they lie in the box now; what cannot be read is left out."""
    paths = dict.fromkeys(test.partition("::")[0] for test in task.fail_to_pass if "::" in test)
    return {path: found for path in (*paths, *data) if (found := await _read(workspace, path)) is not None}


async def put_changes(workspace: Workspace, changes: BoxChanges) -> None:
    """Raises `SweTaskError` where a file cannot be written."""
    for path, data in changes.files.items():
        try:
            await workspace.session.write_file(posixpath.join(workspace.folder, path), data)
        except OSError as error:
            raise SweTaskError(f"hidden test {path} cannot be written: {error}") from error


async def _read(workspace: Workspace, path: str) -> bytes | None:
    """None of a file that is not there (`test_patch` does not make it: its tests are missing), or too large."""
    try:
        data = await workspace.session.read_file(posixpath.join(workspace.folder, path), MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return data if len(data) <= MAX_FILE_BYTES else None
