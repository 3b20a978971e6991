"""The result of a grading, and the reader of a test run's signed lines."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.sandbox.swe.task import SweTask

MAX_NAMED = 5
"""Tests that a reason names."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on a patch for one task."""

    instance_id: str
    outcomes: Mapping[str, str]
    """Outcome of every test of the task: ``passed``, ``failed``, ``skipped``, or ``missing`` if it has no result."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    doubt: str = ""
    """Why nothing counts, where nothing counts: the patch does not apply, the run did not end, results were forged."""
    dropped: tuple[str, ...] = ()
    """Paths of the patch that grading did not take: hidden tests and what steers them."""
    output: str = ""
    """The end of what the run wrote; nothing in it counts."""
    duration_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Durations of the tests that ended."""

    @property
    def resolved(self) -> bool:
        """SWE-bench's word: every test of the task passed."""
        return not self.doubt and not self._others()

    @property
    def reason(self) -> str:
        """Why the task is not resolved: `doubt`, or the tests that did not pass; empty if it is resolved."""
        others = self._others()
        if self.doubt or not others:
            return self.doubt
        named = ", ".join(f"{test} {self.outcomes.get(test, 'missing')}" for test in others[:MAX_NAMED])
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        return f"{len(others)} of {len(self._tests)} tests did not pass: {named}{more}"

    @property
    def _tests(self) -> tuple[str, ...]:
        return (*self.fail_to_pass, *self.pass_to_pass)

    def _others(self) -> list[str]:
        return [test for test in self._tests if self.outcomes.get(test) != "passed"]

    @property
    def share(self) -> float:
        """Share of the failing tests that were repaired; 0 where another one broke."""
        unbroken = all(self.outcomes.get(test) == "passed" for test in self.pass_to_pass)
        repaired = sum(self.outcomes.get(test) == "passed" for test in self.fail_to_pass)
        return repaired / len(self.fail_to_pass) if unbroken and not self.doubt else 0.0

    def report(self) -> dict[str, Any]:
        """Return the report in the shape of SWE-bench's ``report.json``."""
        groups = {"FAIL_TO_PASS": self.fail_to_pass, "PASS_TO_PASS": self.pass_to_pass}
        applied = not self.doubt.startswith("the patch")
        return {
            "patch_successfully_applied": applied,
            "resolved": self.resolved,
            "tests_status": {name: self._split(tests) for name, tests in groups.items()},
        }

    def _split(self, tests: tuple[str, ...]) -> dict[str, list[str]]:
        passed = {test for test in tests if not self.doubt and self.outcomes.get(test) == "passed"}
        return {"success": [t for t in tests if t in passed], "failure": [t for t in tests if t not in passed]}


ParameterValues = Sequence[Sequence[Mapping[str, str]]]
"""Values of the compared parameters of a test function as Python literals, by name: of each row of each
``parametrize``. A value that has no literal is left out."""


@dataclass(frozen=True, slots=True)
class TestOutcomes:
    """Outcomes of one run of the tests."""

    outcomes: Mapping[str, str]
    doubt: str
    """The reason why no outcome counts; empty if they do."""
    output: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    collected: tuple[tuple[str, Mapping[str, str]], ...] = ()
    """Each test in order with digests of its parameters, where `BoxChanges.observed` asked for it."""
    parameters: Mapping[str, ParameterValues] = field(default_factory=dict)
    """Values of the parameters that `BoxChanges.observed` names."""


@dataclass(slots=True)
class SignedOutcomes:
    """The signed lines of one run, read."""

    ended: bool = False
    canaries: tuple[str, ...] | None = None
    """None: the run did not come to its tests."""
    stopped: str = ""
    """The test that hung, where the run ended behind it: what it had not come to cannot change the verdict."""
    collected: tuple[tuple[str, Mapping[str, str]], ...] = ()
    """Each test in order with digests of its parameters, if that was asked for."""
    parameters: dict[str, list[list[dict[str, str]]]] = field(default_factory=dict)
    """Values of expected parameters, if they were asked for."""
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def doubt(self) -> str:
        """Why the outcomes must not be believed; empty if they may be."""
        if self.canaries is None:
            return "the run ended before its first test"
        wrong = [test for test in self.canaries if self.outcomes.get(test, "failed") != "failed"]
        if wrong:
            return "results were forged: tests that must fail did not"
        if self.stopped and self.ended and self.outcomes.get(self.stopped) != "passed":
            return ""
        if not self.ended or any(test not in self.outcomes for test in self.canaries):
            return "the run ended before its last test"
        return ""


def read_lines(data: bytes, key: bytes) -> SignedOutcomes:
    """Lines with another signature, or out of their order, are not there. A test reported twice must pass twice."""
    seen = SignedOutcomes()
    for record in _signed(data, key):
        if record["kind"] == "canaries":
            seen.canaries = tuple(record["tests"])
        elif record["kind"] == "end":
            seen.ended = True
        elif record["kind"] == "stopped":
            seen.stopped = record["test"]
        elif record["kind"] == "collected":
            seen.collected = tuple((test, digests) for test, digests in record["tests"])
        elif record["kind"] == "parameters":
            seen.parameters[record["test"]] = record["values"]
        elif record["kind"] == "test":
            earlier = seen.outcomes.get(record["test"], "passed")
            seen.outcomes[record["test"]] = record["outcome"] if earlier == "passed" else earlier
            seen.seconds[record["test"]] = record["seconds"]
    return seen


def _signed(data: bytes, key: bytes) -> Iterator[dict[str, Any]]:
    number = 0
    for line in data.splitlines():
        signature, _, text = line.partition(b" ")
        if hmac.compare_digest(signature, hmac.new(key, text, hashlib.sha256).hexdigest().encode("ascii")):
            record = json.loads(text)
            if record["number"] == number:
                number += 1
                yield record


def summary(task: SweTask, outcomes: Mapping[str, str]) -> dict[str, str]:
    """The task's tests alone."""
    return {test: outcomes.get(test, "missing") for test in task.tests}
