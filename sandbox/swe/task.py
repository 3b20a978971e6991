"""A task as a row describes it, in SWE-bench's field names, with its limits, its test command and its errors."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

PROTECTED = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.egg-info", "*.dist-info"),
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("__pycache__", "*.pyc", ".pytest_cache", "tests", "/test", "/pytest.py", "/_pytest"),
)
"""Files that steer a test run. A pattern matches any part of a path; one with a leading / the first part."""


@dataclass(frozen=True, slots=True)
class SweTask:
    """A repository with a bug, and tests that show whether it is fixed."""

    instance_id: str
    fail_to_pass: tuple[str, ...]
    """Ids of tests that fail on the snapshot and must pass with the right patch."""
    pass_to_pass: tuple[str, ...] = ()
    """Ids of tests that pass before and after."""
    test_patch: bytes = b""
    """Puts the hidden tests in, at grading only."""
    patch: bytes = b""
    """The reference solution: proves decoys, and `check_task` grades it. No box of a model holds it."""
    repository: Path | None = None
    """Folder of this machine, a git repository or plain files; None: the image has it at `image_folder`."""
    base_commit: str | None = None
    """Commit of `repository`; None: its HEAD, or the files as they are if it is a plain folder."""
    folder: str = "repo"
    """Folder of the repository in the box; relative to the directory that its sessions begin in."""
    sandbox_image: str | None = None
    """None: the backend's default one."""
    image_folder: str = "/testbed"
    """Folder of the image that has the repository without its .git; it is copied to `folder`."""
    packages: Path | None = None
    """Folder of this machine that is put on the Python path of every command; for boxes whose Python lacks pytest."""
    test_command: str = "python3 -m pytest"
    """``[NAME=VALUE …] PYTHON -m pytest [ARGUMENTS]``, or any command with ``{test}``, run per test: 0 is a pass."""
    build_command: str = ""
    """Run in the repository once it lies there, and again in the grading box with the patch in."""
    protected: tuple[str, ...] = PROTECTED
    """Changes of paths that match are left out of the model's patch at grading."""
    problem_statement: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        return (*self.fail_to_pass, *self.pass_to_pass)

    @classmethod
    def from_row(cls, row: Mapping[str, Any], base: Path = Path()) -> SweTask:
        """Fields by name, others passed over. `base`: what relative `repository` and `packages` are relative to.

        Raises:
            SweTaskError: a field is missing or of the wrong kind; the text names it.
        """
        name = str(row.get("instance_id", ""))
        if not name:
            raise SweTaskError("a row has no instance_id")
        fields: dict[str, Any] = {key: str(row[key]) for key in _PLAIN if row.get(key)}
        if row.get("protected") is not None:
            fields["protected"] = _texts(row, "protected")
        task = cls(
            instance_id=name,
            fail_to_pass=_texts(row, "FAIL_TO_PASS"),
            pass_to_pass=_texts(row, "PASS_TO_PASS"),
            test_patch=_patch(row, "test_patch"),
            patch=_patch(row, "patch"),
            repository=_path(row, "repository", base),
            packages=_path(row, "packages", base),
            **fields,
        )
        if PytestCommand.parse(task.test_command) is None and "{test}" not in task.test_command:
            raise SweTaskError(f"task {name}: test_command must be PYTHON -m pytest …, or hold {{test}}")
        if not task.fail_to_pass:
            raise SweTaskError(f"task {name}: FAIL_TO_PASS is empty: nothing would have to be repaired")
        if task.repository is None and task.sandbox_image is None:
            raise SweTaskError(f"task {name}: it needs a repository (a folder), or a sandbox_image that has one")
        return task


_PLAIN = (
    *("base_commit", "folder", "sandbox_image", "image_folder", "test_command", "build_command", "problem_statement"),
)


def load_tasks(path: Path) -> list[SweTask]:
    """A task per line of a JSONL file; relative folders are next to the file. Raises `SweTaskError` with the line."""
    tasks = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                tasks.append(_load(line, f"{path}:{number}", path.parent))
    return tasks


def _load(line: str, where: str, base: Path) -> SweTask:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise SweTaskError("it is not a JSON object")
        return SweTask.from_row(row, base)
    except (ValueError, SweTaskError) as error:
        raise SweTaskError(f"{where}: {error}") from error


def _texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list, or one written as JSON text, as SWE-bench's files have it."""
    value = row.get(key) or []
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise SweTaskError(f"task {row['instance_id']}: {key} must be a list of texts, found {row[key]!r}")
    return tuple(value)


def _patch(row: Mapping[str, Any], key: str) -> bytes:
    value = row.get(key) or b""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")


def _path(row: Mapping[str, Any], key: str, base: Path) -> Path | None:
    return (base / str(row[key])).absolute() if row.get(key) else None


class SweTaskError(Exception):
    """The task or its environment is broken (row, snapshot, hidden tests, image): never the model's fault."""


class PatchError(ValueError):
    """A patch that does not fit its snapshot, or that no patch can be made from what the box holds."""


class SweLimits(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    command_timeout_s: float = Field(
        120.0, gt=0, description="Placing the repository, building, taking the diff: each."
    )
    test_timeout_s: float = Field(60.0, gt=0, description="One test; a longer one has failed and the next one runs.")
    tests_timeout_s: float = Field(1800.0, gt=0, description="All tests of one grading together.")
    after_a_hang: bool = Field(
        False,
        description="Run the others though one of FAIL_TO_PASS hangs, for the share; one of PASS_TO_PASS ends it.",
    )
    patch_bytes: int = Field(1 << 20, gt=0, le=16 << 20, description="A larger patch is not graded: it earns nothing.")
    decoys: int = Field(
        2,
        ge=0,
        le=16,
        description="Further runs of a patch that passes, with wrong expectations in hidden tests, which must fail.",
    )


_VARIABLE = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class PytestCommand:
    """``[NAME=VALUE …] PYTHON -m pytest [ARGUMENTS]``"""

    python: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    paths: tuple[str, ...]
    """``PYTHONPATH`` of the command: put on the path only when the runner itself has been imported."""

    @classmethod
    def parse(cls, command: str) -> PytestCommand | None:
        """None if it is another command."""
        words = shlex.split(command)
        variables = {}
        while words and _VARIABLE.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words[:1] in (["pytest"], ["py.test"]):
            words[:1] = ["python3", "-m", "pytest"]
        if words[1:3] != ["-m", "pytest"]:
            return None
        paths = tuple(path for path in variables.pop("PYTHONPATH", "").split(os.pathsep) if path and "$" not in path)
        return cls(words[0], tuple(words[3:]), variables, paths)


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
