"""How much of a cluster each role reserves, and whether the recipe fits a cluster of several machines."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from penstock.deploy.config import RunConfig
from penstock.deploy.load_config import ConfigError
from penstock.deploy.placements.ray.config import Bundle
from penstock.deploy.plan import Kind


def bundle_of(kind: Kind, config: RunConfig, *, gpus: bool) -> Bundle:
    """The bundle that a role of this kind reserves; `gpus`: whether the cluster has any. Zeros are left out."""
    trainer = config.trainer
    usual: Mapping[str, Bundle] = {
        "rollout": {"CPU": 1, "GPU": float(gpus)},
        "agent": {"CPU": 1},
        "trainer": {"CPU": trainer.ranks * trainer.threads, "GPU": trainer.ranks * float(gpus)},
    }
    asked: Mapping[str, Bundle] = {
        "rollout": config.ray.rollout,
        "agent": config.ray.agent,
        "trainer": config.ray.trainer,
    }
    return {name: amount for name, amount in {**usual[kind], **asked[kind]}.items() if amount}


def check_machines(config: RunConfig, machines: int) -> None:
    """Roles on several machines must reach each other: loopback and shared memory do not.

    Raises `ConfigError` that names every override which is missing.
    """
    if machines <= 1:
        return
    mends = [mend for wrong, mend in _needs(config) if wrong]
    if mends:
        lines = "\n".join(f"  {mend}" for mend in mends)
        raise ConfigError(
            f"the Ray cluster has {machines} machines, and this recipe's parts meet on one. Add:\n{lines}"
        )


def _needs(config: RunConfig) -> list[tuple[bool, str]]:
    rollout, url = config.rollout, config.transfer_queue.url
    sandbox = config.sandbox
    return [
        (url is None or _is_loopback(urlsplit(url).hostname), "transfer_queue.url=redis://HOST:6379  (docs/deploy.md)"),
        (_is_loopback(rollout.host), "rollout.host=0.0.0.0  (servers, under their machines' names)"),
        (rollout.weight_transport == "shm", "rollout.weight_transport=http  (or collective, or disk)"),
        (
            rollout.weight_transport != "disk" and _is_loopback(rollout.weights_host),
            "rollout.weights_host=0.0.0.0  (the trainer, under its machine's name)",
        ),
        (
            sandbox.backend == "remote" and _is_loopback(urlsplit(sandbox.url or "").hostname),
            "sandbox.url=http://HOST:8700  (one that every machine reaches)",
        ),
    ]


def _is_loopback(host: str | None) -> bool:
    """Nothing counts as loopback: it is what everything here listens on unless told otherwise."""
    if not host or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
