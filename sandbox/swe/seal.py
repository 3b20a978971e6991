"""What a build must leave as it is: it runs the patch's code where the hidden tests lie already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.errors import SweTaskError
from penstock.sandbox.swe.protected import is_protected
from penstock.sandbox.swe.run_tests import files_of_tests
from penstock.sandbox.swe.task import SweTask
from penstock.sandbox.swe.workspace import ScriptFailed, Workspace

GENERATED = ("__pycache__", "*.pyc", "*.egg-info", "*.dist-info", ".pytest_cache")
"""What honest builds make."""
WHERE_TESTS_LIE = ("tests", "/test")
"""A build may add to these folders (compiled modules), and change nothing that was there."""


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
        guarded, patterns = tuple(files_of_tests(task)), tuple(one for one in task.protected if one not in GENERATED)
        try:
            paths = _chosen(await _names(workspace), guarded, patterns)
            return cls(guarded, patterns, paths, await _digest(workspace, paths))
        except (ScriptFailed, OSError) as error:
            raise SweTaskError(f"task {task.instance_id}: what steers its tests cannot be sealed: {error}") from error

    async def holds(self, workspace: Workspace) -> bool:
        """Whether all of it is there unchanged, and nothing was added that steers tests."""
        try:
            names = await _names(workspace)
            adding = [one for one in self.patterns if one not in WHERE_TESTS_LIE]
            added = set(_chosen(names, self.guarded, adding)) - set(self.paths)
            return not added and await _digest(workspace, self.paths) == self.digest
        except (ScriptFailed, OSError):  # a file that was sealed is gone
            return False


def _chosen(names: Iterable[str], guarded: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
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
