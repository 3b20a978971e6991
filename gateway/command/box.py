"""The box of a program: its folder, the files put into it, how it runs, and what is read back."""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.agent_loops import InfraFailure
from penstock.sandbox import Accept, RunResult, ServedSession, put_folder

STATE = ".penstock_program"
SET_UP_S = 60.0
MAX_FILE_BYTES = 1 << 20
"""Largest size of one collected file; the rest is cut."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """One of the limits of a program's time."""

    setting: str
    """The setting that has it, in words."""
    seconds: float
    """The whole length. The limit may have begun before the program did."""
    ends_at: float
    """A time of `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program, and the files that it left."""

    result: RunResult
    seconds: float
    time_limit: TimeLimit
    files: Mapping[str, str] = field(default_factory=dict)
    """Collected ones, by the paths of the settings."""

    def describe(self) -> str:
        """Describe the end and the last output, for the cause of an outcome."""
        result = self.result
        words = (result.stderr.strip() or result.stdout.strip())[-400:]
        if result.limit == "wall":
            limit = self.time_limit
            end = (
                f"it was ended by its time limit of {limit.seconds:g} s, {limit.setting}: raise it if the program only"
                " starts slowly, since the first start of an agent may take long"
            )
            return f"{end}; its last output: {words}" if words else end
        how = f"it ended with {result.exit_code}" if result.limit is None else f"limit {result.limit}"
        return f"{how} after {self.seconds:.1f} s: {words}" if words else f"{how} after {self.seconds:.1f} s"


class ProgramBox:
    """One episode's. Made by `open`; its session is closed by who started it."""

    def __init__(self, session: ServedSession, folder: str, state: str, variables: Mapping[str, str]) -> None:
        self.session = session
        self.folder = folder
        """Absolute folder in which the program starts."""
        self.home = posixpath.join(state, "home")
        self._variables = variables

    @classmethod
    async def open(cls, session: ServedSession, folder: str, variables: Mapping[str, str]) -> ProgramBox:
        """`folder`: where the program starts, made if it is missing. Raises `SandboxError`, `InfraFailure`."""
        state = posixpath.dirname(await _make_folder(session, f"{STATE}/home"))
        return cls(session, await _make_folder(session, folder or posixpath.join(state, "work")), state, variables)

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files by path: ``~/…`` in the home, absolute, or in the folder of the program. Raises `SandboxError`,
        `InfraFailure`.
        """
        groups: dict[str, dict[str, bytes]] = {}
        for path, content in files.items():
            base, name = self._place(path)
            groups.setdefault(base, {})[name] = content
        for base, group in groups.items():
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as archive:
                for name, content in group.items():
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
                    archive.addfile(member, io.BytesIO(content))
            try:
                await put_folder(self.session, base, packed.getvalue())
            except OSError as error:
                raise InfraFailure("task", f"files {', '.join(group)} cannot be written to {base}: {error}") from error

    async def run(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: str,
        limit: TimeLimit,
        accept: Accept,
        stop: asyncio.Event,
    ) -> ProgramEnd:
        """Runs the program to its end.

        Args:
            limit: ends the program.
            accept: takes the connections that the program opens.
            stop: set to end the program.

        Raises:
            SandboxError: the box failed.
        """
        variables = {**self._variables, "HOME": self.home, **environment}
        started = time.monotonic()
        result = await self.session.run_served(
            ["env", *(f"{name}={value}" for name, value in variables.items()), *argv],
            accept,
            stop=stop,
            stdin=stdin,
            timeout_s=limit.ends_at - started,
            cwd=self.folder,
        )
        return ProgramEnd(result, time.monotonic() - started, limit)

    async def collect(self, paths: Sequence[str]) -> dict[str, str]:
        """Up to `MAX_FILE_BYTES` of each file that is there, as text. Raises `SandboxError`."""
        texts = {}
        for path in paths:
            try:
                data = await self.session.read_file(posixpath.join(*self._place(path)), MAX_FILE_BYTES)
            except OSError:
                continue
            texts[path] = data.decode("utf-8", "replace")
        return texts

    def _place(self, path: str) -> tuple[str, str]:
        """(folder, path in it)"""
        if path.startswith("~/"):
            return self.home, path[2:]
        return ("/", path.lstrip("/")) if path.startswith("/") else (self.folder, path)


async def _make_folder(session: ServedSession, folder: str) -> str:
    """Makes `folder` and returns its absolute path."""
    script = 'mkdir -p -- "$1" && cd -- "$1" && pwd -P'
    result = await session.run(["sh", "-c", script, "program", folder], timeout_s=SET_UP_S)
    if result.exit_code != 0:
        words = result.stderr.strip() or f"limit {result.limit}"
        raise InfraFailure("sandbox", f"folder {folder!r} cannot be made in the box: {words[-400:]}")
    return result.stdout.rstrip("\n")
