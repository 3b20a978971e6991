"""Grading: hidden tests in fresh boxes, with the part of the model's patch that cannot steer them.

`check_task` grades the reference patch and no patch, to find out whether a task is sound.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.sandbox.protocol import Sandbox
from penstock.sandbox.swe.decoys import BoxChanges, Round, only_turned
from penstock.sandbox.swe.grading_box import GradingBoxes, GradingRun
from penstock.sandbox.swe.reference import reference_of
from penstock.sandbox.swe.report import Grade
from penstock.sandbox.swe.run_tests import files_of_tests
from penstock.sandbox.swe.task import SweLimits, SweTask


async def grade(
    sandbox: Sandbox, task: SweTask, patch: bytes | str, limits: SweLimits | None = None, label: str = ""
) -> Grade:
    """Grade the task's tests on its snapshot with `patch`. Nothing of the model's own box is used.

    The patch runs in several fresh boxes, in some with hidden tests that it must not pass (`decoys`).

    Raises:
        SandboxError: the box failed: no verdict, never a 0.
        SweTaskError: the task is broken (hidden tests do not fit, no pytest in the box, …).
    """
    started = time.monotonic()
    limits = limits or SweLimits()
    patch = patch.encode("utf-8", "surrogateescape") if isinstance(patch, str) else patch
    boxes = GradingBoxes(sandbox, task, limits, label or f"{task.instance_id} grading")
    rounds = [Round.true(task, BoxChanges())]
    if limits.decoys and files_of_tests(task):
        rounds = await reference_of(task).rounds(boxes, limits.decoys)
    verdict = await _verdict(boxes, patch, rounds)
    return replace(verdict, duration_s=time.monotonic() - started)


async def _verdict(boxes: GradingBoxes, patch: bytes, rounds: Sequence[Round]) -> Grade:
    """The true round's grade, where no other round gives reason to doubt it. The order of rounds is random."""
    waiting = random.SystemRandom().sample(rounds, len(rounds))
    ended: list[tuple[Round, GradingRun]] = []
    verdict: Grade | None = None
    patient = boxes
    doubt = ""
    while waiting and not doubt and (verdict is None or verdict.share):
        one = waiting.pop()
        run = await patient.run(patch, one.changes)
        if run.used >= 1 and all(earlier.used < 1 for _, earlier in ended):  # reached in this box alone
            patient = await reference_of(boxes.task).on_this_machine(boxes)
            run = await patient.run(patch, one.changes)
        ended.append((one, run))
        if one.is_true:
            verdict = run.grade
        elif not one.is_as_planned(run.ran):  # a patch that does not pass costs no further round
            waiting.sort(key=lambda other: other.is_true)
        if verdict is not None and verdict.share:
            doubt = next((why for earlier, run in ended if (why := earlier.doubt(run.ran, verdict.outcomes))), "")
    assert verdict is not None, "one round is the true one"
    return replace(verdict, doubt=doubt or verdict.doubt)


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Gradings of one task with the reference patch (oracle) and without a patch (null)."""

    task: SweTask
    oracle: tuple[Grade, ...]
    null: tuple[Grade, ...]
    open_to_cheats: tuple[str, ...] = field(default=())
    """Tests of FAIL_TO_PASS whose decoys change no expected value: they have none, or only inverted comparisons. Code
    that reads the expected value from its caller passes these."""

    @property
    def flaky(self) -> tuple[str, ...]:
        """Tests that did not always end alike."""
        return tuple(test for test in self.task.tests if _varies(self.oracle, test) or _varies(self.null, test))

    @property
    def problems(self) -> tuple[str, ...]:
        """The reason why it is not sound; empty if it is."""
        failed = [one for one in self.oracle if not one.resolved]
        reasons = [f"the reference patch does not pass: {_failures(one)}" for one in failed[:1]]
        if any(one.share > 0 for one in self.null):
            reasons.append("without a patch some of FAIL_TO_PASS passes")
        if doubt := next((one.doubt for one in self.null if one.doubt), ""):
            reasons.append(f"without a patch the tests do not run: {doubt}")
        broken = [test for test in self.task.pass_to_pass if any(one.outcomes[test] != "passed" for one in self.null)]
        if broken:
            reasons.append(f"without a patch these of PASS_TO_PASS fail: {', '.join(broken)}")
        if self.flaky:
            reasons.append(f"flaky: {', '.join(self.flaky)}")
        return tuple(reasons)


async def check_task(sandbox: Sandbox, task: SweTask, limits: SweLimits | None = None, times: int = 1) -> TaskCheck:
    """Grade the reference patch and no patch, `times` each. Raises what `grade` raises."""
    limits = (limits or SweLimits()).model_copy(update={"after_a_hang": True})
    oracle = [await grade(sandbox, task, task.patch, limits) for _ in range(times)]
    null = [await grade(sandbox, task, b"", limits.model_copy(update={"decoys": 0})) for _ in range(times)]
    reference = reference_of(task)
    turned = only_turned(task.fail_to_pass, reference.sources) - reference.reached
    open_to_cheats = tuple(test for test in task.fail_to_pass if test in turned)
    return TaskCheck(task, tuple(oracle), tuple(null), open_to_cheats)


def _varies(grades: Sequence[Grade], test: str) -> bool:
    return len({one.outcomes[test] for one in grades}) > 1


def _failures(one: Grade) -> str:
    failed = [f"{test} {outcome}" for test, outcome in one.outcomes.items() if outcome != "passed"]
    return one.doubt or ", ".join(failed)
