"""Decoys: hidden tests with wrong expectations. A patch that passes those too has forged its results.

A grading has one true round and `SweLimits.decoys` others, in random order, each in a fresh box. In the others some of
FAIL_TO_PASS expect something wrong: they must not pass, the rest must. The patch's code sees one version of the hidden
tests in each box and nothing that shows which one is right. Code that repairs the bug does not look; code that reports
what it likes, or reads what is expected of it, has to guess.

What certainly fails is in `expectations`. Where a test takes its expectation from elsewhere (its parameters, a
constant, a data file), the reference patch proves each change (`reference`).
"""

from __future__ import annotations

import hashlib
import posixpath
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from penstock.sandbox.swe.expectations import Name, apply_all, wrong_tests
from penstock.sandbox.swe.report import ParameterValues, TestOutcomes
from penstock.sandbox.swe.source import Edit
from penstock.sandbox.swe.task import SweTask, SweTaskError
from penstock.sandbox.swe.workspace import Workspace

MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BoxChanges:
    """The expectations of the tests of a grading box. A box shows nothing else, so that no box differs from another
    one.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Hidden tests and their data, all of them in each box: written last, whether or not they differ."""
    parameters: Mapping[str, ParameterValues] = field(default_factory=dict)
    """Values that a file computes, by test function (``t.py::test_a``); put in at collection."""
    hidden: tuple[str, ...] = ()
    """Paths that are taken away once the tests are collected."""
    observed: Mapping[str, tuple[str, ...]] | None = None
    """Parameters whose values are reported, with what was collected. Set for the reference patch alone."""


@dataclass(frozen=True, slots=True)
class Round:
    """One box of a grading, and how tests must end there if the patch is honest and right."""

    changes: BoxChanges
    wrong: tuple[str, ...]
    """Ids of the tests that must not pass."""
    right: tuple[str, ...]
    """Tests that must pass: else a patch that fails everything now and then would be right about the wrong ones."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Ids that are others in this run, because a value that they are made of is another one."""
    is_true: bool = False
    """True if its expectations are the task's own."""

    @classmethod
    def true(cls, task: SweTask, changes: BoxChanges) -> Round:
        return cls(changes, (), task.tests, is_true=True)

    def is_as_planned(self, ran: TestOutcomes) -> bool:
        passed = {test for test in (*self.wrong, *self.right) if self._outcome(ran, test) == "passed"}
        return not ran.doubt and passed == set(self.right)

    def doubt(self, ran: TestOutcomes, outcomes: Mapping[str, str]) -> str:
        """Why the true round's `outcomes` must not be believed after this round; empty if they may be."""
        if self.is_true:
            return ""
        if any(outcomes[test] == "passed" == self._outcome(ran, test) for test in self.wrong):
            return "results were forged: hidden tests passed with wrong expectations"
        failed = any(outcomes[test] == "passed" != self._outcome(ran, test) for test in self.right)
        if failed and not ran.doubt:
            return "hidden tests passed in one run and failed in another"
        return f"in a further run {ran.doubt}" if ran.doubt else ""

    def _outcome(self, ran: TestOutcomes, test: str) -> str:
        return ran.outcomes.get(self.renamed.get(test, test), "missing")


def certain_rounds(task: SweTask, files: Mapping[str, bytes], count: int) -> list[Round]:
    """Return rounds with certain verdicts; none if no hidden test has an expectation to get wrong.

    Wrong versions are the same in each grading of a task, in every process, and each is seen as often as the right one:
    code that carries from box to box, or from grading to grading, what it saw learns nothing of which one is right.
    A single test function has `count` wrong versions, where its literals allow, one in each round: no rule tells all
    of them from the right one but by chance. Others have one, in a number of rounds that is uniform from 1 to `count`.
    """
    dice = random.SystemRandom()
    fixed = fixed_dice(task)
    # Four wrong versions of each test are drawn per round, to find as many different ones as there are rounds.
    drawn = [_wrong_versions(task, files, fixed) for _ in range(4 * count)]
    chosen: list[dict[tuple[str, Name], Edit]] = [{} for _ in range(count)]
    for one in drawn[0]:
        versions = list(dict.fromkeys(some[one] for some in drawn))[:count]
        if len(drawn[0]) > 1 or len(versions) < count:
            versions = versions[:1] * dice.randint(1, count)
        for place, version in zip(dice.sample(range(count), len(versions)), versions, strict=True):
            chosen[place][one] = version
    return [_round(task, files, edits) for edits in chosen] if drawn[0] else []


def fixed_dice(task: SweTask) -> random.Random:
    """Return a generator with the same numbers for a task in every process. The reference patch is its secret: code in
    a grading box does not have it. A row without one has no secret, and docs/guide/swe.md states the odds."""
    return random.Random(hashlib.sha256(b"\0".join((task.instance_id.encode(), task.test_patch, task.patch))).digest())


def _wrong_versions(task: SweTask, files: Mapping[str, bytes], dice: random.Random) -> dict[tuple[str, Name], Edit]:
    return {
        (path, name): edit
        for path, data in files.items()
        for name, edit in wrong_tests(data, names_in(path, task.fail_to_pass), dice).items()
    }


def _round(task: SweTask, files: Mapping[str, bytes], edits: Mapping[tuple[str, Name], Edit]) -> Round:
    changed = {
        path: apply_all(data, [edit for (of, _), edit in edits.items() if of == path]) for path, data in files.items()
    }
    wrong = tuple(test for test in task.fail_to_pass if (test.partition("::")[0], function_of(test)) in edits)
    return Round(BoxChanges(changed), wrong, tuple(test for test in task.fail_to_pass if test not in wrong))


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
    return {path: data_read for path in (*paths, *data) if (data_read := await _read(workspace, path)) is not None}


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
