"""Whether a task is sound: its reference patch passes, no patch fails, each time alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.sandbox.protocol import Sandbox
from penstock.sandbox.swe.grading import grade
from penstock.sandbox.swe.limits import SweLimits
from penstock.sandbox.swe.report import Grade
from penstock.sandbox.swe.task import SweTask


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Gradings of one task by an oracle (the reference patch) and by nobody (no patch)."""

    task: SweTask
    oracle: tuple[Grade, ...]
    null: tuple[Grade, ...]

    @property
    def flaky(self) -> tuple[str, ...]:
        """Tests that did not always end alike."""
        return tuple(test for test in self.task.tests if _varies(self.oracle, test) or _varies(self.null, test))

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is not sound; empty where it is."""
        found = [f"the reference patch does not pass: {_failures(one)}" for one in self.oracle if not one.resolved][:1]
        if any(one.share > 0 for one in self.null):
            found.append("without a patch some of FAIL_TO_PASS passes")
        if any(one.reason for one in self.null):
            found.append(f"without a patch the tests do not run: {self.null[0].reason}")
        broken = [test for test in self.task.pass_to_pass if any(one.outcomes[test] != "passed" for one in self.null)]
        if broken:
            found.append(f"without a patch these of PASS_TO_PASS fail: {', '.join(broken)}")
        if self.flaky:
            found.append(f"flaky: {', '.join(self.flaky)}")
        return tuple(found)


async def check_task(sandbox: Sandbox, task: SweTask, limits: SweLimits | None = None, times: int = 1) -> TaskCheck:
    """Grade the reference patch and no patch, `times` each. Raises what `grade` raises."""
    oracle = [await grade(sandbox, task, task.patch, limits) for _ in range(times)]
    null = [await grade(sandbox, task, b"", limits) for _ in range(times)]
    return TaskCheck(task, tuple(oracle), tuple(null))


def _varies(grades: Sequence[Grade], test: str) -> bool:
    return len({one.outcomes[test] for one in grades}) > 1


def _failures(one: Grade) -> str:
    failed = [f"{test} {outcome}" for test, outcome in one.outcomes.items() if outcome != "passed"]
    return one.reason or ", ".join(failed)
