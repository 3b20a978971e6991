"""Whether published weights fit into shared memory, which containers have little of."""

from __future__ import annotations

import shutil
from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.resources import human
from penstock.deploy.weights_dir import SHARED_MEMORY


def check_shared_memory(config: RunConfig) -> Check | None:
    """Three copies of the weights at once: the version that is read, the one that is written, and one in between."""
    folder = Path(config.model)
    if config.rollout.weight_transport == "disk" or not folder.is_dir():
        return None
    needed = 3 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return Check(
        "shared memory",
        free > needed,
        f"{human(needed)} of {human(free)} free in {SHARED_MEMORY}",
        "free some, give the container more (--shm-size), or set rollout.weight_transport=disk",
    )
