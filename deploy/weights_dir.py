"""Where a run's published weights lie, on the trainer's machine and on each one with servers."""

from __future__ import annotations

import shutil
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from penstock.deploy.config import RunConfig
from penstock.deploy.run_dir import RunDir

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - files there belong to one run, mode 0600, and the run removes them


def weights_dir(config: RunConfig) -> Path:
    """Shared memory, also where HTTP serves them; or the run's folder on a shared disk."""
    if config.rollout.weight_transport == "disk":
        return RunDir.of(config).root / "weights"
    return local_weights_dir(config)


def local_weights_dir(config: RunConfig) -> Path:
    """Where servers of this machine keep what they fetched or merged; under a shared disk not that disk.

    Runs of one name in two folders have two of them: the first to end would take the other's weights away.
    """
    place = xxh3_64_hexdigest(bytes(RunDir.of(config).root))[:8]
    return SHARED_MEMORY / f"penstock-{config.name}-{place}"


def remove_weights(config: RunConfig) -> None:
    """Both folders, of this machine; nobody of the run reads them any more."""
    for directory in {weights_dir(config), local_weights_dir(config)}:
        shutil.rmtree(directory, ignore_errors=True)
