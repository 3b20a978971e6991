"""The sandbox protocol: boxes for untrusted code, independent of what contains them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class SandboxError(Exception):
    """The box itself failed (could not start, vanished, broke its protocol): an ``infra_error``, never a reward."""


class SandboxLost(SandboxError):
    """The session does not exist any more."""


class NoSuchImage(SandboxError):
    """Boxes of the requested image cannot be made here; the message names the fix."""


@dataclass(frozen=True, slots=True)
class ExceededSetting:
    """A setting that is less than a session asks for."""

    setting: str
    limit: float
    need: str
    """A field of `BoxNeeds`."""
    amount: float


class UnmetNeeds(SandboxError):
    """A session asks for a box that this maker may not or cannot make; the message names the settings."""

    def __init__(self, reason: str, exceeded: Sequence[ExceededSetting] = ()) -> None:
        """`exceeded`: all settings that are too small; empty where another thing is in the way."""
        super().__init__(reason)
        self.exceeded = tuple(exceeded)


class NoSnapshots(SandboxError):
    """Boxes of this backend, or a box like this one, cannot be copied; the message names it."""


class SandboxBusy(SandboxError):
    """No room now (all boxes in use, or a quota reached): nothing was started, the caller may retry."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s
        """Seconds until a retry may succeed, where known."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of code. Code that failed is an observation, not an error of the sandbox."""

    stdout: str
    stderr: str
    exit_code: int | None
    """None if it was killed by a limit."""
    limit: str | None = None
    """``wall``, ``cpu``, ``memory``, ``output`` or ``storage`` where a limit ended or cut it; ``killed`` where it ended
    what runs the box (of a provider), which is then started anew; ``stopped`` where its caller did."""
    duration_s: float = 0.0
    state_lost: bool = False
    """State that earlier calls had built up is gone: of `run_python` its interpreter's names, of `run_shell` its
    shell's directory, variables and functions, of `run` that of either."""
    files_lost: bool = False
    """The whole box was started anew since the last call said so: its files are gone too."""


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of the output of a streamed run; whole characters."""

    stream: Literal["stdout", "stderr"]
    data: str
    result: RunResult | None = None
    """On the last item alone (its `data` is empty): what `run` would have returned, texts included."""


@dataclass(frozen=True, slots=True)
class BoxNeeds:
    """Needs of one session in place of its maker's settings; None keeps the setting."""

    own_root: bool = False
    """A file system of its own to write, under its usual paths: of an image all of it, as the image's root user, with
    `WORKDIR_VARIABLE` and `ENTRYPOINT_VARIABLE` in the environment; of bubblewrap's boxes `OWN_FOLDERS`."""
    memory_mb: int | None = None
    cpus: float | None = None
    storage_mb: int | None = None
    """Limit of everything written to the file system of an image; None: the most that a session may have."""
    clean_cache: bool = False
    """Remove from the kernel's caches, when the box ends, the pages and names of shared files that the box read or
    looked up first, so that later boxes cannot detect them. Only bubblewrap boxes with a cgroup do this."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a box at one moment, kept by the maker that took it."""

    snapshot_id: str


WORKDIR_VARIABLE = "PENSTOCK_WORKDIR"
"""The folder that the image of an `own_root` box names as its working directory."""
ENTRYPOINT_VARIABLE = "PENSTOCK_ENTRYPOINT"
"""The image's entry point, which was not run, quoted for a shell; empty if it has none."""
OWN_ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""Capabilities that root needs to install and own files and to become other users; all act on the container alone."""
OWN_FOLDERS = ("/app", "/logs", "/solution", "/tests")
"""Folders that an `own_root` box of bubblewrap can write, in addition to /tmp."""


class Session(Protocol):
    """One living box. The caller that started it closes it. Calls queue up: one runs at a time."""

    session_id: str

    async def run(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> RunResult:
        """Run a command to its end inside the box, in `cwd` (of the box; None: its /tmp). Raises `SandboxError`."""

    def stream(
        self, argv: list[str], *, stdin: str = "", timeout_s: float | None = None, cwd: str | None = None
    ) -> AsyncIterator[Output]:
        """`run`, streamed; at most `output_bytes` of each stream. Leaving before the last item cancels the run, as
        cancelling `run` does: the box is restarted."""

    async def run_python(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Run code in the session's own interpreter: names defined by one call are available in the next."""

    async def run_shell(self, command: str, *, timeout_s: float | None = None) -> RunResult:
        """Run a command in the session's own shell (bash, else sh): its directory, variables and functions persist.

        A command that ends the shell (``exit``) or breaks a limit starts the next call in a fresh one: `state_lost`.
        """

    async def write_file(self, path: str, data: bytes) -> None:
        """Replace or make a file; `path` is the box's (relative to its /tmp). Raises `OSError` as open() would."""

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """At most the first `max_bytes` of a regular file. Raises `OSError` as open() would."""

    async def leave(self) -> None:
        """Detach from the box without ending it: another process will `attach`. A box that cannot outlive this
        process is closed."""

    async def close(self) -> None:
        """End everything in the box; safe to call twice."""


Accept = Callable[[socket.socket], None]
"""Takes one connection and owns it: a stream socket of this process whose other end is a program in the box."""


class ServedSession(Session, Protocol):
    """A session whose runs may reach what its caller serves, though the box has no network.

    Those of boxes on this machine with a driver in them: bwrap, and docker with images that have python3.
    """

    async def open_port(self) -> int:
        """A port of the box's own loopback, the same one for the life of the box. Raises `SandboxError`."""

    async def run_served(
        self,
        argv: list[str],
        accept: Accept,
        *,
        stop: asyncio.Event | None = None,
        stdin: str = "",
        timeout_s: float | None = None,
        cwd: str | None = None,
    ) -> RunResult:
        """`run`, during which `accept` takes each connection that is made to the port; all of them close with the run.

        Of the output the end is kept, not the beginning. `stop` ends the run (``limit`` is ``stopped``) and leaves the
        box as it is. Raises `SandboxError`, also where the port was not opened in this box.
        """


class Sandbox(Protocol):
    """A maker of boxes, one per worker process or sandbox server."""

    def check_needs(self, needs: BoxNeeds) -> None:
        """Raises `UnmetNeeds` where a box may not or cannot be made so. A server's maker leaves it to `start`."""

    async def start(self, label: str, *, image: str | None = None, needs: BoxNeeds | None = None) -> Session:
        """A fresh box of `image` (None: the backend's default); `label` (run and episode) marks it for reaping.

        Raises `SandboxError`, `NoSuchImage`, `UnmetNeeds` and `SandboxBusy` among them.
        """

    async def attach(self, session_id: str) -> Session:
        """A box that another process opened. Raises `SandboxLost` if it is gone or cannot outlive its opener."""

    async def close(self) -> None:
        """Close every box of this maker."""


class ForkableSandbox(Sandbox, Protocol):
    """A maker whose boxes can be copied, for branches of an episode. Makers that cannot refuse with `NoSnapshots`."""

    async def snapshot(self, session: Session) -> Snapshot:
        """The files of `session`'s box as they are between two calls; what runs in it meanwhile may change them.

        Interpreter, shell and whatever runs are not copied. Raises `SandboxError`, `NoSnapshots` among them.
        """

    async def fork(self, snapshot: Snapshot, label: str) -> Session:
        """A fresh box with those files, of the same image and needs; any number of them. Raises as `start` does."""

    async def forget(self, snapshot: Snapshot) -> None:
        """Drops the copy; boxes that were forked from it stay. Safe to call twice. `close` forgets all of them."""
