"""The time between SIGTERM and SIGKILL for the trainer, and the longer times of what supervises it.

    trainer                           stop_grace_s = S        a checkpoint is written and committed
    torchrun, supervisor              S + 5, S + 15           then they kill it
    Slurm's --signal                  S + 35                  the head sums up, its roles end
    Compose, Kubernetes               S + 65

Without `trainer.stop_grace_s` S follows from what a rank writes into a checkpoint, at the rate of the save's own
deadline (`SLOWEST_BYTES_PER_S`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, human, warning
from penstock.deploy.preflight.disk import existing_folder, measure
from penstock.deploy.preflight.memory import checkpoint_bytes
from penstock.deploy.preflight.model_shape import find_shape
from penstock.deploy.run.plan import TRAINER_STOP_S, trainer_stop_s
from penstock.trainer import SLOWEST_BYTES_PER_S

AROUND_SAVE_S = 15.0
"""For the micro batch under way, the copy of the state and the commit."""
SLURM_S, CONTAINER_S = 35.0, 65.0
"""Seconds for the head and its other roles, in addition to the trainer's grace."""
GRACE_VARIABLE = "PENSTOCK_STOP_GRACE_S"
"""Seconds between SIGTERM to the head and SIGKILL. The Slurm script, Compose or the chart sets it."""


def with_stop_grace(config: RunConfig) -> RunConfig:
    """Return the config with `trainer.stop_grace_s` as a number. Raises `ConfigError` for a model whose config.json
    cannot be read."""
    if config.trainer.stop_grace_s is not None:
        return config
    shape, _ = find_shape(config)
    share = checkpoint_bytes(config, shape) / config.trainer.ranks if shape else 0.0
    grace_s = max(TRAINER_STOP_S, math.ceil(AROUND_SAVE_S + share / SLOWEST_BYTES_PER_S))
    trainer = config.trainer.model_copy(update={"stop_grace_s": grace_s})
    return config.model_copy(update={"trainer": trainer})


def head_grace_s(config: RunConfig, around_s: float) -> int:
    """Whole seconds between SIGTERM to the head and SIGKILL."""
    return math.ceil(trainer_stop_s(with_stop_grace(config).trainer) + around_s)


def check_stop_grace(config: RunConfig) -> Iterator[Check]:
    """A warning for every known grace in which the last checkpoint will hardly be written."""
    shape, _ = find_shape(config)
    if shape is None:
        return
    try:
        rate, _ = measure(existing_folder(config))
    except OSError:  # `check_disk` says so
        return
    size = checkpoint_bytes(config, shape)
    expected_s, name = AROUND_SAVE_S + size / rate, "stop grace"
    parts = f"{AROUND_SAVE_S:.0f} s for the step under way, the rest for {human(size)} at {human(rate)}/s"
    save = f"to save after SIGTERM takes about {expected_s:.0f} s ({parts})"
    short = [(what, fix) for what, seconds, fix in _known_graces(config) if seconds < expected_s]
    for what, fix in short:
        yield warning(name, f"{save}, and {what}: a preempted trainer loses the steps since its last checkpoint", fix)
    if not short:
        yield Check(name, True, f"{save}; the trainer has {trainer_stop_s(with_stop_grace(config).trainer):.0f} s")


def _known_graces(config: RunConfig) -> Iterator[tuple[str, float, str]]:
    """(what it is, seconds that it leaves to the trainer, how it becomes longer)"""
    configured_s = config.trainer.stop_grace_s
    if configured_s is not None:
        yield f"trainer.stop_grace_s is {configured_s:g}", configured_s, "raise trainer.stop_grace_s, or leave it out"
    outside = os.environ.get(GRACE_VARIABLE, "")
    if re.fullmatch(r"\d+", outside):
        around = SLURM_S if "SLURM_JOB_ID" in os.environ else CONTAINER_S
        where = f"this head is killed {outside} s after SIGTERM ({GRACE_VARIABLE})"
        yield where, float(outside) - around, "raise head.stopSeconds (Kubernetes) or stop_grace_period (Compose)"
    if shutil.which("scontrol") is None:
        return
    command, slurm = ["scontrol", "show", "config"], ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # none is reached: nothing is known of its grace
        slurm = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True).stdout
    if match := re.search(r"^KillWait\s*=\s*(\d+)", slurm, re.MULTILINE):  # for a preempted or requeued job
        fix = "lower trainer.checkpoint_every, or have the administrator raise KillWait in slurm.conf"
        yield f"Slurm's KillWait is {match[1]} s", float(match[1]), fix
