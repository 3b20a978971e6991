"""Do the parts of a run's algorithm fit together? Asked before anything is loaded."""

from __future__ import annotations

from penstock.trainer.config import TrainerConfig

GREEDY_MEMBER = 0
"""Of each group, where the algorithm needs a greedy episode: it is the baseline and is not trained on."""


class BadJob(ValueError):
    """The job cannot be right; the message names the setting and the mend."""


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
    _check_needs(config, needs_of_advantage(config), group_size)
    _check_settings(config)


def needs_of_advantage(config: TrainerConfig) -> frozenset[str]:
    """What the run must have for its estimator, see `registry.needs_of`."""
    from penstock.trainer.advantages import ADVANTAGES
    from penstock.trainer.registry import needs_of

    return needs_of(ADVANTAGES.get(config.advantage))


def _check_needs(config: TrainerConfig, needs: frozenset[str], group_size: int) -> None:
    if needs & {"groups", "greedy"} and group_size < 2:
        raise BadJob(
            f"trainer.advantage={config.advantage} compares the episodes of one task, and group_size is {group_size}: "
            "set group_size to 2 or more"
        )
    if config.critic.warmup_steps and "values" not in needs:
        raise BadJob(
            f"trainer.critic.warmup_steps is {config.critic.warmup_steps}, and trainer.advantage={config.advantage} "
            "has no critic: use gae, turn_gae or vapo"
        )


def _check_settings(config: TrainerConfig) -> None:
    if config.aggregation == "constant" and not config.aggregation_length:
        raise BadJob("trainer.aggregation=constant divides by trainer.aggregation_length, which is 0: set it")
    if config.kl.target is not None and not config.kl.in_reward:
        raise BadJob("trainer.kl.target steers trainer.kl.in_reward, which is 0: set where it starts")
    if config.proximal == "behaviour" and config.correction is not None:
        raise BadJob(
            "trainer.proximal=behaviour leaves nothing for a correction to correct: set trainer.correction=null and "
            "max_staleness=0, or another trainer.proximal"
        )
