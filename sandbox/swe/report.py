"""What a grading found, and how the signed lines of a test run are read."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.sandbox.swe.task import SweTask


@dataclass(frozen=True, slots=True)
class Grade:
    """Whether a patch repairs its task."""

    instance_id: str
    outcomes: Mapping[str, str]
    """Of every test of the task: ``passed``, ``failed``, ``skipped``, or ``missing`` where it has no result."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    reason: str = ""
    """Why nothing counts, where nothing counts: the patch does not apply, the run did not end, results were forged."""
    dropped: tuple[str, ...] = ()
    """Paths of the patch that grading did not take: hidden tests and what steers them."""
    output: str = ""
    """The end of what the run wrote; nothing in it counts."""
    duration_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of the tests that ended."""

    @property
    def resolved(self) -> bool:
        """SWE-bench's word: every test of the task passed."""
        tests = (*self.fail_to_pass, *self.pass_to_pass)
        return not self.reason and all(self.outcomes.get(test) == "passed" for test in tests)

    @property
    def share(self) -> float:
        """Share of the failing tests that were repaired; 0 where another one broke."""
        kept = all(self.outcomes.get(test) == "passed" for test in self.pass_to_pass)
        repaired = sum(self.outcomes.get(test) == "passed" for test in self.fail_to_pass)
        return repaired / len(self.fail_to_pass) if kept and not self.reason else 0.0

    def report(self) -> dict[str, Any]:
        """In the shape of SWE-bench's ``report.json``."""
        groups = {"FAIL_TO_PASS": self.fail_to_pass, "PASS_TO_PASS": self.pass_to_pass}
        applied = not self.reason.startswith("the patch")
        return {
            "patch_successfully_applied": applied,
            "resolved": self.resolved,
            "tests_status": {name: self._split(tests) for name, tests in groups.items()},
        }

    def _split(self, tests: tuple[str, ...]) -> dict[str, list[str]]:
        passed = {test for test in tests if not self.reason and self.outcomes.get(test) == "passed"}
        return {"success": [t for t in tests if t in passed], "failure": [t for t in tests if t not in passed]}


@dataclass(slots=True)
class Witnessed:
    """The signed lines of one run, read."""

    ended: bool = False
    canaries: tuple[str, ...] | None = None
    """None: the run did not come to its tests."""
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def doubt(self) -> str:
        """Why the outcomes must not be believed; empty where they may be."""
        if self.canaries is None:
            return "the run ended before its first test"
        wrong = [test for test in self.canaries if self.outcomes.get(test, "failed") != "failed"]
        if wrong:
            return "results were forged: tests that must fail did not"
        if not self.ended or any(test not in self.outcomes for test in self.canaries):
            return "the run ended before its last test"
        return ""


def read_lines(data: bytes, key: bytes) -> Witnessed:
    """Lines with another signature, or out of their order, are not there. A test reported twice must pass twice."""
    seen = Witnessed()
    for record in _signed(data, key):
        if record["kind"] == "canaries":
            seen.canaries = tuple(record["tests"])
        elif record["kind"] == "end":
            seen.ended = True
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
