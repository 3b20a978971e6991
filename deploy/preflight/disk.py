"""Checks of the run's folder: enough free space, and writes fast enough."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, human, warning
from penstock.deploy.preflight.memory import checkpoint_bytes, published_bytes
from penstock.deploy.preflight.model_shape import model_shape
from penstock.deploy.preflight.rank_memory import MASTER
from penstock.deploy.preflight.routing import token_bytes
from penstock.deploy.run_dir import RunDir

PROBE_BYTES = 32 << 20
CHUNK_BYTES = 4 << 20
SLOW_SYNC_S, SLOW_CHECKPOINT_S, HOPELESS_CHECKPOINT_S = 1.0, 60.0, 900.0
"""Redis stops writing where an fsync takes over two seconds; a checkpoint under way holds the next one up."""
ELSEWHERE = "set runs_dir to a folder on a local disk or SSD"


def check_room(config: RunConfig) -> Check | None:
    shape = model_shape(config)
    if shape is None:
        return None
    checkpoint = checkpoint_bytes(config, shape)
    count = config.trainer.keep_checkpoints + 1  # the one that is written next to those that stay
    on_disk = config.rollout.weight_transport == "disk"
    parts = {
        f"{count} checkpoints of {human(checkpoint)}": count * checkpoint,
        "final model": MASTER * shape.parameters,
        "steps between two checkpoints": config.trainer.checkpoint_every * step_bytes(config),
        "published weights": published_bytes(shape.parameters, config) if on_disk else 0,
    }
    folder = existing_folder(config)
    needed, free = sum(parts.values()), shutil.disk_usage(folder).free
    listed = ", ".join(name for name, size in parts.items() if size)
    return Check(
        "disk room",
        free > needed,
        f"{human(needed)} needed ({listed}), {human(free)} free in {folder}",
        "free some, set runs_dir to a larger disk, or lower trainer.keep_checkpoints or trainer.checkpoint_every",
    )


def step_bytes(config: RunConfig) -> float:
    """Payloads of one step, which wait on the trainer's disk until their commit."""
    return config.groups_per_step * config.largest_group * config.agent.most_response_tokens * token_bytes(config)


def existing_folder(config: RunConfig) -> Path:
    """The run's folder, or the nearest one above it that is there already: nothing is made before a run."""
    root = RunDir.of(config).root
    return next(folder for folder in (root, *root.parents) if folder.is_dir())


def check_disk(config: RunConfig) -> Check:
    folder = existing_folder(config)
    try:
        rate, sync_s = measure(folder)
    except OSError as error:
        fix = f"free some room, lift the limit (`ulimit -f`, quotas), or {ELSEWHERE} that you may write to"
        return Check("disk", False, f"{human(PROBE_BYTES)} cannot be written in {folder}: {error.strerror}", fix)
    shape = model_shape(config)
    checkpoint_s = checkpoint_bytes(config, shape) / rate if shape else 0.0
    speed = f"{human(rate)}/s and {1000 * sync_s:.0f} ms per small fsync"
    took = "less than a second" if checkpoint_s < 1 else f"{checkpoint_s:.0f} s"
    detail = f"{speed} in {folder}{f'; writing a checkpoint takes {took}' if shape else ''}"
    if sync_s > SLOW_SYNC_S or checkpoint_s > HOPELESS_CHECKPOINT_S:
        return Check("disk", False, detail, ELSEWHERE)
    if checkpoint_s > SLOW_CHECKPOINT_S:
        return warning("disk", detail, f"{ELSEWHERE}, or raise trainer.checkpoint_every")
    return Check("disk", True, detail)


def measure(folder: Path) -> tuple[float, float]:
    """Bytes per second of a long write with its fsync, and seconds of a small one. Raises `OSError`; leaves nothing."""
    descriptor, name = tempfile.mkstemp(prefix=".penstock-doctor-", dir=folder)
    try:
        began = time.monotonic()
        chunk = os.urandom(CHUNK_BYTES)  # a disk that compresses must not look fast
        with open(descriptor, "wb", closefd=False) as file:
            for _ in range(PROBE_BYTES // CHUNK_BYTES):
                file.write(chunk)
        os.fsync(descriptor)
        rate, small_s = PROBE_BYTES / (time.monotonic() - began), []
        for _ in range(9):
            began = time.monotonic()
            os.write(descriptor, b"penstock doctor\n")
            os.fsync(descriptor)
            small_s.append(time.monotonic() - began)
        return rate, statistics.median(small_s)
    finally:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
