"""The connection to a Ray cluster, and the resources that each role reserves there."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.common import is_loopback
from penstock.deploy.config import Bundle, RunConfig
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.plan import Kind
from penstock.trainer import CORES_VARIABLE

AUTO = "auto"
INSTALL = "Ray is not installed here: pip install 'penstock[ray]', in the version that the cluster has"


def namespace_of(run: str) -> str:
    """Ray's namespace of a run: its named actors are no other run's."""
    return f"penstock-{run}"


@contextlib.asynccontextmanager
async def connected(address: str | None, run: str) -> AsyncIterator[None]:
    """A driver of the cluster at `address` (None: RAY_ADDRESS, else the one on this machine) while the block is open.

    Entered on the main thread, where Ray takes SIGTERM: who wants it takes it afterwards. Raises `ConfigError`.
    """
    connect(address, run)
    import ray

    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


def connect(address: str | None, run: str) -> None:
    """Raises `ConfigError` naming what is missing."""
    address = address or os.environ.get("RAY_ADDRESS") or AUTO
    if address == "local" or "://" in address:
        raise ConfigError(
            f"--ray-address {address!r}: give HOST:PORT of a running cluster (or auto), from one of its machines;"
            " `ray start --head` makes one"
        )
    try:
        import ray
        from ray.exceptions import AuthenticationError
    except ImportError as error:
        raise ConfigError(f"{INSTALL} ({error})") from None
    try:
        ray.init(address=address, namespace=namespace_of(run), log_to_driver=False, configure_logging=False)
    except AuthenticationError as error:
        fix = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as the cluster was started with"
        raise ConfigError(f"the Ray cluster at {address} asks for its token. Set {fix} ({error})") from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no way to a Ray cluster at {address}: {error}") from error


def living_nodes() -> list[dict[str, Any]]:
    """Return the living nodes, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def has_gpus(nodes: Iterable[dict[str, Any]]) -> bool:
    return any(node["Resources"].get("GPU") for node in nodes)


def machines_of(nodes: Iterable[dict[str, Any]]) -> set[str]:
    """Hosts: several nodes may be on one of them."""
    return {str(node["NodeManagerHostname"]) for node in nodes}


def bundle_of(kind: Kind, config: RunConfig, *, gpus: bool) -> Bundle:
    """The bundle that a role of this kind reserves; `gpus`: whether the cluster has any. Zeros are left out."""
    trainer = config.trainer
    usual: Mapping[str, Bundle] = {
        "rollout": {"CPU": 1, "GPU": float(gpus)},
        "agent": {"CPU": 1},
        "trainer": {"CPU": trainer.ranks * (trainer.threads or 1), "GPU": trainer.ranks * float(gpus)},
    }
    configured: Mapping[str, Bundle] = {
        "rollout": config.ray.rollout,
        "agent": config.ray.agent,
        "trainer": config.ray.trainer,
    }
    return {name: amount for name, amount in {**usual[kind], **configured[kind]}.items() if amount}


def environment_of(kind: Kind, bundle: Bundle) -> dict[str, str]:
    """Variables that tell a role what its bundle reserves: the trainer's ranks share its CPUs, not the whole node's."""
    return {CORES_VARIABLE: f"{max(1, int(bundle.get('CPU', 0)))}"} if kind == "trainer" else {}


def check_machines(config: RunConfig, machines: int) -> None:
    """Roles on several machines must reach each other: loopback and shared memory do not.

    Raises `ConfigError` that names every override which is missing.
    """
    if machines <= 1:
        return
    rollout, sandbox, url = config.rollout, config.sandbox, config.transfer_queue.url
    needs = {
        "transfer_queue.url=redis://HOST:6379  (a Redis that every node reaches)": url is None
        or is_loopback(urlsplit(url).hostname),
        "rollout.host=0.0.0.0  (servers, under their machines' names)": is_loopback(rollout.host),
        "rollout.weight_transport=http  (or broadcast, nccl, disk)": rollout.weight_transport == "shm",
        "rollout.weights_host=0.0.0.0  (the trainer, under its machine's name)": rollout.weight_transport != "disk"
        and is_loopback(rollout.weights_host),
        "sandbox.url=http://HOST:8700  (one that every machine reaches)": sandbox.backend == "remote"
        and is_loopback(urlsplit(sandbox.url or "").hostname),
    }
    fixes = [fix for fix, is_missing in needs.items() if is_missing]
    if fixes:
        lines = "\n".join(f"  {fix}" for fix in fixes)
        raise ConfigError(
            f"the Ray cluster has {machines} machines, and this recipe's parts meet on one. Add:\n{lines}"
        )
