"""The roles of a run while it goes on, wherever they run: started, added, removed, and stopped in order.

Placement ──place(role)──► Member: one role's process over all its restarts, on this machine or elsewhere
    ▲                         │ one task each; the first that fails for good ends the run
  Crew ◄──────────────────────┘ over when the trainer has finished
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from penstock.deploy.config import RunConfig
from penstock.deploy.gpus import VARIABLE, gpus_of, visible_gpus
from penstock.deploy.plan import Role
from penstock.deploy.processes import RoleProcess, RoleSpec
from penstock.deploy.run_dir import RunDir


class Member(Protocol):
    """One role's process. `run` is called once; `stop` at any time, also before and after."""

    spec: RoleSpec

    @property
    def pid(self) -> int | None:
        """On this machine; None while it does not run, and where it runs elsewhere."""
        ...

    @property
    def restarts(self) -> int: ...

    @property
    def state(self) -> str:
        """For people: running or not, and where."""
        ...

    async def run(self) -> None:
        """Until it finished or was stopped. Raises `RoleFailed`."""
        ...

    async def stop(self) -> None: ...


class Placement(Protocol):
    """Where a run's roles run."""

    def open(self, config: RunConfig, run: RunDir) -> AbstractAsyncContextManager[None]:
        """Entered before the first `place`, left when every member has been stopped. Raises `ConfigError`."""
        ...

    def place(self, role: Role, run: RunDir) -> Member: ...

    def helpers(self, crew: Crew) -> Sequence[Coroutine[Any, Any, None]]:
        """What else goes on while the run does; cancelled at its end. An error of theirs ends the run."""
        ...


class LocalPlacement:
    """This machine: child processes, each with the GPUs that are its own."""

    def __init__(self) -> None:
        self._own_gpus: Callable[[Role], Sequence[str] | None] = lambda role: None

    @asynccontextmanager
    async def open(self, config: RunConfig, run: RunDir) -> AsyncIterator[None]:
        gpus = await asyncio.to_thread(visible_gpus)
        self._own_gpus = partial(gpus_of, config=config, gpus=gpus)
        yield

    def place(self, role: Role, run: RunDir) -> RoleProcess:
        own = self._own_gpus(role)
        if own is not None:
            role = replace(role, env={**role.env, VARIABLE: ",".join(own)})
        return RoleProcess(role.spec(run.logs))

    def helpers(self, crew: Crew) -> Sequence[Coroutine[Any, Any, None]]:
        return ()


class Crew:
    """`add` the roles, `run` until the trainer has finished, `stop`."""

    def __init__(self, place: Callable[[Role], Member], more: Callable[[str, int], Role]) -> None:
        """`more(kind, number)` makes the role of one more server or worker."""
        self.members: list[Member] = []
        """All there ever were, in the order in which they came."""
        self._place, self._more = place, more
        self._roles: dict[str, Role] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def add(self, role: Role) -> None:
        member = self._place(role)
        self.members.append(member)
        self._roles[role.name] = role
        self._tasks[role.name] = asyncio.create_task(member.run(), name=role.name)
        self._changed.set()

    def resize(self, kind: str, count: int) -> None:
        """From now on `count` servers or workers: newest ones leave first, and no name is given twice."""
        present = self.present(kind)
        used = [role.number for role in self._roles.values() if role.kind == kind and role.number is not None]
        fresh = itertools.count(max(used, default=-1) + 1)
        for _ in range(count - len(present)):
            self.add(self._more(kind, next(fresh)))
        for role in present[count:]:
            member = next(m for m in self.members if m.spec.name == role.name)
            self._leaving[role.name] = asyncio.create_task(member.stop(), name=f"{role.name} leaves")

    def present(self, kind: str) -> list[Role]:
        """Those of a kind that may be added and removed, without those that are leaving; oldest first."""
        return [
            r for r in self._roles.values() if r.kind == kind and r.number is not None and r.name not in self._leaving
        ]

    async def run(self, beside: Sequence[asyncio.Task[None]]) -> None:
        """Until the trainer has finished. Raises what a role or a task of `beside` raised first."""
        while not self._over(beside):
            changed = asyncio.create_task(self._changed.wait(), name="crew changed")
            try:
                pending = {task for task in (*self._tasks.values(), *beside) if not task.done()}
                await asyncio.wait({*pending, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            self._changed.clear()

    def _over(self, beside: Sequence[asyncio.Task[None]]) -> bool:
        """A role that failed for good, a stalled run or Ctrl-C is raised here and ends the run."""
        for task in (*self._tasks.values(), *beside):
            if task.done():
                task.result()
        return any(self._tasks[name].done() for name, role in self._roles.items() if role.kind == "trainer")

    async def stop(self) -> None:
        """Trainer (saves a checkpoint), agent workers (hand leases back), rollout servers. Never raises for a role."""
        for kind in ("trainer", "agent", "rollout"):
            ending = [m.stop() for m in self.members if self._roles[m.spec.name].kind == kind]
            await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*self._tasks.values(), *self._leaving.values(), return_exceptions=True)
