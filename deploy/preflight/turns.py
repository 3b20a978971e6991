"""Requirements of `placement.colocated` and `placement.lend`: settings that go together, and each side's memory while
the other one sleeps.

    engines' turn    =  servers: weights + KV cache        trainer: nothing but what its process needs anyway
    trainer's turn   =  ranks: weights + gradients + moments, on a GPU activations too     engines: nothing
                        without what trainer.offload keeps in host memory

Each must be within the budget by itself. On GPUs the budget is the device, and `memory_checks` has the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.check import Check, human, skipped
from penstock.deploy.preflight.machine import trainer_nodes
from penstock.deploy.preflight.memory import cached_tokens, server_bytes
from penstock.deploy.preflight.model_shape import find_shape
from penstock.deploy.preflight.rank_memory import rank_bytes, states_bytes, turn_parts
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.plan import NODES_VARIABLE, gpus_of_server, has_gpu, lent_servers


def refuse_elsewhere(config: RunConfig, where: str) -> None:
    """Raises `ConfigError`: roles that are placed on several machines share no device."""
    if config.placement.in_turns:
        raise ConfigError(
            f"{_key(config)}: engines and trainer share the devices of one machine, and {where} places roles on"
            f" several: use `penstock run RECIPE` on that machine, or set {_key(config)}=false"
        )


def _key(config: RunConfig) -> str:
    return "placement.colocated" if config.placement.colocated else "placement.lend"


def check_turns(config: RunConfig) -> Iterator[Check]:
    """Nothing where the devices are not shared."""
    if not config.placement.in_turns:
        return
    for detail, fix in _unfit(config):
        yield Check(_key(config), False, detail, fix)
    if config.placement.lend:
        for detail, fix in _unfit_to_lend(config):
            yield Check("placement.lend", False, detail, fix)
    yield _check_budget(config)


def _unfit_to_lend(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.placement.colocated:
        yield "placement.colocated gives all servers the trainer's devices already", "set one of the two to false"
    elif not config.rollout.servers:
        yield (
            "rollout.servers=0: the only servers are the lent ones",
            "set rollout.servers, or placement.colocated=true",
        )
    elif not lent_servers(config):
        yield (
            f"a rollout server takes {gpus_of_server(config.rollout)} GPUs, and the trainer has {config.trainer.ranks}",
            "split servers over fewer GPUs, raise trainer.ranks, or set placement.lend=false",
        )


def _unfit(config: RunConfig) -> Iterator[tuple[str, str]]:
    rollout, trainer, key = config.rollout, config.trainer, _key(config)
    nodes = trainer_nodes()
    if nodes > 1:
        yield (f"the trainer is on {nodes} machines ({NODES_VARIABLE})", f"run it on one machine, or {key}=false")
    if rollout.broadcasts_weights:
        yield (
            f"rollout.weight_transport={rollout.weight_transport} sends while engines decode,"
            " and here they are asleep then",
            "set rollout.weight_transport=shm: both sides are on this machine",
        )
    if rollout.engine == "served":
        yield "rollout.engine=served is a separate server, which does not sleep", "rollout.engine=hf, vllm or sglang"
    if config.placement.colocated and not rollout.servers:
        yield (
            "rollout.servers=0: no engine of this run is on the devices",
            "set rollout.servers, or placement.colocated=false",
        )
    if trainer.engine != "fsdp":
        fix = f"set trainer.engine=fsdp, or {key}=false"
        yield f"trainer.engine={trainer.engine} cannot move its states to the host between steps", fix
    if config.placement.memory_budget_bytes and rollout.engine != "hf":
        yield (
            f"placement.memory_budget_bytes counts what rollout.engine=hf reports; {rollout.engine} reports nothing",
            f"leave it out: `penstock doctor` compares the devices' size, rollout.{rollout.engine}_args has the share",
        )


def turn_bytes(config: RunConfig) -> dict[str, float] | None:
    """Bytes of the shared devices together, by side, as the run's processes will claim them; None: sizes unknown.

    Raises `ConfigError`.
    """
    shape, _ = find_shape(config)
    if shape is None:
        return None
    placement, rollout, rank = config.placement, config.rollout, rank_bytes(shape, config, on_gpu=has_gpu())
    servers = rollout.servers + rollout.evaluation_server if placement.colocated else lent_servers(config)
    return {
        "engines": servers * sum(server_bytes(shape, config, cached_tokens(config)).values()),
        "trainer": config.trainer.ranks * states_bytes(turn_parts(rank, config.trainer)),
    }


def _check_budget(config: RunConfig) -> Check:
    try:
        sides = turn_bytes(config)
    except ConfigError as error:  # `check_model` says so
        sides, why = None, str(error)
    else:
        why = f"the sizes of {config.model} are not known before its files are here"
    if sides is None:
        return skipped("memory in turns", why)
    budget = config.placement.memory_budget_bytes
    detail = ", ".join(f"{side} {human(size)} in their turn" for side, size in sides.items())
    apart = f"at once they would need {human(sum(sides.values()))}"
    if not budget:
        return Check("memory in turns", True, f"{detail}; {apart}; no placement.memory_budget_bytes is set")
    side, most = max(sides.items(), key=lambda one: one[1])
    lower = "rollout.kv_cache_tokens" if side == "engines" else "the model, or set trainer.lora.rank"
    return Check(
        "memory in turns",
        most <= budget,
        f"{detail}; {apart}; the budget is {human(budget)}",
        f"set placement.memory_budget_bytes={int(most)} or more, or lower {lower}",
    )
