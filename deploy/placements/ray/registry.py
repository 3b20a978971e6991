"""The registry of a run on Ray: accepts scaling requests and shows where the roles are.

penstock ray scale ──request──► RunRegistry (a named actor on the driver's node) ◄──exchange── the driver, each s
penstock ray status ◄──shown──┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.plan import ADDED
from penstock.deploy.run.supervisor import Supervisor

logger = logging.getLogger("penstock.run")
NAME = "registry"
LOOK_S = 1.0


class RunRegistry:
    """No secret ever lies here: everybody in the cluster may read it."""

    def __init__(self) -> None:
        self._requested_counts: dict[str, int] = {}
        self._shown: dict[str, Any] = {}

    def ask(self, counts: dict[str, int]) -> None:
        self._requested_counts.update(counts)

    def take(self, shown: dict[str, Any]) -> dict[str, int]:
        """Return the requests since the last call; `shown` is displayed from now on."""
        self._shown = shown
        requests, self._requested_counts = self._requested_counts, {}
        return requests

    def shown(self) -> dict[str, Any]:
        return self._shown


async def create() -> Any:
    """Creates the registry on this node; it ends with this driver. Raises `ConfigError` if the run's name is taken."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # An earlier driver of this run, killed, keeps the name until Ray has noticed.
    deadline = time.monotonic() + 30.0
    while True:
        try:
            return (
                ray.remote(RunRegistry)
                .options(name=NAME, num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
                .remote()
            )
        except ValueError as error:  # the name is taken
            if time.monotonic() > deadline:
                raise ConfigError(f"name: a run of this name is going on in this Ray cluster ({error})") from error
        await asyncio.sleep(LOOK_S)


async def serve(registry: Any, supervisor: Supervisor) -> None:
    """Until cancelled, or until the registry is gone for good: the run continues without."""
    from ray.exceptions import RayError

    while True:
        try:
            requests = await registry.take.remote(describe(supervisor))
        except RayError as error:
            logger.warning("`penstock ray` has no way to this run any more: %s", error)
            return
        for kind, count in requests.items():
            logger.info("from now on %d of role %s", count, kind)
            supervisor.resize(kind, count)
        await asyncio.sleep(LOOK_S)


def describe(supervisor: Supervisor) -> dict[str, Any]:
    """Counts by kind, and each role's state."""
    roles = {m.spec.name: {"state": m.state, "restarts": m.restarts} for m in supervisor.members}
    return {"count": {kind: len(supervisor.present(kind)) for kind in ADDED}, "roles": roles}


def find_registry(run: str) -> Any:
    """Return the run's registry, from a driver in the run's namespace. Raises `ConfigError`."""
    import ray

    try:
        return ray.get_actor(NAME)
    except ValueError:
        raise ConfigError(f"no run {run} is going on in this Ray cluster (was it started with --on ray?)") from None


def parse_counts(words: list[str]) -> Mapping[str, int]:
    """``rollout=4 agent=3``. Raises `ConfigError` that names the word."""
    counts = {}
    for word in words:
        kind, _, number = word.partition("=")
        if kind not in ADDED or not number.isdecimal():
            raise ConfigError(f"{word!r}: write KIND=COUNT, where KIND is {' or '.join(ADDED)}, for example rollout=4")
        counts[kind] = int(number)
    return counts
