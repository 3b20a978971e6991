"""Everything a trainer process is given, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.trainer.algorithm import BadJob, check_algorithm
from penstock.trainer.config import TrainerConfig
from penstock.trainer.engines import check_engine
from penstock.trainer.sinks import SINKS, MetricSink
from penstock.trainer.stopping import EVALUATION
from penstock.transfer_queue import Limits, TransferQueue


@dataclass(frozen=True, slots=True)
class TrainJob:
    """One run of the trainer. Every rank is given the same job."""

    config: TrainerConfig
    queue: TransferQueue
    """Connected, and its run created with `limits`."""
    limits: Limits
    model: str
    """Model folder or hub name; its weights are policy version 0."""
    run_dir: Path
    """Checkpoints, metrics, trajectories and the final model go here."""
    weights_dir: Path
    """Published versions are written here; the folder is the trainer's own."""
    train_data: str
    """Path of a Parquet or JSONL file with verl's columns."""
    eval_data: str | None = None
    eval_limit: int = 0
    """Evaluate on the first rows only; 0 takes all."""
    shuffle: bool = True
    seed: int = 0
    transport: Literal["shm", "disk", "http", "collective"] = "shm"
    weights_host: str = "127.0.0.1"
    """Under ``http`` and ``collective``: the address on which rank 0 serves the published files."""
    weights_port: int = 0
    """0 takes a free one."""
    token: str = field(default="", repr=False)
    """The run's token, asked of everyone who fetches weights over the network."""
    weights_full_every: int = 1
    """Of so many published versions one is full, the others are changes of the one before."""
    publish_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the rollout engine computes in: more bytes would be rounded away there."""
    temperature: float = 1.0
    """The sampling temperature of training episodes: the engine's logprobs are those of logits / temperature."""
    eval_timeout_s: float = 600.0
    """How long the end of the run waits for the last evaluation."""
    spill: bool = False
    """Trained trajectories wait for their commit in the queue's batch log; `queue` then has one."""
    stop_timeout_s: float = 60.0
    """After a cancellation: time for the step under way, the last checkpoint and its commit."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The run's resolved recipe as plain data, for sinks that show it."""
    watchers: Sequence[MetricSink] = ()
    """Told everything that sinks are told; they never raise and are quick. Rank 0 alone tells them."""


def check_job(job: TrainJob) -> None:
    """Raises `BadJob`, `UnknownName` for an algorithm or sink that is not registered, `BadOptions` for settings."""
    config = job.config
    if job.limits.max_staleness > 0 and config.correction is None:
        raise BadJob(
            f"max_staleness is {job.limits.max_staleness} and trainer.correction is null: stale tokens without an "
            "off-policy correction collapse a run. Set trainer.correction (truncated_is) or max_staleness=0"
        )
    check_algorithm(config, job.limits.group_size)
    if job.limits.filter_groups == "zero_variance" and config.turn_reward_weight:
        raise BadJob(
            "transfer_queue.filter_groups is zero_variance and trainer.turn_reward_weight "
            f"{config.turn_reward_weight}: groups of equal rewards would be filtered although their turns differ. Set "
            "the one to none, or the other to 0"
        )
    _check_stop(job)
    for sink in config.sinks:
        SINKS.get(sink)
    if config.minibatches > job.limits.groups_per_step:
        raise BadJob(
            f"trainer.minibatches is {config.minibatches}, groups_per_step only {job.limits.groups_per_step}: "
            "every minibatch needs a group"
        )
    check_engine(config)
    per_replica = config.parallel.layout.ranks
    if config.ranks > job.limits.groups_per_step * per_replica:
        copies = f" ({config.ranks // per_replica} copies of the model)" if per_replica > 1 else ""
        raise BadJob(
            f"trainer.ranks is {config.ranks}{copies}, groups_per_step only {job.limits.groups_per_step}: ranks train "
            "whole groups, and some would never have one. Raise groups_per_step or lower trainer.ranks"
        )
    if job.transport in ("http", "collective") and not job.token:
        raise BadJob(f"weights over {job.transport} need the run's token: anybody could read them")
    if job.temperature <= 0:
        raise BadJob(f"temperature is {job.temperature}: training episodes must be sampled, not greedy")


def _check_stop(job: TrainJob) -> None:
    stop, every = job.config.stop, job.config.eval_every
    if stop.enabled and stop.metric.startswith(EVALUATION) and not (job.eval_data and every):
        missing = "data.eval is not set" if not job.eval_data else "trainer.eval_every is 0"
        raise BadJob(f"trainer.stop.metric is {stop.metric}, and {missing}: it would never be there")
