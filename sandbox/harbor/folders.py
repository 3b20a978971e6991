"""Folders of tasks: which are there, and each read by its format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.common import nearest
from penstock.sandbox.harbor.task import HarborTask, HarborTaskError
from penstock.sandbox.harbor.task_toml import CONFIG, read_harbor
from penstock.sandbox.harbor.terminal_bench import OLD_CONFIG, read_terminal_bench


def is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, OLD_CONFIG))


def find_task_folders(folder: Path) -> list[Path]:
    """`folder` itself, else the folders right in it that are tasks, by name. Raises `HarborTaskError` where none is."""
    if folder.is_file():
        raise HarborTaskError(f"{folder}: a file; give its folder, {folder.parent}")
    if not folder.is_dir():
        missing, around = folder.absolute(), folder.absolute().parent
        siblings = [one.name for one in around.iterdir() if one.is_dir()] if around.is_dir() else []
        raise HarborTaskError(f"{missing}: no such folder{nearest(missing.name, siblings)}")
    if is_task(folder):
        return [folder]
    inside = [one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")]
    tasks = sorted(one for one in inside if is_task(one) or (one / "instruction.md").is_file())
    if not tasks:
        raise HarborTaskError(f"{folder}: neither it nor a folder in it has a {CONFIG} or {OLD_CONFIG}")
    return tasks


def read_task(folder: Path) -> HarborTask:
    """Raises `HarborTaskError`."""
    folder = folder.absolute()
    if (folder / OLD_CONFIG).is_file() and not (folder / CONFIG).is_file():
        return read_terminal_bench(folder)
    return read_harbor(folder)


def tasks_of(folder: Path) -> Sequence[HarborTask]:
    """Reads a task's folder or a folder of tasks. Raises `HarborTaskError` that lists every unreadable task."""
    tasks, problems = [], []
    for one in find_task_folders(folder):
        try:
            tasks.append(read_task(one))
        except HarborTaskError as error:
            problems.append(str(error))
    if problems:
        raise HarborTaskError("\n".join(problems))
    return tasks
