"""A `Placement` on a Ray cluster: this process is the driver and keeps queue, reports, summary; roles are actors."""

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
from penstock.deploy.config import RunConfig
from penstock.deploy.crew import Crew
from penstock.deploy.placements.ray import board
from penstock.deploy.placements.ray.actor import Order
from penstock.deploy.placements.ray.bundles import bundle_of, check_machines
from penstock.deploy.placements.ray.cluster import connected, has_gpus, living_nodes, machines_of
from penstock.deploy.placements.ray.marker import Marker
from penstock.deploy.placements.ray.member import RayMember
from penstock.deploy.plan import Role
from penstock.deploy.run_dir import RunDir
from penstock.deploy.weights_dir import remove_weights
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger("penstock.run")
CLEAN_S = 20.0


class RayPlacement:
    """One run's. `open` connects; what the run had on the cluster is released when it is left."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._config: RunConfig | None = None
        self._board: Any = None
        self._marker: Marker | None = None
        self._gpus = False
        self._members: list[RayMember] = []

    @contextlib.asynccontextmanager
    async def open(self, config: RunConfig, run: RunDir) -> AsyncIterator[None]:
        """Raises `ConfigError` where there is no cluster, or where its machines could not work together."""
        async with connected(self._address, config.name):
            nodes = living_nodes()
            check_machines(config, len(machines_of(nodes)))
            self._config, self._gpus, self._board = config, has_gpus(nodes), await board.put_up()
            with Marker.planted(run) as self._marker:
                try:
                    yield
                finally:
                    await self._clean(config)

    def place(self, role: Role, run: RunDir) -> RayMember:
        """Reserves at once; the member's `run` waits until there is room."""
        config = self._opened()
        told = {name: os.environ[name] for name in config.ray.env if name in os.environ}
        role = dataclasses.replace(role, env={**told, **role.env})
        marker = self._marker if role.kind == "trainer" else None
        order = Order(role, run.logs, Path.cwd(), role.max_restarts, marker)
        member = RayMember(role.spec(run.logs), order, bundle_of(role.kind, config, gpus=self._gpus))
        self._members.append(member)
        return member

    def helpers(self, crew: Crew) -> Sequence[Coroutine[Any, Any, None]]:
        return (board.serve(self._board, crew),)

    def _opened(self) -> RunConfig:
        if self._config is None:
            raise RuntimeError("place: the placement is not open")
        return self._config

    async def _clean(self, config: RunConfig) -> None:
        """Weights in the shared memory of every node that had a role and is alive; `launch` sees to this machine."""
        alive = {node["NodeID"] for node in living_nodes()}
        used = {node for member in self._members for node in member.nodes}
        await asyncio.gather(*(_clean_node(node, config) for node in alive & used))


async def _clean_node(node_id: str, config: RunConfig) -> None:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(remove_weights).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        async with asyncio.timeout(CLEAN_S):
            await task.remote(config)
    except (RayError, TimeoutError) as error:
        logger.warning("weights may be left in shared memory of Ray node %s: %s", node_id, str(error) or "no answer")
