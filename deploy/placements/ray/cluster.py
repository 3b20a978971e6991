"""The way to a running Ray cluster, and what it has."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

from penstock.deploy.load_config import ConfigError

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
        ray.init(
            address=address,
            namespace=namespace_of(run),
            log_to_driver=False,
            configure_logging=False,
        )
    except AuthenticationError as error:
        mend = "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as the cluster was started with"
        raise ConfigError(f"the Ray cluster at {address} asks for its token. Set {mend} ({error})") from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no way to a Ray cluster at {address}: {error}") from error


def living_nodes() -> list[dict[str, Any]]:
    """As Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def has_gpus(nodes: Iterable[dict[str, Any]]) -> bool:
    return any(node["Resources"].get("GPU") for node in nodes)


def machines_of(nodes: Iterable[dict[str, Any]]) -> set[str]:
    """Hosts: several nodes may be on one of them."""
    return {str(node["NodeManagerHostname"]) for node in nodes}
