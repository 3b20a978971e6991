"""A grading box: the task's tests, run with a patch in a fresh box.

Every box of a grading gets the same calls in the same order, and the same files written last: only what its tests
expect distinguishes it from another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace

from penstock.sandbox.protocol import BoxNeeds, Sandbox
from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.data_files import hidden_data
from penstock.sandbox.swe.decoys import BoxChanges, put_changes, read_hidden
from penstock.sandbox.swe.report import Grade, TestOutcomes, summary
from penstock.sandbox.swe.run_tests import Seal, check_runner, files_of_tests, run_tests
from penstock.sandbox.swe.task import SweLimits, SweTask, SweTaskError, is_protected
from penstock.sandbox.swe.workspace import ScriptFailed, Workspace


@dataclass(frozen=True, slots=True)
class GradingRun:
    """One run of a task's tests in a fresh box."""

    grade: Grade
    ran: TestOutcomes
    """With every test of the files, under the ids that they had in this box."""
    used: float = 0.0
    """Largest share of a time limit that was used; 1 or more where one was reached."""


@dataclass(frozen=True, slots=True)
class GradingBoxes:
    """Fresh boxes of one task, one per call."""

    sandbox: Sandbox
    task: SweTask
    limits: SweLimits
    label: str

    async def read(self) -> Mapping[str, bytes]:
        """Return hidden tests and their data as the task has them, without a patch.

        Raises `SweTaskError` if they do not fit the snapshot, or the box has no pytest.
        """
        async with self._box() as workspace:
            await check_runner(workspace, self.task)
            await _check_out(workspace, await _hidden_entries(workspace, self.task))
            return await read_hidden(workspace, self.task, hidden_data(self.task))

    async def run(self, patch: bytes, changes: BoxChanges) -> GradingRun:
        """Raises `SandboxError`, `SweTaskError`."""
        # what the reference patch reads may stay: then the boxes of other patches need not read it from disk again
        async with self._box(clean_cache=patch != self.task.patch) as workspace:
            if not changes.files:  # `read` did not
                await check_runner(workspace, self.task)
            run = await _graded(workspace, self.task, patch, changes)
            slowest_s = max(run.ran.seconds.values(), default=0.0)
            return replace(run, used=max(workspace.used, slowest_s / self.limits.test_timeout_s))

    def with_limits_times(self, factor: float) -> GradingBoxes:
        names = ("command_timeout_s", "test_timeout_s", "tests_timeout_s")
        longer = {name: getattr(self.limits, name) * factor for name in names}
        return replace(self, limits=self.limits.model_copy(update=longer))

    @contextlib.asynccontextmanager
    async def _box(self, *, clean_cache: bool = False) -> AsyncIterator[Workspace]:
        needs = BoxNeeds(clean_cache=True) if clean_cache else None
        session = await self.sandbox.start(self.label, image=self.task.sandbox_image, needs=needs)
        try:
            workspace = await Workspace.find(session, self.task, self.limits)
            await workspace.place(self.task)
            yield workspace
        finally:
            await session.close()


async def _graded(workspace: Workspace, task: SweTask, patch: bytes, changes: BoxChanges) -> GradingRun:
    hidden = await _hidden_entries(workspace, task)
    try:
        changed = await _model_entries(workspace, patch)
    except ScriptFailed as error:
        return _nothing(task, f"the patch does not apply: {error}")
    guarded = [*(entry.path for entry in hidden), *files_of_tests(task)]
    dropped = [entry for entry in changed if is_protected(entry.path, guarded, task.protected)]
    taken = [entry for entry in changed if entry not in dropped]
    try:
        await _check_out(workspace, [*taken, *hidden])
        await put_changes(workspace, changes)
        await workspace.script(scripts.STAMP + scripts.SCRUB)
    except ScriptFailed as error:  # the snapshot was laid out without it
        return _nothing(task, f"the patch cannot be laid out: {error}")
    ran = await _build_and_run(workspace, task, changes)
    paths = tuple(entry.path for entry in dropped)
    outcomes = summary(task, ran.outcomes)
    nothing = _nothing(task, ran.doubt).grade
    verdict = replace(nothing, outcomes=outcomes, dropped=paths, output=ran.output, seconds=ran.seconds)
    return GradingRun(verdict, ran)


async def _hidden_entries(workspace: Workspace, task: SweTask) -> list[TreeEntry]:
    try:
        return await _entries(workspace, "test.patch", task.test_patch)
    except ScriptFailed as error:
        raise SweTaskError(f"task {task.instance_id}: its test_patch does not fit its snapshot: {error}") from error


async def _model_entries(workspace: Workspace, patch: bytes) -> list[TreeEntry]:
    """A patch that was carried as text may have lost its last line end, or have got others. Raises `ScriptFailed`."""
    try:
        return await _entries(workspace, "model.patch", patch)
    except ScriptFailed:
        plain = patch.replace(b"\r\n", b"\n").rstrip(b"\n") + b"\n"
        if plain == patch:
            raise
        return await _entries(workspace, "model.patch", plain)


async def _build_and_run(workspace: Workspace, task: SweTask, changes: BoxChanges) -> TestOutcomes:
    if task.build_command:
        before = await Seal.of(workspace, task)
        argv = workspace.in_folder(task, task.build_command)
        built = await workspace.run(argv, workspace.limits.command_timeout_s)
        output = built.stdout + built.stderr
        if built.exit_code != 0:
            return TestOutcomes({}, "the build failed with this patch", output)
        try:
            unchanged = await before.holds(workspace)
            await workspace.put_packages(task)  # pytest's own files, whatever the build wrote into them
        except (ScriptFailed, SweTaskError):
            unchanged = False
        if not unchanged:
            return TestOutcomes({}, "the build changed tests, or what steers them", output)
    else:
        output = ""
    # One of these that hangs decides the verdict; none does if tests are expected to fail.
    needed = task.pass_to_pass if workspace.limits.after_a_hang else task.tests
    try:
        return await run_tests(workspace, task, changes, needed)
    except SweTaskError as error:
        if not task.build_command:
            raise
        return TestOutcomes({}, f"after the build with this patch: {error}", output)


def _nothing(task: SweTask, doubt: str) -> GradingRun:
    verdict = Grade(task.instance_id, summary(task, {}), task.fail_to_pass, task.pass_to_pass, doubt)
    return GradingRun(verdict, TestOutcomes({}, doubt, ""))


# ---- what a patch makes of the snapshot
@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One path of a changed tree; ``000000`` if it is gone."""

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
