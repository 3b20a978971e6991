"""Everything a trainer process is given, checked before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.common import cores
from penstock.rollout_server import RolloutConfig
from penstock.trainer.config import TrainerConfig
from penstock.trainer.data.config import DataConfig
from penstock.trainer.ranks.layout import CORES_VARIABLE
from penstock.trainer.sinks import MetricSink
from penstock.transfer_queue import Limits, RunContext, TurnSettings

if TYPE_CHECKING:
    from penstock.transfer_queue import Archive


@dataclass(frozen=True, slots=True)
class TrainJob:
    """One run of the trainer. Every rank is given the same job."""

    run: RunContext
    """Run whose queue was created with `limits`."""
    config: TrainerConfig
    limits: Limits
    run_dir: Path
    """Checkpoints, metrics, trajectories and the final model go here."""
    weights_dir: Path
    """Published versions are written here; the folder is the trainer's own."""
    data: DataConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Transport of versions to the servers, and the servers' dtype: more bytes would be rounded away there."""
    temperature: float = 1.0
    """The sampling temperature of training episodes: the engine's logprobs are those of logits / temperature."""
    lost_payloads: Literal["drop", "strict"] = "drop"
    """Episodes of a step whose payload is gone: dropped and counted, or the trainer ends."""
    archive: Archive | None = None
    """Trained trajectories wait here for their commit, and are kept. `run.queue` reads from it. None: they wait in the
    queue."""
    stop_timeout_s: float = 60.0
    """After a cancellation: time for the step under way, the last checkpoint and its commit."""
    turn: TurnSettings | None = None
    """Turns on devices that the ranks share with rollout engines; None: they are the trainer's own."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The run's resolved recipe as plain data, for sinks that show it."""
    watchers: Sequence[MetricSink] = ()
    """Called as sinks are, on rank 0 alone; they never raise and return quickly."""


class BadJob(ValueError):
    """The job cannot be right; the message names the setting and the fix."""


def no_replay(cause: object) -> BadJob:
    """Return the error that refuses `rollout.routing_replay` because of `cause`."""
    return BadJob(f"rollout.routing_replay: {cause}; set it to false, and the trainer's own routers choose")


def needs_of_advantage(config: TrainerConfig) -> frozenset[str]:
    """Return the needs of the run's estimator, see `advantages.needs_of`."""
    from penstock.trainer.advantages import ADVANTAGES, needs_of

    return needs_of(ADVANTAGES.get(config.advantage))


def threads_here(config: TrainerConfig) -> int:
    """CPU threads of this rank; torchrun says how many ranks its machine has, a placement what they reserved there."""
    import torch

    ranks, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), cores()
    reserved = min(there, int(os.environ.get(CORES_VARIABLE, there)))
    return config.threads_of_rank(reserved, ranks, on_gpu=torch.cuda.is_available())
