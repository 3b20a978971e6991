"""A `Placement` on a Ray cluster: this process is the driver and keeps queue, reports, summary; roles are actors.

reserved ──► actor lives ──► process runs ──exit 0──► finished
    ▲            │ worker or node died: Ray creates it again, here or on another node; counted as a restart
    └────────────┘ waiting for resources is not a failure: the run's watchdog ends a stalled run
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from penstock.deploy.config import Bundle, RunConfig
from penstock.deploy.placements.ray import registry
from penstock.deploy.placements.ray.actor import ActorLife, FsProbe, ProcessState, RoleActor, RoleOrder
from penstock.deploy.placements.ray.cluster import (
    bundle_of,
    check_machines,
    connected,
    environment_of,
    has_gpus,
    living_nodes,
    machines_of,
)
from penstock.deploy.run.plan import Role
from penstock.deploy.run.processes import RESTART_WINDOW_S, EndedProcess, RestartBudget, RoleFailed, RoleSpec
from penstock.deploy.run.supervisor import Supervisor
from penstock.deploy.run.weights_folder import remove_weights
from penstock.deploy.run_dir import RunDir

logger = logging.getLogger("penstock.run")
LOOK_S = 1.0
"""Between two looks at a role's process."""
ANSWER_S = 10.0


class RayMember:
    """A `SupervisedRole` of the supervisor. Everything of it on the cluster is released by `stop`."""

    def __init__(self, spec: RoleSpec, order: RoleOrder, bundle: Bundle) -> None:
        self.spec = spec
        self.bundle = bundle
        self.life: ActorLife | None = None
        """The actor's; None while it has none."""
        self.nodes: set[str] = set()
        """Ids of all the nodes it ever was on."""
        self._order = order
        self._process = ProcessState(None, 0, "")
        self._last_id: str | None = None
        self._earlier_restarts = 0
        """Restarts of the actor, and of processes in its earlier lives."""
        self._budget = RestartBudget(spec.max_restarts, RESTART_WINDOW_S)
        """Budget of both together; the actor has another one for the process."""
        self.has_failed = False
        self._stopping = False
        self._group = placement_group([bundle], strategy="STRICT_PACK", name=spec.name)
        self._actor = _make_actor(spec, bundle, self._group)

    @property
    def pid(self) -> None:
        """Return None: the process may be on another machine, so no signal may be sent to it."""
        return None

    @property
    def restarts(self) -> int:
        return self._earlier_restarts + self._process.restarts

    @property
    def state(self) -> str:
        if self.has_failed:
            return "failed"
        if self._stopping:
            return "stopped"
        if self.life is None:
            return f"waiting for a node with {describe(self.bundle)} free"
        return f"{'running' if self._process.pid else 'not running'} on {self.life.machine}"

    async def run(self) -> None:
        """See `SupervisedRole`. Raises `RoleFailed`, also where Ray gives the actor up."""
        while await self._meet():
            try:
                failure = await self._until_ended()
            except RayActorError as error:
                await self._away(error)
                continue
            if failure is not None:
                raise RoleFailed(failure)
            return

    async def _meet(self) -> bool:
        """Wait until the actor lives; False once the member is to stop."""
        try:
            life = await self._actor.hello.remote()
        except RayError as error:  # this call is tried again in every life: there is none left
            if self._stopping:
                return False
            raise RoleFailed(f"{self.spec.name} failed (its actor cannot be made): {error}") from error
        if self._last_id not in (None, life.id):
            self._earlier_restarts += self._process.restarts + 1
            self._process = ProcessState(None, 0, life.id)
            self._spend(1)
        if self._last_id != life.id:
            logger.info("%s: on %s", self.spec.name, life.machine)
        self.life, self._last_id = life, life.id
        self.nodes.add(life.node_id)
        return not self._stopping

    async def _until_ended(self) -> str | None:
        """The order is never given again by Ray itself: a new life is to be counted. Raises `RoleFailed`."""
        ended = asyncio.ensure_future(self._actor.run.options(max_task_retries=0).remote(self._order))
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=LOOK_S)
                if not ended.done():
                    await self._look()
            return await ended
        finally:
            ended.cancel()

    async def _look(self) -> None:
        with contextlib.suppress(TimeoutError, RayActorError):  # `run` fails too where the actor is gone
            async with asyncio.timeout(ANSWER_S):
                state = await self._actor.state.options(max_task_retries=0).remote()
            # The next life may answer before `run` fails: what is known of this one must still be counted.
            if self.life is not None and state.life_id == self.life.id:
                new, self._process = state.restarts - self._process.restarts, state
                self._spend(new)

    def _spend(self, restarts: int) -> None:
        """Raises `RoleFailed` where restarts of actor and process together are too many. Of a process in its actor's
        first life the actor says so itself, with the end of the log."""
        within = all([self._budget.spend() for _ in range(restarts)])
        if not within and self._earlier_restarts:
            raise RoleFailed(f"{self.spec.name} failed ({self._budget.used_up}, of its actor and its process)")

    def take_ended(self) -> Sequence[EndedProcess]:
        """See `SupervisedRole`; they are on other machines."""
        return ()

    def forgive(self) -> None:
        """See `SupervisedRole`. Where the actor is away just now, its next life begins without restarts anyway."""
        self._budget.forgive()
        self._actor.forgive.options(max_task_retries=0).remote()

    async def _away(self, error: RayActorError) -> None:
        """The actor, or the way to it: `_meet` waits for its next life, or learns that there is none."""
        self.life = None
        if not self._stopping:
            logger.warning("%s: its actor is away, Ray makes it again: %s", self.spec.name, _first_line(error))
            await asyncio.sleep(0.5)  # after a broken connection, before the actor is asked again

    async def stop(self) -> None:
        """End the process as `RoleProcess.stop` does, then release the actor and what it reserved."""
        if self._stopping:
            return
        self._stopping = True
        if self.life is not None:
            try:
                async with asyncio.timeout(self.spec.stop_grace_s + ANSWER_S):
                    await self._actor.stop.options(max_task_retries=0).remote()
            except (RayError, TimeoutError) as error:
                logger.warning("%s could not be asked to stop, and is ended: %s", self.spec.name, _first_line(error))
        try:
            ray.kill(self._actor, no_restart=True)
            remove_placement_group(self._group)
        except RayError as error:
            logger.warning("%s: not released, Ray does it when the run ends: %s", self.spec.name, _first_line(error))


def _make_actor(spec: RoleSpec, bundle: Bundle, group: Any) -> ActorHandle:
    """No secret is among its arguments, and it gets no environment: see `actor`."""
    further = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    actor_class = ray.remote(RoleActor).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources=further,
        max_restarts=-1,  # `RayMember` counts them
        max_task_retries=-1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    )
    actor: ActorHandle[Any] = actor_class.remote()
    return actor


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def describe(bundle: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


class RayPlacement:
    """One run's. `open` connects; what the run had on the cluster is released when it is left."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._config: RunConfig | None = None
        self._registry: Any = None
        self._fs_probe: FsProbe | None = None
        self._gpus = False
        self._members: list[RayMember] = []

    @contextlib.asynccontextmanager
    async def open(self, config: RunConfig, run: RunDir) -> AsyncIterator[None]:
        """Raises `ConfigError` if there is no cluster, or if its machines could not work together."""
        async with connected(self._address, config.name):
            nodes = living_nodes()
            check_machines(config, len(machines_of(nodes)))
            self._config, self._gpus, self._registry = config, has_gpus(nodes), await registry.create()
            with FsProbe.planted(run) as self._fs_probe:
                try:
                    yield
                finally:
                    # Weights in the shared memory of living nodes that had a role; `launch` sees to this machine.
                    alive = {node["NodeID"] for node in living_nodes()}
                    used = {node for member in self._members for node in member.nodes}
                    await asyncio.gather(*(_clean_node(node, config) for node in alive & used))

    def place(self, role: Role, run: RunDir) -> RayMember:
        """Reserves at once; the member's `run` waits until there is room."""
        config = self._config
        assert config is not None, "the placement is not open"
        inherited = {name: os.environ[name] for name in config.ray.env if name in os.environ}
        bundle = bundle_of(role.kind, config, gpus=self._gpus)
        role = dataclasses.replace(role, env={**inherited, **role.env, **environment_of(role.kind, bundle)})
        fs_probe = self._fs_probe if role.kind == "trainer" else None
        order = RoleOrder(role, run.logs, Path.cwd(), fs_probe)
        member = RayMember(role.spec(run.logs), order, bundle)
        self._members.append(member)
        return member

    def helpers(self, supervisor: Supervisor) -> Sequence[Coroutine[Any, Any, None]]:
        return (registry.serve(self._registry, supervisor),)


async def _clean_node(node_id: str, config: RunConfig) -> None:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(remove_weights).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        async with asyncio.timeout(20.0):
            await task.remote(config)
    except (RayError, TimeoutError) as error:
        logger.warning("weights may be left in shared memory of Ray node %s: %s", node_id, str(error) or "no answer")
