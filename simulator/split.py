"""Advice: what limits a described cluster, which split of the same GPUs would be faster, and whether lending pays."""

from __future__ import annotations

from dataclasses import replace

from penstock.simulator.config import Simulation
from penstock.simulator.pipeline import simulate
from penstock.simulator.result import Result

WORTH_IT = 0.97
"""A split is recommended if its step takes at most this share of the time."""
IDLE = 0.05
"""Share of the time that the trainer must wait before it is asked whether it should lend its GPUs."""


def advised(config: Simulation) -> Result:
    """The run with `advice` filled in. Simulates the other splits too, so it takes some times as long."""
    result = simulate(config)
    return replace(result, advice=f"{limit(config, result)} {_split(config, result)}{_lending(config, result)}")


def _lending(config: Simulation, result: Result) -> str:
    """Nothing where the trainer lends already, hardly waits, or has no separate GPUs on which a server fits."""
    fits = config.trainer.ranks * config.trainer.gpus >= config.rollout.gpus
    if config.lend or config.colocated or config.cores or not fits or result.trainer_bubble < IDLE:
        return ""
    step_s = simulate(config.model_copy(update={"lend": True})).step_s
    with_it = (
        f"with placement.lend a step would take {step_s:.1f} s, {config.hand_over_s:g} s for each hand-over counted"
    )
    return (
        f" It pays to lend: {with_it}." if step_s <= WORTH_IT * result.step_s else f" Lending does not pay: {with_it}."
    )


def limit(config: Simulation, result: Result) -> str:
    """Describes in one sentence which side waits."""
    trainer, rollout = result.trainer_bubble, result.rollout_bubble
    if config.max_staleness == 0:
        return f"Synchronous: the trainer waits {trainer:.0%} of the time, rollout servers {rollout:.0%}."
    if trainer < IDLE:
        return f"The trainer is the limit: it waits {trainer:.0%} of the time, rollout servers {rollout:.0%}."
    if rollout < 0.05:
        return f"Rollout is the limit: servers wait {rollout:.0%} of the time, the trainer {trainer:.0%}."
    return (
        f"Neither is busy all the time: the trainer waits {trainer:.0%}, rollout servers {rollout:.0%}. "
        "A higher max_staleness, or shorter stragglers, would let them overlap."
    )


def splits(config: Simulation) -> list[Simulation]:
    """Returns setups that divide the same GPUs in other ways; sizes stay, and each has a server and a rank."""
    configs: dict[tuple[int, int], Simulation] = {}
    for share in (0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
        servers = max(1, round(share * config.gpus / config.rollout.gpus))
        ranks = int((config.gpus - servers * config.rollout.gpus) // config.trainer.gpus)
        if ranks < 1 or (servers, ranks) == (config.rollout.servers, config.trainer.ranks):
            continue
        rollout = config.rollout.model_copy(update={"servers": servers})
        trainer = config.trainer.model_copy(update={"ranks": ranks})
        configs[servers, ranks] = config.model_copy(update={"rollout": rollout, "trainer": trainer})
    return list(configs.values())


def _split(config: Simulation, result: Result) -> str:
    if config.colocated or config.cores:
        return "Roles share their machines, so no split can be changed."
    tried = [(simulate(other).step_s, other) for other in splits(config)]
    if not tried:
        return "There are too few GPUs for another split."
    step_s, best = min(tried, key=lambda pair: pair[0])
    if step_s > WORTH_IT * result.step_s:
        return f"No other split of the {config.gpus:g} GPUs that was tried is faster."
    return (
        f"{best.rollout.servers} servers and {best.trainer.ranks} ranks on the same {config.gpus:g} GPUs would take "
        f"{step_s:.1f} s per step instead of {result.step_s:.1f} s."
    )
