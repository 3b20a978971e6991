"""A repository in a box, as the verbs need it: scripts run, files carried in and out, the snapshot placed."""

from __future__ import annotations

import asyncio
import posixpath

from penstock.sandbox.protocol import RunResult, Session
from penstock.sandbox.swe import scripts
from penstock.sandbox.swe.errors import SweTaskError
from penstock.sandbox.swe.limits import SweLimits
from penstock.sandbox.swe.snapshot import packages_of, snapshot_of
from penstock.sandbox.swe.task import SweTask

STATE = ".penstock_swe"
PART_BYTES = 4 << 20
MAX_LISTING_BYTES = 16 << 20
_HOME = 'mkdir -p "$1" "$2" && cd -- "$2" && pwd -P && cd - >/dev/null && cd -- "$1" && pwd -P'


class ScriptFailed(Exception):
    """A script of ours ended with another status than 0; the text is what it wrote to stderr."""


class Workspace:
    """`folder` and `state` are absolute paths in the box of `session`."""

    def __init__(self, session: Session, folder: str, state: str, limits: SweLimits) -> None:
        self.session = session
        self.folder = folder
        self.state = state
        self.limits = limits

    @classmethod
    async def find(cls, session: Session, task: SweTask, limits: SweLimits) -> Workspace:
        """Where things lie in this box; makes the folders. Raises `SweTaskError` where they cannot be made."""
        result = await session.run(["sh", "-c", _HOME, "swe", STATE, task.folder], timeout_s=limits.command_timeout_s)
        if result.exit_code != 0:
            raise SweTaskError(f"folder {task.folder!r} cannot be made in the box: {_end_of(result)}")
        folder, state = result.stdout.splitlines()
        return cls(session, folder, state, limits)

    async def script(self, text: str, *arguments: str) -> RunResult:
        """Raises `ScriptFailed`, and `SandboxError`."""
        command = ["sh", "-c", scripts.BEGIN + text, "swe", self.state, self.folder, *arguments]
        result = await self.session.run(command, timeout_s=self.limits.command_timeout_s)
        if result.exit_code != 0:
            raise ScriptFailed(_end_of(result))
        return result

    async def upload(self, name: str, data: bytes) -> str:
        """The file's path in the box; in parts where it is larger than one call may carry. Raises `SweTaskError`."""
        target = posixpath.join(self.state, name)
        try:
            if len(data) <= PART_BYTES:
                await self.session.write_file(target, data)
            else:
                await self._upload_parts(name, data)
        except (OSError, ScriptFailed) as error:
            raise SweTaskError(f"{name}: {len(data)} bytes cannot be written into the box: {error}") from error
        return target

    async def _upload_parts(self, name: str, data: bytes) -> None:
        for number, start in enumerate(range(0, len(data), PART_BYTES)):
            path = posixpath.join(self.state, f"part.{number:05}")
            await self.session.write_file(path, data[start : start + PART_BYTES])
        await self.script(scripts.JOIN, name)

    async def read(self, name: str, max_bytes: int = MAX_LISTING_BYTES) -> bytes:
        """Raises `OSError`."""
        return await self.session.read_file(posixpath.join(self.state, name), max_bytes)

    async def place(self, task: SweTask) -> None:
        """The snapshot as one commit without a past or a future, ready to be worked on.

        Raises:
            SweTaskError: the repository cannot be read, or this box cannot hold it.
        """
        try:
            await self._put_files(task)
            await self.script(f"{scripts.BASE}\n(\n{scripts.DIFF}\n)")
        except (ScriptFailed, OSError) as error:
            raise SweTaskError(
                f"task {task.instance_id}: the repository cannot be placed: {error}{_mend(task)}"
            ) from error
        if await self.read("diff.patch", 1):
            raise SweTaskError(f"task {task.instance_id}: the snapshot differs from its own files")

    async def _put_files(self, task: SweTask) -> None:
        await self.put_packages(task)
        if task.repository is None:
            await self.script(scripts.COPY, task.image_folder)
            return
        packed = await asyncio.to_thread(snapshot_of, task.repository, task.base_commit)
        await self.script(scripts.UNPACK, await self.upload("snapshot.tgz", packed))

    async def put_packages(self, task: SweTask) -> None:
        """As they are on this machine, whatever a build made of them. Raises `ScriptFailed`, `SweTaskError`."""
        if task.packages is not None:
            packed = await asyncio.to_thread(packages_of, task.packages)
            await self.script(scripts.PACKAGES, await self.upload("packages.tgz", packed))

    @property
    def packages(self) -> str:
        return posixpath.join(self.state, "packages")

    def in_folder(self, command: str, variables: dict[str, str] | None = None) -> list[str]:
        """Argument vector of a shell command in the repository."""
        settings = [f"{name}={value}" for name, value in (variables or {}).items()]
        start = 'cd -- "$1" && eval "$2"'
        shell = 'if command -v bash >/dev/null; then exec bash -c "$0" box "$@"; else exec sh -c "$0" box "$@"; fi'
        return ["env", *settings, "sh", "-c", shell, start, self.folder, command]

    def variables(self, task: SweTask) -> dict[str, str]:
        """What every command of the task sees beside the box's own environment."""
        return {"PYTHONPATH": self.packages} if task.packages is not None else {}


def _end_of(result: RunResult) -> str:
    said = (result.stderr or result.stdout).strip()[-1000:]
    return said or (f"limit {result.limit}" if result.limit else f"exit status {result.exit_code}")


def _mend(task: SweTask) -> str:
    if task.repository is None:
        return " (the image needs git; take history out of it where it is built: `RUN rm -rf /testbed/.git`)"
    return " (the box needs git and tar, and room: sandbox.tmp_mb, sandbox.memory_mb)"
