"""Checks that the parts of a run and of its algorithm fit together, before anything is loaded."""

from __future__ import annotations

from penstock.trainer.config import TrainerConfig
from penstock.trainer.engines import check_engine
from penstock.trainer.job import BadJob, TrainJob, needs_of_advantage
from penstock.trainer.sinks import SINKS
from penstock.trainer.stopping import EVALUATION


def check_job(job: TrainJob) -> None:
    """Raises `BadJob`, `UnknownName` for an algorithm or sink that is not registered, `BadOptions` for settings."""
    config = job.config
    if job.limits.max_staleness > 0 and config.correction is None:
        raise BadJob(
            f"max_staleness is {job.limits.max_staleness} and trainer.correction is null: stale tokens without an "
            "off-policy correction collapse a run. Set trainer.correction (truncated_is) or max_staleness=0"
        )
    check_algorithm(config, job.limits.group_size)
    _check_branches(job)
    _check_filter(job)
    _check_top_k(job)
    stop = config.stop
    if stop.enabled and stop.metric.startswith(EVALUATION) and not (job.data.eval and config.eval_every):
        missing = "data.eval is not set" if not job.data.eval else "trainer.eval_every is 0"
        raise BadJob(f"trainer.stop.metric is {stop.metric}, and {missing}: it would never be there")
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
    if job.rollout.manifest_transport in ("http", "broadcast") and not job.run.token:
        raise BadJob(f"weights over {job.rollout.manifest_transport} need the run's token: anybody could read them")
    if job.temperature <= 0:
        raise BadJob(f"temperature is {job.temperature}: training episodes must be sampled, not greedy")


def _check_branches(job: TrainJob) -> None:
    if job.limits.branches and "greedy" in needs_of_advantage(job.config):
        raise BadJob(
            f"trainer.advantage={job.config.advantage} has a greedy member, which is not trained on, and branches of it"
            " would share its tokens: set agent.forks=null, or another trainer.advantage"
        )


def _check_filter(job: TrainJob) -> None:
    """Groups of equal rewards may still have something to learn from, or something to say."""
    config = job.config
    if job.limits.filter_groups != "zero_variance":
        return
    if config.turn_reward_weight:
        raise BadJob(
            "transfer_queue.filter_groups is zero_variance and trainer.turn_reward_weight "
            f"{config.turn_reward_weight}: groups of equal rewards would be filtered although their turns differ. Set "
            "the one to none, or the other to 0"
        )
    if config.distill.enabled:
        raise BadJob(
            "transfer_queue.filter_groups is zero_variance and trainer.distill is on: groups of equal rewards would be "
            "filtered although the teacher judges their tokens. Set transfer_queue.filter_groups=none"
        )
    if job.data.curriculum is not None:
        raise BadJob(
            "transfer_queue.filter_groups is zero_variance and data.curriculum is on: groups that are filtered never "
            "say how often their rows are passed. Set transfer_queue.filter_groups=none; easy and hard rows come "
            "seldom anyway"
        )
    single = [source for source, own in config.sources.items() if own.group_size == 1]
    if single:
        raise BadJob(
            f"transfer_queue.filter_groups is zero_variance and trainer.sources.{single[0]}.group_size 1: every group "
            "of it would be filtered. Set the one to none, or the other to 2 or more"
        )


def _check_top_k(job: TrainJob) -> None:
    """Refuse a teacher's top_k that nothing learns from."""
    top_ks, config, distill = job.run.teacher_top_k, job.config, job.config.distill
    if any(top_ks) and not distill.in_loss:
        raise BadJob(
            f"agent.teachers.*.top_k is {max(top_ks)} and trainer.distill.in_loss 0: an advantage is of the sampled "
            "token alone, and the likeliest ids would be carried for nothing. Set trainer.distill.in_loss, or "
            "agent.teachers.*.top_k=0"
        )
    if any(top_ks) and config.engine == "megatron":
        raise BadJob(
            f"agent.teachers.*.top_k is {max(top_ks)}, and trainer.engine megatron says nothing of other ids than the "
            "sampled ones: set trainer.engine=fsdp, or agent.teachers.*.top_k=0"
        )
    if distill.divergence != "reverse_kl" and not (top_ks and all(top_ks)):
        raise BadJob(
            f"trainer.distill.divergence is {distill.divergence}, and a sampled token estimates the reverse KL alone: "
            "set agent.teachers.*.top_k of every teacher, or trainer.distill.divergence=reverse_kl"
        )


def check_algorithm(config: TrainerConfig, group_size: int) -> None:
    """Raises `BadJob`, `UnknownName` or `BadOptions`."""
    from penstock.trainer.advantages import ADVANTAGES
    from penstock.trainer.corrections import CORRECTIONS
    from penstock.trainer.filters import FILTERS
    from penstock.trainer.losses import LOSSES

    ADVANTAGES.bind(config.advantage, config.advantage_options)
    LOSSES.bind(config.loss, config.loss_options)
    if config.correction is not None:
        CORRECTIONS.bind(config.correction, config.correction_options)
    if config.filter is not None:
        FILTERS.bind(config.filter, config.filter_options)
    _check_needs(config, group_size)
    _check_sources(config, group_size)
    _check_settings(config)


def _check_sources(config: TrainerConfig, group_size: int) -> None:
    """A critic, an implicit reward model or a greedy member are of the whole run, so no source can have its own."""
    from penstock.trainer.advantages import ADVANTAGES, needs_of

    usual = (config.advantage, config.advantage_options, group_size)
    names = {"trainer.advantage": usual} if any(own.advantage for own in config.sources.values()) else {}
    names |= {
        f"trainer.sources.{source}.advantage": (own.advantage, own.advantage_options, own.group_size or group_size)
        for source, own in config.sources.items()
        if own.advantage is not None
    }
    for key, (name, options, size) in names.items():
        ADVANTAGES.bind(name, options)
        needs = needs_of(ADVANTAGES.get(name))
        if needs - {"groups"}:
            raise BadJob(
                f"{key}={name} needs a critic, an implicit reward model or a greedy member, which tasks of other "
                "estimators do not have: under trainer.sources choose estimators without, such as grpo, rloo, dr_grpo"
            )
        if "groups" in needs and size < 2:
            raise BadJob(f"{key}={name} compares the episodes of one task: set group_size to 2 or more")
    for source, own in config.sources.items():
        if own.advantage is None and own.group_size == 1 and needs_of_advantage(config) & {"groups", "greedy"}:
            raise BadJob(
                f"trainer.sources.{source}.group_size is 1, and trainer.advantage={config.advantage} compares the "
                f"episodes of one task: set it to 2 or more, or trainer.sources.{source}.advantage"
            )


def _check_needs(config: TrainerConfig, group_size: int) -> None:
    """Check the needs of estimator and loss."""
    from penstock.trainer.advantages import needs_of
    from penstock.trainer.losses import LOSSES

    needs = needs_of_advantage(config)
    if needs & {"groups", "greedy"} and group_size < 2:
        raise BadJob(
            f"trainer.advantage={config.advantage} compares the episodes of one task, and group_size is {group_size}: "
            "set group_size to 2 or more"
        )
    if config.critic.warmup_steps and not needs & {"values", "implicit"}:
        raise BadJob(
            f"trainer.critic.warmup_steps is {config.critic.warmup_steps}, and trainer.advantage={config.advantage} "
            "has no critic: use gae, turn_gae, vapo or prime"
        )
    needs = needs_of(LOSSES.get(config.loss))
    smallest = min([group_size, *(own.group_size or group_size for own in config.sources.values())])
    if "groups" in needs and smallest < 2:
        raise BadJob(f"trainer.loss={config.loss} compares the episodes of one task: set group_size to 2 or more")
    if "sequences" in needs and config.aggregation not in ("episode_sum", "constant"):
        raise BadJob(
            f"trainer.loss={config.loss} is one number per episode, and trainer.aggregation={config.aggregation} would "
            "divide it by its tokens: set trainer.aggregation=episode_sum"
        )


def _check_settings(config: TrainerConfig) -> None:
    if config.aggregation == "constant" and not config.aggregation_length:
        raise BadJob("trainer.aggregation=constant divides by trainer.aggregation_length, which is 0: set it")
    if config.kl.target is not None and not config.kl.in_reward:
        raise BadJob("trainer.kl.target steers trainer.kl.in_reward, which is 0: set its start value")
    if config.proximal == "behaviour" and config.correction is not None:
        raise BadJob(
            "trainer.proximal=behaviour leaves nothing for a correction to correct: set trainer.correction=null and "
            "max_staleness=0, or another trainer.proximal"
        )
