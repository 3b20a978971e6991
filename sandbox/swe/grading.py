"""Grading: hidden tests in a fresh box, with the part of the model's patch that cannot steer them.

`check_task` grades the reference patch and no patch, to find out whether a task is sound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.sandbox.protocol import Sandbox
from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.decoys import (
    BoxChanges,
    Decoys,
    names_in,
    only_turned,
    plan_decoys,
    put_changes,
    read_hidden,
)
from penstock.sandbox.swe.reference import Reference, Run, is_open, reference_of
from penstock.sandbox.swe.report import Grade, summary
from penstock.sandbox.swe.run_tests import GradingRun, Ran, Seal, check_runner, files_of_tests, run_tests
from penstock.sandbox.swe.task import SweLimits, SweTask, SweTaskError, is_protected
from penstock.sandbox.swe.workspace import ScriptFailed, Workspace


async def grade(
    sandbox: Sandbox, task: SweTask, patch: bytes | str, limits: SweLimits | None = None, label: str = ""
) -> Grade:
    """Whether the task's tests pass on its snapshot with `patch`. Nothing of the model's own box is used.

    A patch that passes is run again, in fresh boxes, with hidden tests that it must not pass (`decoys`).

    Raises:
        SandboxError: the box failed: no verdict, never a 0.
        SweTaskError: the task is broken (hidden tests do not fit, no pytest in the box, …).
    """
    return (await _grade(sandbox, task, patch, limits or SweLimits(), label)).grade


async def _grade(sandbox: Sandbox, task: SweTask, patch: bytes | str, limits: SweLimits, label: str) -> GradingRun:
    """The verdict, with what the first run showed."""
    started = time.monotonic()
    label = label or f"{task.instance_id} grading"
    patch = patch.encode("utf-8", "surrogateescape") if isinstance(patch, str) else patch

    async def run(candidate: bytes, changes: BoxChanges) -> GradingRun:
        return await _in_box(sandbox, task, candidate, limits, label, changes)

    reference = reference_of(task) if task.patch.strip() and limits.decoys and files_of_tests(task) else None
    if reference is not None and reference.data:
        await reference.learn(run)
    first = await run(patch, BoxChanges(hidden=reference.hidden if reference is not None else ()))
    verdict = first.grade
    for plan in await _plans(task, first, limits.decoys, reference, run):
        again = await run(patch, plan.changes)
        if doubt := plan.doubt(again.ran):
            verdict = replace(verdict, doubt=doubt)
            break
    return replace(first, grade=replace(verdict, duration_s=time.monotonic() - started))


async def _plans(
    task: SweTask, first: GradingRun, rounds: int, reference: Reference | None, run: Run
) -> Sequence[Decoys]:
    """Proven ones where tests take expectations from elsewhere than their own text; else what is certain."""
    if not first.grade.share:
        return []
    proven: Sequence[Decoys] = ()
    turned = only_turned(task.fail_to_pass, first.files)
    open_tests = any(is_open(data, names_in(path, turned)) for path, data in first.files.items())
    if reference is not None and (reference.data or open_tests):
        proven = await reference.plans(run, rounds)
    return proven or plan_decoys(task, first.grade, first.files, rounds)


async def _in_box(  # noqa: PLR0917 - called in one place
    sandbox: Sandbox, task: SweTask, patch: bytes, limits: SweLimits, label: str, changes: BoxChanges
) -> GradingRun:
    """One run of the tests in a fresh box."""
    session = await sandbox.start(label, image=task.sandbox_image)
    try:
        workspace = await Workspace.find(session, task, limits)
        await workspace.place(task)
        if not changes.files:
            await check_runner(workspace, task)
        return await _graded(workspace, task, patch, changes)
    finally:
        await session.close()


async def _graded(workspace: Workspace, task: SweTask, patch: bytes, changes: BoxChanges) -> GradingRun:
    try:
        hidden = await _entries(workspace, "test.patch", task.test_patch)
    except ScriptFailed as error:
        raise SweTaskError(f"task {task.instance_id}: its test_patch does not fit its snapshot: {error}") from error
    try:
        changed = await _model_entries(workspace, patch)
    except ScriptFailed as error:
        return _nothing(task, f"the patch does not apply: {error}")
    guarded = [*(entry.path for entry in hidden), *files_of_tests(task)]
    dropped = [entry for entry in changed if is_protected(entry.path, guarded, task.protected)]
    taken = [entry for entry in changed if entry not in dropped]
    try:
        await _check_out(workspace, [*taken, *hidden])
    except ScriptFailed as error:  # the snapshot was laid out without it
        return _nothing(task, f"the patch cannot be laid out: {error}")
    files = await read_hidden(workspace, task, reference_of(task).data)
    await put_changes(workspace, changes)
    await workspace.script(scripts.SCRUB)
    ran = await _build_and_run(workspace, task, changes)
    paths = tuple(entry.path for entry in dropped)
    outcomes = summary(task, ran.outcomes)
    nothing = _nothing(task, ran.doubt).grade
    verdict = replace(nothing, outcomes=outcomes, dropped=paths, output=ran.output, seconds=ran.seconds)
    return GradingRun(verdict, ran, files)


async def _model_entries(workspace: Workspace, patch: bytes) -> list[TreeEntry]:
    """A patch that was carried as text may have lost its last line end, or have got others. Raises `ScriptFailed`."""
    try:
        return await _entries(workspace, "model.patch", patch)
    except ScriptFailed:
        plain = patch.replace(b"\r\n", b"\n").rstrip(b"\n") + b"\n"
        if plain == patch:
            raise
        return await _entries(workspace, "model.patch", plain)


async def _build_and_run(workspace: Workspace, task: SweTask, changes: BoxChanges) -> Ran:
    if task.build_command:
        before = await Seal.of(workspace, task)
        argv = workspace.in_folder(task.build_command, workspace.variables(task))
        built = await workspace.session.run(argv, timeout_s=workspace.limits.command_timeout_s)
        output = built.stdout + built.stderr
        if built.exit_code != 0:
            return Ran({}, "the build failed with this patch", output)
        try:
            unchanged = await before.holds(workspace)
            await workspace.put_packages(task)  # pytest's own files, whatever the build wrote into them
        except (ScriptFailed, SweTaskError):
            unchanged = False
        if not unchanged:
            return Ran({}, "the build changed tests, or what steers them", output)
    # One of these that hangs decides the verdict; none does if tests are expected to fail.
    needed = task.pass_to_pass if workspace.limits.after_a_hang else task.tests
    return await run_tests(workspace, task, changes, () if changes.files or changes.parameters else needed)


def _nothing(task: SweTask, doubt: str) -> GradingRun:
    verdict = Grade(task.instance_id, summary(task, {}), task.fail_to_pass, task.pass_to_pass, doubt)
    return GradingRun(verdict, Ran({}, doubt, ""), {})


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
    open_to_cheats: tuple[str, ...] = field(default=())
    """Of FAIL_TO_PASS, tests whose decoys change no expected value: they compare the other way round, or have none.
    Code that reads what its caller expects passes these."""

    @property
    def flaky(self) -> tuple[str, ...]:
        """Tests that did not always end alike."""
        return tuple(test for test in self.task.tests if _varies(self.oracle, test) or _varies(self.null, test))

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is not sound; empty where it is."""
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
    oracle = [await _grade(sandbox, task, task.patch, limits, "") for _ in range(times)]
    null = [await grade(sandbox, task, b"", limits) for _ in range(times)]
    reference = reference_of(task)
    sources = {path: data for path, data in oracle[0].files.items() if path not in reference.data}
    turned = only_turned(task.fail_to_pass, sources) - reference.reached
    open_to_cheats = tuple(test for test in task.fail_to_pass if test in turned)
    return TaskCheck(task, tuple(one.grade for one in oracle), tuple(null), open_to_cheats)


def _varies(grades: Sequence[Grade], test: str) -> bool:
    return len({one.outcomes[test] for one in grades}) > 1


def _failures(one: Grade) -> str:
    failed = [f"{test} {outcome}" for test, outcome in one.outcomes.items() if outcome != "passed"]
    return one.doubt or ", ".join(failed)
