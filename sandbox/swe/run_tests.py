"""The tests of a task, run in its grading box: pytest with signed results, or a command per test."""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.sandbox.protocol import RunResult
from penstock.sandbox.swe.command import PytestCommand
from penstock.sandbox.swe.errors import SweTaskError
from penstock.sandbox.swe.report import Witnessed, read_lines
from penstock.sandbox.swe.task import SweTask
from penstock.sandbox.swe.workspace import Workspace

MAX_RESULTS_BYTES = 16 << 20
OUTPUT_CHARS = 4000
_LAUNCHER = Path(__file__).parent / "in_box" / "run_pytest.py"


@dataclass(frozen=True, slots=True)
class Ran:
    """What the tests did."""

    outcomes: Mapping[str, str]
    doubt: str
    """Why no outcome counts; empty where they do."""
    output: str
    seconds: Mapping[str, float] = field(default_factory=dict)


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
    argv = workspace.in_folder(f"{shlex.quote(command.python)} -c 'import pytest'", workspace.variables(task))
    result = await workspace.session.run(argv, timeout_s=workspace.limits.command_timeout_s)
    if result.exit_code != 0:
        raise SweTaskError(f"task {task.instance_id}: no pytest in its box: {(result.stderr or result.stdout)[-500:]}")


async def run_tests(workspace: Workspace, task: SweTask) -> Ran:
    """Raises `SandboxError`."""
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
    }
    launcher = await workspace.upload("run_pytest.py", _LAUNCHER.read_bytes())
    variables = {"PYTHONDONTWRITEBYTECODE": "1", **command.variables, **workspace.variables(task)}
    argv = workspace.in_folder(f"exec {shlex.join([command.python, launcher])}", variables)
    limit_s = workspace.limits.tests_timeout_s
    result = await workspace.session.run(argv, stdin=json.dumps(job), timeout_s=limit_s)
    return _conclude(result, await _witnessed(workspace, results, key))


async def _witnessed(workspace: Workspace, results: str, key: bytes) -> Witnessed:
    try:
        written = await workspace.read(results, MAX_RESULTS_BYTES)
    except OSError:  # never begun, or taken away by what ran
        return Witnessed()
    return await asyncio.to_thread(read_lines, written, key)


def _conclude(result: RunResult, seen: Witnessed) -> Ran:
    output = (result.stdout + result.stderr)[-OUTPUT_CHARS:]
    doubt = seen.doubt()
    if doubt and result.exit_code is None:
        doubt = f"{doubt} (limit {result.limit})"
    return Ran(seen.outcomes, doubt, output, seen.seconds)


async def _run_each(workspace: Workspace, task: SweTask) -> Ran:
    """A command per test. What it says is not read; but its exit status is the word of the code under test."""
    outcomes, said = {}, []
    variables = workspace.variables(task)
    for test in task.tests:
        command = task.test_command.replace("{test}", shlex.quote(test))
        argv = workspace.in_folder(command, variables)
        result = await workspace.session.run(argv, timeout_s=workspace.limits.test_timeout_s)
        outcomes[test] = "passed" if result.exit_code == 0 else "failed"
        said.append(f"$ {command}\n{result.stdout}{result.stderr}")
    return Ran(outcomes, "", "\n".join(said)[-OUTPUT_CHARS:])
