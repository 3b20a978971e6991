"""What the parts of the run on this machine take together, against its memory. Estimates: they refuse no run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from penstock.deploy.config import RunConfig
from penstock.deploy.gpus import has_gpu
from penstock.deploy.preflight.check import Check, skipped, warning
from penstock.deploy.preflight.memory_sums import (
    MASTER,
    Shape,
    in_flight_bytes,
    published_bytes,
    server_bytes,
    shape_of,
    trainer_bytes,
)
from penstock.deploy.preflight.model import read_config
from penstock.deploy.preflight.model_files import BadModel, read_weights
from penstock.deploy.preflight.resources import available_bytes, human, memory_bytes

TORCH_PROCESS = 500 << 20
"""Resident in a process that has loaded torch and transformers, before any weights."""
WORKER_PROCESS = 300 << 20
MENDS = {
    "trainer": "lower trainer.micro_batch_tokens, set trainer.recompute=true, use trainer.lora.rank, or train on more "
    "machines' worth of ranks",
    "servers": "lower rollout.kv_cache_tokens or rollout.servers, or start servers on other machines",
    "published weights": "set rollout.weight_transport=disk",
    "in flight": "lower max_staleness, groups_per_step or agent.max_response_tokens",
    "processes": "lower agent.workers, rollout.servers or trainer.ranks",
}


def check_memory(config: RunConfig) -> Iterator[Check]:
    shape = model_shape(config)
    if shape is None:
        yield skipped("memory", f"{config.model}: no sizes to reckon with before its files are here and name them")
        return
    yield _on_host(host_parts(config, shape))
    yield _in_flight(config)


def model_shape(config: RunConfig) -> Shape | None:
    """None where there is nothing to reckon with; what is wrong with the folder `check_model` says."""
    folder = Path(config.model)
    if not folder.is_dir():
        return None
    try:
        weights = read_weights(folder)
        return shape_of(read_config(folder), weights) if weights else None
    except BadModel:
        return None


def host_parts(config: RunConfig, shape: Shape) -> dict[str, float]:
    """Bytes of the host's memory by part of the run; where there are GPUs, what stays on the host beside them."""
    trainer, rollout = config.trainer, config.rollout
    on_gpu = has_gpu()
    rank = trainer_bytes(shape, trainer, rollout.max_model_len, critic=needs_critic(config))
    states = rank["weights"] + rank["gradients"] + rank["moments"]
    rank_bytes = max(MASTER * shape.parameters, states if trainer.offload else 0) if on_gpu else sum(rank.values())
    served_here = rollout.engine == "hf" or not on_gpu
    server = sum(server_bytes(shape, config, cached_tokens(config)).values()) if served_here else 0
    torch_processes = rollout.servers + trainer.ranks
    return {
        "trainer": trainer.ranks * rank_bytes,
        "servers": rollout.servers * server,
        "published weights": 0 if rollout.weight_transport == "disk" else published_bytes(shape, config),
        "in flight": 0 if config.transfer_queue.url else min(in_flight_bytes(config), config.transfer_queue.max_bytes),
        "processes": torch_processes * TORCH_PROCESS + config.agent.workers * WORKER_PROCESS,
    }


def cached_tokens(config: RunConfig) -> int:
    """What a server's KV cache is made for; vLLM takes what it finds, and needs room for one request at least."""
    return config.rollout.max_model_len if config.rollout.engine == "vllm" else config.rollout.kv_cache_tokens


def needs_critic(config: RunConfig) -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    from penstock.trainer import UnknownName, needs_of_advantage

    try:
        return "values" in needs_of_advantage(config.trainer)
    except UnknownName:
        return False  # `check_algorithm` says so


def _on_host(parts: dict[str, float]) -> Check:
    total, have, free = sum(parts.values()), memory_bytes(), available_bytes()
    told = ", ".join(f"{name} {human(size)}" for name, size in parts.items() if size >= 1 << 20)
    found = f"about {human(total)} of {human(have)} ({told})"
    mend = MENDS[max(parts, key=parts.__getitem__)]
    if total > have:
        return Check("memory", False, found, mend)
    if total > free:
        return warning("memory", f"{found}; {human(free)} are free now", f"end other programs, or {mend}")
    return Check("memory", True, found)


def _in_flight(config: RunConfig) -> Check:
    needed, most = in_flight_bytes(config), config.transfer_queue.max_bytes
    found = f"episodes in flight hold up to {human(needed)}, transfer_queue.max_bytes is {human(most)}"
    if needed <= most:
        return Check("staleness in flight", True, found)
    mend = f"set transfer_queue.max_bytes={int(needed * 1.2)}, or lower max_staleness: admission stops where it is full"
    return warning("staleness in flight", found, mend)
