"""gpu.yaml: which NVIDIA GPUs the trainer has and which each rollout server has.

Compose gives every copy of a service the same devices, so `--scale` cannot spread servers over GPUs: each server with
GPUs of its own is a service of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.deploy.load_config import ConfigError

HEADER = "# Which NVIDIA GPUs each service has, by their numbers in nvidia-smi. Needs the NVIDIA container toolkit.\n"


def gpu_file(compose: Path, trainer: str, rollouts: Sequence[str]) -> str:
    """The override file: `trainer`'s and each server's GPUs as in ``0,1``. Raises `ConfigError` for one given twice."""
    groups = [_numbers(group) for group in (trainer, *rollouts)]
    given = [number for group in groups for number in group]
    if twice := sorted({number for number in given if given.count(number) > 1}):
        raise ConfigError(f"GPU {', '.join(twice)} is given twice: trainer {trainer!r}, rollouts {list(rollouts)}")
    rollout = yaml.safe_load(compose.read_text())["services"]["rollout"]
    services: dict[str, Any] = {"head": _reservation(groups[0])}
    for number, devices in enumerate(groups[1:]):
        # the first is the service that is there already; the others answer to its name, where Prometheus looks for it
        services[f"rollout-{number}" if number else "rollout"] = {
            **(_another(rollout) if number else {}),
            **_reservation(devices),
        }
    return HEADER + yaml.safe_dump({"services": services}, sort_keys=False, width=200)


def _numbers(group: str) -> list[str]:
    numbers = [number.strip() for number in group.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"GPUs {group!r}: write their numbers as 0,1")
    return numbers


def _reservation(devices: Sequence[str]) -> dict[str, Any]:
    device = {"driver": "nvidia", "device_ids": list(devices), "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _another(service: dict[str, Any]) -> dict[str, Any]:
    """A copy of its own: YAML aliases between services would say that they are one."""
    another = copy.deepcopy(service)
    another["networks"] = {name: {"aliases": ["rollout"]} for name in service["networks"]}
    return another
