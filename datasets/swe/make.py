"""Packages in, a folder of tasks out: repositories, the boxes' pytest, the rows to train on and to evaluate with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from penstock.datasets.swe.factory import Factory, FactorySettings, Report
from penstock.datasets.swe.package import PackageError, read_package, write_box_packages
from penstock.datasets.swe.rows import BadFile, Fields, write_split
from penstock.sandbox import Sandbox, SandboxConfig
from penstock.sandbox.swe import TaskCheck, check_task, load_tasks


@dataclass(frozen=True)
class MutationRequest:
    packages: tuple[str, ...]
    tests: tuple[Path, ...] = ()
    """Test folders of the packages at the same places."""
    evaluation: int = 0


def box_config(backend: str, image: str, concurrency: int) -> SandboxConfig:
    """Boxes large enough for a small package's tests. Raises `ValidationError` for a backend that there is not."""
    limits = {"memory_mb": 1024, "tmp_mb": 256, "cpu_s": 600, "pids": 256, "run_timeout_s": 60.0}
    return SandboxConfig.model_validate({"backend": backend, "image": image, "max_boxes": concurrency, **limits})


async def make_tasks(
    request: MutationRequest, out: Path, sandbox: Sandbox, settings: FactorySettings, report: Report = lambda text: None
) -> list[str]:
    """Returns what was written, a line per file and package. Closes the sandbox.

    Raises:
        PackageError: a package cannot be read, its tests do not run, or nothing came of any.
        SandboxError, SweTaskError: as `grade` does.
    """
    try:
        write_box_packages(out / "packages")
        rows: list[Fields] = []
        lines: list[str] = []
        for index, name in enumerate(request.packages):
            package = read_package(name, request.tests[index] if index < len(request.tests) else None)
            result = await Factory(package, sandbox, out, settings).make(report)
            rows += result.tasks
            licence = package.licence or "licence not stated"
            names = ("tried", *sorted(set(result.counts) - {"tried"}))
            counts = ", ".join(f"{result.counts[name]} {name.replace('_', ' ')}" for name in names)
            lines.append(f"{package.name} {package.version} ({licence}): {counts}")
    finally:
        await sandbox.close()
    if not rows:
        raise PackageError("no task came of these packages: their tests notice none of the mistakes")
    random.Random(settings.seed).shuffle(rows)  # one after the other, packages would be learnt one after the other
    splits = {"test": rows[: request.evaluation], "train": rows[request.evaluation :]}
    for split, tasks in splits.items():
        if tasks:
            lines.append(f"{write_split(tasks, out, split)}: {len(tasks)} tasks")
    return lines


async def check_tasks(
    path: Path, sandbox: Sandbox, times: int, limit: int, report: Report = lambda text: None
) -> list[str]:
    """A line per unsound task of the first `limit` (0: all). Closes the sandbox.

    Raises `BadFile`, `SweTaskError`, `SandboxError`.
    """
    problems: list[str] = []
    try:
        if not path.is_file():  # noqa: ASYNC240
            raise BadFile(f"--tasks {path}: no such file")
        tasks = load_tasks(path)[: limit or None]
        for number, task in enumerate(tasks, start=1):
            report(f"{number} of {len(tasks)}: {task.instance_id} …")
            result = await check_task(sandbox, task, times=times)
            problems += [f"{task.instance_id}: {problem}" for problem in result.problems]
            report(f"{number} of {len(tasks)}: {task.instance_id} {_verdict(result)}")
    finally:
        await sandbox.close()
    return problems


def _verdict(result: TaskCheck) -> str:
    """Tests that code may cheat are named and do not make a task unsound."""
    cheats = f"; open to cheats: {', '.join(result.open_to_cheats)}" if result.open_to_cheats else ""
    return ("; ".join(result.problems) or "sound") + cheats
