"""Hidden tests put in, in a fresh box, with as much of the model's patch as may not steer them."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.sandbox.protocol import Sandbox
from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.errors import SweTaskError
from penstock.sandbox.swe.limits import SweLimits
from penstock.sandbox.swe.report import Grade, summary
from penstock.sandbox.swe.run_tests import Ran, check_runner, files_of_tests, run_tests
from penstock.sandbox.swe.task import SweTask
from penstock.sandbox.swe.workspace import ScriptFailed, Workspace


async def grade(
    sandbox: Sandbox, task: SweTask, patch: bytes, limits: SweLimits | None = None, label: str = ""
) -> Grade:
    """Whether the task's tests pass on its snapshot with `patch`. Nothing of the model's own box is used.

    Raises:
        SandboxError: the box failed: no verdict, never a 0.
        SweTaskError: the task is broken (hidden tests do not fit, no pytest in the box, …).
    """
    limits = limits or SweLimits()
    started = time.monotonic()
    session = await sandbox.start(label or f"{task.instance_id} grading", image=task.sandbox_image)
    try:
        workspace = await Workspace.find(session, task, limits)
        await workspace.place(task)
        await check_runner(workspace, task)
        found = await _graded(workspace, task, patch)
    finally:
        await session.close()
    return replace(found, duration_s=time.monotonic() - started)


async def _graded(workspace: Workspace, task: SweTask, patch: bytes) -> Grade:
    hidden = await _hidden_entries(workspace, task)
    try:
        changed = await _entries(workspace, "model.patch", patch)
    except ScriptFailed as error:
        return _nothing(task, f"the patch does not apply: {error}")
    guarded = [*(entry.path for entry in hidden), *files_of_tests(task)]
    dropped = [entry for entry in changed if is_protected(entry.path, guarded, task.protected)]
    kept = [entry for entry in changed if entry not in dropped]
    try:
        await _check_out(workspace, [*kept, *hidden])
    except ScriptFailed as error:  # the snapshot was laid out without it
        return _nothing(task, f"the patch cannot be laid out: {error}")
    ran = await _build_and_run(workspace, task)
    paths = tuple(entry.path for entry in dropped)
    outcomes = summary(task, ran.outcomes)
    return replace(_nothing(task, ran.doubt), outcomes=outcomes, dropped=paths, output=ran.output, seconds=ran.seconds)


async def _build_and_run(workspace: Workspace, task: SweTask) -> Ran:
    if task.build_command:
        argv = workspace.in_folder(task.build_command, workspace.variables(task))
        built = await workspace.session.run(argv, timeout_s=workspace.limits.command_timeout_s)
        if built.exit_code != 0:
            return Ran({}, "the build failed with this patch", built.stdout + built.stderr)
    return await run_tests(workspace, task)


def _nothing(task: SweTask, reason: str) -> Grade:
    return Grade(task.instance_id, summary(task, {}), task.fail_to_pass, task.pass_to_pass, reason)


# ---- what a patch makes of the snapshot


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a changed tree; ``000000`` where it is gone."""

    mode: str
    sha: str
    path: str

    def line(self) -> bytes:
        return f"{self.mode} {self.sha}\t{self.path}\0".encode("utf-8", "surrogateescape")


async def _entries(workspace: Workspace, name: str, patch: bytes) -> list[Entry]:
    """Raises `ScriptFailed` where the patch does not fit the snapshot."""
    await workspace.script(scripts.ENTRIES, await workspace.upload(name, patch if patch.strip() else b""))
    fields = (await workspace.read("entries")).decode("utf-8", "surrogateescape").split("\0")[:-1]
    metas = [meta.split(" ") for meta in fields[::2]]  # :mode mode sha sha status
    return [Entry(meta[1], meta[3], path) for meta, path in zip(metas, fields[1::2], strict=True)]


async def _hidden_entries(workspace: Workspace, task: SweTask) -> list[Entry]:
    try:
        return await _entries(workspace, "test.patch", task.test_patch)
    except ScriptFailed as error:
        raise SweTaskError(f"task {task.instance_id}: its test_patch does not fit its snapshot: {error}") from error


async def _check_out(workspace: Workspace, entries: list[Entry]) -> None:
    """Later entries win over earlier ones. Raises `ScriptFailed`."""
    lines = b"".join(entry.line() for entry in entries)
    await workspace.script(scripts.CHECK_OUT, await workspace.upload("final", lines))


def is_protected(path: str, guarded: Iterable[str], patterns: Iterable[str]) -> bool:
    """A hidden test, a file or link in its way, or what a pattern names (`task.PROTECTED`)."""
    if any(path == one or path.startswith(f"{one}/") or one.startswith(f"{path}/") for one in guarded):
        return True
    parts = path.split("/")
    return any(
        fnmatch.fnmatchcase(parts[0], pattern[1:])
        if pattern.startswith("/")
        else any(fnmatch.fnmatchcase(part, pattern) for part in parts)
        for pattern in patterns
    )
