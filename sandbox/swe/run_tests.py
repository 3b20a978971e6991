"""The tests of a task, run in its grading box: pytest with signed results, or a command per test.

A build runs the patch's code where the hidden tests already lie; `Seal` detects what it must not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.decoys import BoxChanges
from penstock.sandbox.swe.report import SignedOutcomes, TestOutcomes, read_lines
from penstock.sandbox.swe.task import PytestCommand, SweTask, SweTaskError, is_protected
from penstock.sandbox.swe.workspace import ScriptFailed, Workspace

OUTPUT_CHARS = 4000


def files_of_tests(task: SweTask) -> list[str]:
    """The files that the task's tests lie in, where its command is pytest."""
    if PytestCommand.parse(task.test_command) is None:
        return []
    return list(dict.fromkeys(test.partition("::")[0] for test in task.tests))


async def check_runner(workspace: Workspace, task: SweTask) -> None:
    """Asked before any of the patch is in the box: what fails later is the patch's doing. Raises `SweTaskError`."""
    command = PytestCommand.parse(task.test_command)
    if command is None:
        return
    argv = workspace.in_folder(task, f"{shlex.quote(command.python)} -c 'import pytest'")
    result = await workspace.run(argv, workspace.limits.command_timeout_s)
    if result.exit_code != 0:
        last_words = (result.stderr or result.stdout)[-500:]
        raise SweTaskError(
            f"task {task.instance_id}: no pytest in its box (a row's packages may hold it): {last_words}"
        )


async def run_tests(workspace: Workspace, task: SweTask, changes: BoxChanges, needed: Sequence[str]) -> TestOutcomes:
    """Returns the outcome of each test. `needed`: a test among these that hangs ends the run. Raises `SandboxError`."""
    command = PytestCommand.parse(task.test_command)
    if command is None:
        return await _run_each(workspace, task)
    key, results = secrets.token_bytes(32), f"results.{secrets.token_hex(8)}"
    job = {
        "key": key.hex(),
        "results": f"{workspace.state}/{results}",
        "paths": ["", *command.paths],
        "arguments": command.arguments,
        "files": files_of_tests(task),
        "test_timeout_s": workspace.limits.test_timeout_s,
        "needed": list(needed),
        "hidden": list(changes.hidden),
        "observed": changes.observed,
        "parameters": dict(changes.parameters),
    }
    program = (Path(__file__).parent / "in_box" / "run_pytest.py").read_bytes()
    launcher = await workspace.upload("run_pytest.py", program)
    variables = {"PYTHONDONTWRITEBYTECODE": "1", **command.variables}
    argv = workspace.in_folder(task, f"exec {shlex.join([command.python, launcher])}", variables)
    result = await workspace.run(argv, workspace.limits.tests_timeout_s, json.dumps(job))
    seen = SignedOutcomes()
    with contextlib.suppress(OSError):  # never begun, or taken away by what ran
        seen = await asyncio.to_thread(read_lines, await workspace.read(results), key)
    output = (result.stdout + result.stderr)[-OUTPUT_CHARS:]
    doubt = seen.doubt()
    if doubt and result.exit_code is None:
        doubt = f"{doubt} (limit {result.limit})"
    return TestOutcomes(seen.outcomes, doubt, output, seen.seconds, seen.collected, seen.parameters)


async def _run_each(workspace: Workspace, task: SweTask) -> TestOutcomes:
    """A command per test. What it says is not read; but its exit status is the word of the code under test."""
    outcomes, outputs = {}, []
    for test in task.tests:
        command = task.test_command.replace("{test}", shlex.quote(test))
        result = await workspace.run(workspace.in_folder(task, command), workspace.limits.test_timeout_s)
        outcomes[test] = "passed" if result.exit_code == 0 else "failed"
        outputs.append(f"$ {command}\n{result.stdout}{result.stderr}")
    return TestOutcomes(outcomes, "", "\n".join(outputs)[-OUTPUT_CHARS:])


@dataclass(frozen=True, slots=True)
class Seal:
    """Names and contents of what steers the tests, before a build."""

    guarded: tuple[str, ...]
    patterns: tuple[str, ...]
    paths: tuple[str, ...]
    digest: bytes

    @classmethod
    async def of(cls, workspace: Workspace, task: SweTask) -> Seal:
        """Raises `SweTaskError` where the box has no `tar` or `sha256sum`."""
        made_by_builds = ("__pycache__", "*.pyc", "*.egg-info", "*.dist-info", ".pytest_cache")
        guarded = tuple(files_of_tests(task))
        patterns = tuple(one for one in task.protected if one not in made_by_builds)
        try:
            paths = _select_paths(await _names(workspace), guarded, patterns)
            return cls(guarded, patterns, paths, await _digest(workspace, paths))
        except (ScriptFailed, OSError) as error:
            raise SweTaskError(f"task {task.instance_id}: what steers its tests cannot be sealed: {error}") from error

    async def holds(self, workspace: Workspace) -> bool:
        """True if all of it is unchanged and nothing was added that steers tests."""
        try:
            names = await _names(workspace)
            # a build may add compiled modules to folders of tests, and change nothing that was there
            adding = [one for one in self.patterns if one not in ("tests", "/test")]
            added = set(_select_paths(names, self.guarded, adding)) - set(self.paths)
            return not added and await _digest(workspace, self.paths) == self.digest
        except (ScriptFailed, OSError):  # a file that was sealed is gone
            return False


def _select_paths(names: Iterable[str], guarded: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """A name with a line end in it cannot be listed for tar: no honest repository has one among its tests."""
    return tuple(sorted(one for one in names if "\n" not in one and is_protected(one, guarded, patterns)))


async def _names(workspace: Workspace) -> list[str]:
    await workspace.script(scripts.NAMES)
    listed = (await workspace.read("names")).decode("utf-8", "surrogateescape")
    return [one.removeprefix("./") for one in listed.split("\0") if one]


async def _digest(workspace: Workspace, paths: Sequence[str]) -> bytes:
    lines = "".join(f"./{path}\n" for path in paths).encode("utf-8", "surrogateescape")
    await workspace.script(scripts.SEAL, await workspace.upload("sealed", lines))
    return await workspace.read("seal")
