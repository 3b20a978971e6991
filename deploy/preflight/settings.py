"""Whether the settings of a run fit together: found without looking at the machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.link import limits_of
from penstock.deploy.preflight.check import Check
from penstock.deploy.preflight.sources import data_sources


def check_correction(config: RunConfig) -> Check:
    needed = config.max_staleness > 0 and config.trainer.correction is None
    return Check(
        "trainer.correction",
        not needed,
        f"{config.trainer.correction} at max_staleness {config.max_staleness}",
        "stale tokens need an off-policy correction: set trainer.correction=truncated_is, or max_staleness=0",
    )


def check_algorithm(config: RunConfig) -> Check | None:
    if importlib.util.find_spec("torch") is None:  # not a machine that trains
        return None
    from penstock.trainer import check_algorithm

    found = f"{config.trainer.advantage}, {config.trainer.loss}, {config.group_size} episodes per task"
    try:
        check_algorithm(config.trainer, config.group_size)
    except ValueError as error:
        return Check("trainer.advantage", False, found, str(error))
    return Check("trainer.advantage", True, found)


def check_training_engine(config: RunConfig) -> Check | None:
    if importlib.util.find_spec("torch") is None:
        return None
    from penstock.trainer.engines import check_engine

    trainer = config.trainer
    found = f"{trainer.engine}, {trainer.ranks} ranks"
    try:
        check_engine(trainer)
    except ValueError as error:
        return Check("trainer.engine", False, found, str(error))
    return Check("trainer.engine", True, found)


def check_lengths(config: RunConfig) -> Check:
    room = config.rollout.max_model_len - config.agent.max_response_tokens
    return Check(
        "rollout.max_model_len",
        room > 0,
        f"{config.rollout.max_model_len}, responses up to {config.agent.max_response_tokens}: {room} left for prompts",
        "a prompt and its response must fit: raise rollout.max_model_len or lower agent.max_response_tokens",
    )


def check_sampling(config: RunConfig) -> Check:
    agent = config.agent
    return Check(
        "rollout.truncated_sampling",
        config.rollout.truncated_sampling or (agent.top_p >= 1.0 and agent.top_k <= 0),
        f"top_p {agent.top_p:g}, top_k {agent.top_k}",
        "truncated sampling biases the policy gradient and is refused: leave agent.top_p at 1 and agent.top_k at -1,"
        " or set rollout.truncated_sampling=true",
    )


def check_capacity(config: RunConfig) -> Check:
    from penstock.transfer_queue import QueueError, check_limits, check_quotas, check_step_bytes

    limits = limits_of(config)
    try:
        check_limits(limits)
        check_step_bytes(limits, config.agent.max_response_tokens)
        check_quotas(limits, data_sources(config) if limits.quotas else [])
    except QueueError as error:
        return Check("transfer_queue", False, "no step could be filled or held", str(error))
    return Check("transfer_queue", True, f"a step of {limits.groups_per_step} groups can be filled and held")


def check_training_job(config: RunConfig) -> Check | None:
    """What the trainer itself would refuse, beyond the checks above."""
    if importlib.util.find_spec("torch") is None:
        return None
    above = (check_correction(config), check_algorithm(config), check_training_engine(config))
    if not all(check is None or check.ok for check in above):
        return None
    from penstock.trainer import TrainJob, check_job
    from penstock.transfer_queue import MemoryTransferQueue

    job = TrainJob(
        config.trainer,
        MemoryTransferQueue(),  # nobody asks it
        limits_of(config),
        config.model,
        run_dir=Path(),
        weights_dir=Path(),
        train_data=config.data.train,
        eval_data=config.data.eval,
        transport=config.rollout.weight_transport,
        token="made when it starts",  # noqa: S106 - in its place
        temperature=config.agent.temperature,
    )
    try:
        check_job(job)
    except ValueError as error:
        return Check("trainer settings", False, "the trainer would refuse them", str(error))
    return Check("trainer settings", True, f"{config.trainer.steps} steps of {config.groups_per_step} groups")
