"""The actor on a node of the Ray cluster: owns one role's process.

    driver ──run(order)──► RoleActor ──► penstock rollout | agent | train   (restarted by `RoleProcess`, with back-off)
       │ hello, state         │ dies with its worker or node: Ray creates the actor again, empty; the kernel signals
       └──────────────────────┘ the process to stop, and the driver gives the order to the new actor

Secrets are in the order, an argument of a method call. Ray passes it from the driver's memory to the actor's and stores
it nowhere else: creation arguments and `runtime_env` stay in the cluster's tables, and its state API shows the latter.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.deploy.run.plan import Role
from penstock.deploy.run.processes import RoleFailed, RoleProcess
from penstock.deploy.run_dir import RunDir

LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class FsProbe:
    """A file that the driver wrote, and what is in it."""

    path: Path
    text: str

    @classmethod
    @contextlib.contextmanager
    def planted(cls, run: RunDir) -> Iterator[FsProbe]:
        """Lies in the run's folder while the block is open."""
        fs_probe = cls(run.root / "ray.probe", secrets.token_hex(16))
        fs_probe.path.write_text(fs_probe.text)
        try:
            yield fs_probe
        finally:
            fs_probe.path.unlink(missing_ok=True)

    async def look_for(self) -> str | None:
        """None once this machine sees it, else what to tell people. A shared disk may show new files late."""
        deadline = time.monotonic() + 10.0
        while True:
            with contextlib.suppress(OSError):
                if self.path.read_text() == self.text:
                    return None
            if time.monotonic() >= deadline:
                return (
                    f"machine {socket.gethostname()} does not see {self.path.parent}: metrics and checkpoints are"
                    " written there and read by `penstock run`. Set runs_dir to a folder on a disk they share"
                )
            await asyncio.sleep(LOOK_AGAIN_S)


@dataclass(frozen=True)
class RoleOrder:
    """The command, environment and files of a role that an actor runs."""

    role: Role
    logs: Path
    cwd: Path
    fs_probe: FsProbe | None
    """Proof that the actor sees the run's folder; None if it need not."""


@dataclass(frozen=True)
class ActorLife:
    """One incarnation of an actor."""

    id: str
    node_id: str
    machine: str


@dataclass(frozen=True)
class ProcessState:
    """State of the role's process, in one life of its actor."""

    pid: int | None
    restarts: int
    life_id: str


class RoleActor:
    """One per role. All methods run on one event loop."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex
        self._process: RoleProcess | None = None
        self._ending: asyncio.Task[str | None] | None = None

    async def hello(self) -> ActorLife:
        import ray

        context = ray.get_runtime_context()
        return ActorLife(self._id, context.get_node_id(), ray.util.get_node_ip_address())

    async def run(self, order: RoleOrder) -> str | None:
        """Start the role and wait: None when it finished or was stopped, else why it failed for good.

        A second call in one life (the connection broke, not the actor) waits for the same process.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._until_ended(order))
        return await asyncio.shield(self._ending)

    async def state(self) -> ProcessState:
        process = self._process
        return ProcessState(process.pid, process.restarts, self._id) if process else ProcessState(None, 0, self._id)

    async def forgive(self) -> None:
        """See `SupervisedRole`."""
        if self._process is not None:
            self._process.forgive()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the role's grace; return when its process is gone."""
        if self._process is not None and self._ending is not None:
            await self._process.stop()
            await asyncio.wait({self._ending})

    async def _until_ended(self, order: RoleOrder) -> str | None:
        if order.fs_probe is not None and (unseen := await order.fs_probe.look_for()):
            return unseen
        order.logs.mkdir(parents=True, exist_ok=True)
        spec = order.role.spec(order.logs, order.cwd if order.cwd.is_dir() else None)
        # A role has no business with the cluster.
        env = {name: value for name, value in spec.env.items() if name not in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")}
        self._process = RoleProcess(dataclasses.replace(spec, env=env))
        try:
            await self._process.run()
        except RoleFailed as error:
            return str(error)
        return None
