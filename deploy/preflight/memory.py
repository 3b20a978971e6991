"""Estimates of the memory that the components of a run use, and checks against this machine's. They refuse no run.

With P parameters, R ranks, L layers, hidden width h, query and key-value widths q and kv, MLP width i (of an expert
times the experts of a token), T tokens of a packed row, b bytes of the arithmetic:

    trainer, per rank  =  weights 4P/R + gradients 4P/R + moments 8P/R          fully sharded, masters in float32
                          + one gathered layer b·P/L  (twice if it is prefetched)
                          + activations T·b·L·(6h + 2q + 2kv + 3i); with recompute T·b·(L·h + one layer)
    with LoRA            gradients and moments of its matrices only
    reference, critic    weights again; all of it again

    server             =  weights b·P + KV cache 2·L·kv·b·tokens
    in flight          =  (max_staleness + 1) · groups · members · tokens · 9 bytes in the queue

What a layer keeps for its backward pass is counted for a pre-norm block with a gated MLP and fused attention: inputs of
norms, projections and products (after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", arXiv:2205.05198, section 4, without dropout and attention matrices).
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.config import RunConfig
from penstock.deploy.plan import has_gpu
from penstock.deploy.preflight.check import Check, available_bytes, human, memory_bytes, skipped, warning
from penstock.deploy.preflight.model import BadModelFiles, WeightFiles, read_config, read_weights
from penstock.deploy.weights_folder import SHARED_MEMORY
from penstock.trainer import TrainerConfig
from penstock.transfer_queue import BYTES_PER_TOKEN

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER = 4
"""float32: weights, gradients; two moments are two of it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of one model; widths in elements."""

    parameters: int
    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    lora: int
    """Parameters of LoRA's matrices per rank of theirs: Σ (rows + columns) of the layers' matrices."""


def shape_of(declared: Mapping[str, Any], weights: WeightFiles) -> ModelShape | None:
    """From ``config.json`` and the headers of the weights; None for a model whose config names its sizes otherwise."""
    try:
        hidden, heads = int(declared["hidden_size"]), int(declared["num_attention_heads"])
        head = int(declared.get("head_dim") or hidden // heads)
        experts = int(declared.get("num_experts_per_tok") or 1)
        mlp = int(declared.get("moe_intermediate_size") or declared["intermediate_size"]) * experts
        layers, key_value = int(declared["num_hidden_layers"]), int(declared.get("num_key_value_heads") or heads) * head
    except (KeyError, TypeError, ValueError):
        return None
    matrices = (shape for name, shape in weights.shapes.items() if len(shape) == 2 and ".layers." in f".{name}")
    return ModelShape(weights.parameters, layers, hidden, heads * head, key_value, mlp, sum(map(sum, matrices)))


def trainer_bytes(shape: ModelShape, trainer: TrainerConfig, longest: int, *, critic: bool) -> dict[str, float]:
    """Of one rank, by part. `longest`: tokens of the longest sequence."""
    learning = shape.lora * trainer.lora.rank or shape.parameters
    width = BYTES[trainer.dtype]
    copies = 1 + bool(critic) + trainer.kl.needs_reference
    return {
        "weights": copies * MASTER * shape.parameters / trainer.ranks,
        "gradients": (1 + bool(critic)) * MASTER * learning / trainer.ranks,
        "moments": (1 + bool(critic)) * 2 * MASTER * learning / trainer.ranks,
        "gathered layers": 2 * width * shape.parameters / shape.layers if trainer.ranks > 1 else 0,
        "activations": _activations(shape, trainer, max(trainer.micro_batch_tokens, longest)),
    }


def _activations(shape: ModelShape, trainer: TrainerConfig, tokens: int) -> float:
    layer = 6 * shape.hidden + 2 * shape.query + 2 * shape.key_value + 3 * shape.mlp
    kept = shape.layers * shape.hidden + layer if trainer.recompute else shape.layers * layer
    row = tokens / trainer.parallel.context
    return BYTES[trainer.dtype] * row * kept / (trainer.parallel.tensor * trainer.parallel.pipeline)


def server_bytes(shape: ModelShape, config: RunConfig, cached_tokens: int) -> dict[str, float]:
    """Of one rollout server: `cached_tokens` is what its KV cache holds."""
    width = BYTES[config.rollout.dtype]
    return {
        "weights": width * shape.parameters,
        "KV cache": 2 * shape.layers * shape.key_value * width * cached_tokens,
    }


def published_bytes(shape: ModelShape, config: RunConfig) -> float:
    """Three versions at once: the one that is read, the one that is written, and one in between."""
    return 3 * BYTES[config.rollout.dtype] * shape.parameters


def in_flight_bytes(config: RunConfig) -> float:
    """The longest episodes of all groups that the staleness bound lets be in the system; responses alone."""
    groups = (config.max_staleness + 1) * config.groups_per_step
    return groups * config.group_size * config.agent.max_response_tokens * BYTES_PER_TOKEN


TORCH_PROCESS = 500 << 20
"""Resident in a process that has loaded torch and transformers, before any weights."""
WORKER_PROCESS = 300 << 20
FIXES = {
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


def model_shape(config: RunConfig) -> ModelShape | None:
    """None where there is nothing to reckon with; what is wrong with the folder `check_model` says."""
    folder = Path(config.model)
    if not folder.is_dir():
        return None
    try:
        weights = read_weights(folder)
        return shape_of(read_config(folder), weights) if weights else None
    except BadModelFiles:
        return None


def host_parts(config: RunConfig, shape: ModelShape) -> dict[str, float]:
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
    from penstock.common import UnknownName
    from penstock.trainer import needs_of_advantage

    try:
        return "values" in needs_of_advantage(config.trainer)
    except UnknownName:
        return False  # `check_algorithm` says so


def _on_host(parts: dict[str, float]) -> Check:
    total, have, free = sum(parts.values()), memory_bytes(), available_bytes()
    listed = ", ".join(f"{name} {human(size)}" for name, size in parts.items() if size >= 1 << 20)
    found = f"about {human(total)} of {human(have)} ({listed})"
    fix = FIXES[max(parts, key=parts.__getitem__)]
    if total > have:
        return Check("memory", False, found, fix)
    if total > free:
        return warning("memory", f"{found}; {human(free)} are free now", f"end other programs, or {fix}")
    return Check("memory", True, found)


def _in_flight(config: RunConfig) -> Check:
    needed, most = in_flight_bytes(config), config.transfer_queue.max_bytes
    found = f"episodes in flight hold up to {human(needed)}, transfer_queue.max_bytes is {human(most)}"
    if needed <= most:
        return Check("staleness in flight", True, found)
    fix = f"set transfer_queue.max_bytes={int(needed * 1.2)}, or lower max_staleness: admission stops where it is full"
    return warning("staleness in flight", found, fix)


def check_shared_memory(config: RunConfig) -> Check | None:
    """Three copies of the weights at once: the version that is read, the one that is written, and one in between."""
    folder = Path(config.model)
    if config.rollout.weight_transport == "disk" or not folder.is_dir():
        return None
    needed = 3 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return Check(
        "shared memory",
        free > needed,
        f"{human(needed)} of {human(free)} free in {SHARED_MEMORY}",
        "free some, give the container more (--shm-size), or set rollout.weight_transport=disk",
    )
