"""Grading: hidden tests in a fresh box, with the part of the model's patch that cannot steer them.

`check_task` grades the reference patch and no patch, to find out whether a task is sound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.sandbox.protocol import Sandbox
from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.decoys import Decoys, plan_decoys, put_decoys, read_hidden
from penstock.sandbox.swe.report import Grade, summary
from penstock.sandbox.swe.run_tests import Ran, Seal, check_runner, files_of_tests, run_tests
from penstock.sandbox.swe.task import SweLimits, SweTask, SweTaskError, is_protected
from penstock.sandbox.swe.workspace import ScriptFailed, Workspace


async def grade(
    sandbox: Sandbox, task: SweTask, patch: bytes, limits: SweLimits | None = None, label: str = ""
) -> Grade:
    """Whether the task's tests pass on its snapshot with `patch`. Nothing of the model's own box is used.

    A patch that passes is run again, in fresh boxes, with hidden tests that it must not pass (`decoys`).

    Raises:
        SandboxError: the box failed: no verdict, never a 0.
        SweTaskError: the task is broken (hidden tests do not fit, no pytest in the box, …).
    """
    limits = limits or SweLimits()
    started = time.monotonic()
    label = label or f"{task.instance_id} grading"
    first = await _in_box(sandbox, task, patch, limits, label, None)
    found = first.grade
    for plan in plan_decoys(task, found, first.files, limits.decoys):
        again = await _in_box(sandbox, task, patch, limits, label, plan)
        if doubt := plan.doubt(again.grade):
            found = replace(found, reason=doubt)
            break
    return replace(found, duration_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class GradingRun:
    grade: Grade
    files: Mapping[str, bytes]
    """Of hidden tests, as they lay in the box before any of the patch's code ran."""


async def _in_box(  # noqa: PLR0917 - called in two places
    sandbox: Sandbox, task: SweTask, patch: bytes, limits: SweLimits, label: str, plan: Decoys | None
) -> GradingRun:
    """One run of the tests in a fresh box."""
    session = await sandbox.start(label, image=task.sandbox_image)
    try:
        workspace = await Workspace.find(session, task, limits)
        await workspace.place(task)
        if plan is None:
            await check_runner(workspace, task)
        return await _graded(workspace, task, patch, plan)
    finally:
        await session.close()


async def _graded(workspace: Workspace, task: SweTask, patch: bytes, plan: Decoys | None) -> GradingRun:
    hidden = await _hidden_entries(workspace, task)
    try:
        changed = await _entries(workspace, "model.patch", patch)
    except ScriptFailed as error:
        return GradingRun(_nothing(task, f"the patch does not apply: {error}"), {})
    guarded = [*(entry.path for entry in hidden), *files_of_tests(task)]
    dropped = [entry for entry in changed if is_protected(entry.path, guarded, task.protected)]
    kept = [entry for entry in changed if entry not in dropped]
    try:
        await _check_out(workspace, [*kept, *hidden])
    except ScriptFailed as error:  # the snapshot was laid out without it
        return GradingRun(_nothing(task, f"the patch cannot be laid out: {error}"), {})
    files = await put_decoys(workspace, plan) if plan is not None else await read_hidden(workspace, task)
    await workspace.script(scripts.SCRUB)
    ran = await _build_and_run(workspace, task)
    paths = tuple(entry.path for entry in dropped)
    outcomes = summary(task, ran.outcomes)
    found = replace(_nothing(task, ran.doubt), outcomes=outcomes, dropped=paths, output=ran.output, seconds=ran.seconds)
    return GradingRun(found, files)


async def _build_and_run(workspace: Workspace, task: SweTask) -> Ran:
    if task.build_command:
        before = await Seal.of(workspace, task)
        argv = workspace.in_folder(task.build_command, workspace.variables(task))
        built = await workspace.session.run(argv, timeout_s=workspace.limits.command_timeout_s)
        said = built.stdout + built.stderr
        if built.exit_code != 0:
            return Ran({}, "the build failed with this patch", said)
        if not await before.holds(workspace) or not await _mended(workspace, task):
            return Ran({}, "the build changed tests, or what steers them", said)
    return await run_tests(workspace, task)


async def _mended(workspace: Workspace, task: SweTask) -> bool:
    """pytest's own files as they were, whatever the build wrote into them; False where it left no way to do so."""
    try:
        await workspace.put_packages(task)
    except (ScriptFailed, SweTaskError):
        return False
    return True


def _nothing(task: SweTask, reason: str) -> Grade:
    return Grade(task.instance_id, summary(task, {}), task.fail_to_pass, task.pass_to_pass, reason)


# ---- what a patch makes of the snapshot
@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One path of a changed tree; ``000000`` where it is gone."""

    mode: str
    sha: str
    path: str

    def line(self) -> bytes:
        return f"{self.mode} {self.sha}\t{self.path}\0".encode("utf-8", "surrogateescape")


async def _entries(workspace: Workspace, name: str, patch: bytes) -> list[TreeEntry]:
    """Raises `ScriptFailed` where the patch does not fit the snapshot."""
    await workspace.script(scripts.ENTRIES, await workspace.upload(name, patch if patch.strip() else b""))
    fields = (await workspace.read("entries")).decode("utf-8", "surrogateescape").split("\0")[:-1]
    metas = [meta.split(" ") for meta in fields[::2]]  # :mode mode sha sha status
    return [TreeEntry(meta[1], meta[3], path) for meta, path in zip(metas, fields[1::2], strict=True)]


async def _hidden_entries(workspace: Workspace, task: SweTask) -> list[TreeEntry]:
    try:
        return await _entries(workspace, "test.patch", task.test_patch)
    except ScriptFailed as error:
        raise SweTaskError(f"task {task.instance_id}: its test_patch does not fit its snapshot: {error}") from error


async def _check_out(workspace: Workspace, entries: list[TreeEntry]) -> None:
    """Later entries win over earlier ones. Raises `ScriptFailed`."""
    lines = b"".join(entry.line() for entry in entries)
    await workspace.script(scripts.CHECK_OUT, await workspace.upload("final", lines))


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Gradings of one task with the reference patch (oracle) and without a patch (null)."""

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
