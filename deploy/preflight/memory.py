"""Estimates of the bytes that a run takes: of an engine, of the host and of a checkpoint. `rank_memory` has a trainer's
rank.

With P parameters, L layers, key-value width kv, b bytes of the arithmetic:

    trainer            =  on CPUs all of its ranks; on GPUs the states that trainer.offload, or the turns of
                          placement, move to the host; what FSDP pins takes a third more than asked for
    checkpoint         =  weights and moments once more, 12·P, until an asynchronous save is written, less what
                          trainer.offload has on the host already
    server             =  weights b·P + KV cache 2·L·kv·b·tokens
    copied             =  of the published version, on all ranks together, b·P, and twice that under megatron or
                          tensor parallelism; a lone rank that writes files keeps none
    received           =  of a broadcast, in host memory: staged b·P per server; in place three buckets per worker, and
                          under vLLM the tensors of one layer, or those outside of the layers
    offloaded          =  rollout.kv_offload_gb per server, in host memory
    processes          =  of each kind the same, before any weights
    in flight          =  (max_staleness + 1) · groups · members · tokens · 9 bytes in the queue
"""

from __future__ import annotations

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.model_shape import ModelShape
from penstock.deploy.preflight.rank_memory import (
    BYTES,
    MASTER,
    learning_parameters,
    needs_critic,
    rank_bytes,
    waiting_bytes,
)
from penstock.deploy.preflight.routing import token_bytes
from penstock.deploy.run.plan import gpus_of_server, has_gpu, lent_servers
from penstock.weight_sync import BUCKET_BYTES

GB = 1 << 30
PINNED = 4 / 3
"""Bytes of pinned memory for one that is asked for, on the mean: torch rounds each allocation up to a power of two
(aten/src/ATen/core/CachingHostAllocator.h)."""


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Weights and two moments in float32, of the matrices that learn, and of the critic if there is one."""
    return (1 + needs_critic(config)) * 3 * MASTER * learning_parameters(shape, config.trainer)


# engine --------------------------------------------------------------------------------------------------------------
def server_bytes(shape: ModelShape, config: RunConfig, cached_tokens: int) -> dict[str, float]:
    """Return the bytes of one rollout server; its KV cache holds `cached_tokens`."""
    width = BYTES[config.rollout.dtype]
    return {"weights": width * shape.parameters, "KV cache": 2 * shape.layers * shape.key_value * width * cached_tokens}


def cached_tokens(config: RunConfig) -> int:
    """Return the tokens that a server's KV cache is made for; vLLM takes what it finds, and needs room for one request
    at least.
    """
    return config.rollout.max_model_len if config.rollout.engine == "vllm" else config.rollout.kv_cache_tokens


def received_bytes(shape: ModelShape, config: RunConfig) -> float:
    """Return the host memory of one rollout server for a broadcast, in addition to its weights; 0 under other
    transports.
    """
    rollout = config.rollout
    if not rollout.broadcasts_weights:
        return 0
    width = BYTES[rollout.dtype]
    if not rollout.receives_in_place:
        return width * shape.parameters
    workers = gpus_of_server(rollout) or 1
    whole = max((shape.parameters - shape.outer) / shape.layers, shape.outer) if rollout.engine == "vllm" else 0
    return workers * (3 * BUCKET_BYTES + width * whole)


def copied_bytes(shape: ModelShape, config: RunConfig) -> float:
    """Return the bytes that all ranks keep of the published version, until the next one. A lone rank that writes whole
    files, and adapters, leave nothing behind.
    """
    trainer, rollout = config.trainer, config.rollout
    writes_deltas = rollout.weights_full_every > 1 and not rollout.broadcasts_weights
    if trainer.lora.rank or not (rollout.broadcasts_weights or trainer.ranks > 1 or writes_deltas):
        return 0
    # Whole tensors are spread over the ranks, which hold what they keep of them and of the version before.
    spread = trainer.engine == "megatron" or trainer.parallel.tensor > 1
    marks = shape.parameters / 8 if writes_deltas else 0
    return (2 if spread else 1) * BYTES[rollout.dtype] * shape.parameters + marks


def published_bytes(parameters: int, config: RunConfig) -> float:
    """Three versions at once: the one that is read, the one that is written, and one in between."""
    return 3 * BYTES[config.rollout.dtype] * parameters


# host ----------------------------------------------------------------------------------------------------------------
def in_flight_bytes(config: RunConfig) -> float:
    """The longest episodes of all groups that the staleness bound lets be in the system; responses alone."""
    groups = (config.max_staleness + 1) * config.groups_per_step
    return groups * config.largest_group * config.agent.most_response_tokens * token_bytes(config)


def host_parts(config: RunConfig, shape: ModelShape) -> dict[str, float]:
    """Bytes of the host's memory by part of the run; with GPUs, the bytes that stay on the host."""
    on_gpu = has_gpu()
    trainer, rollout = config.trainer.resolve_dtype(on_gpu=on_gpu), config.rollout
    rank, placement = rank_bytes(shape, config, on_gpu=on_gpu), config.placement
    # A rank with a GPU: torch's allocator pins weights and gradients under FSDP's offload; other states are pinned in
    # one buffer.
    in_turns, offload = placement.in_turns, trainer.offload
    states = in_turns * rank["weights"] + (in_turns or offload == "optimizer") * rank["moments"]
    if offload is True:
        states = PINNED * (rank["weights"] + rank["gradients"]) + rank["moments"]
    served_here = rollout.engine == "hf" or not on_gpu
    served = server_bytes(shape, config, cached_tokens(config))
    servers = rollout.servers + lent_servers(config)
    sleepers = servers if placement.colocated else lent_servers(config)
    # Share of a checkpoint that is copied to the host while it is written.
    copied = {False: 1, "optimizer": 1 / 3, True: 0}
    return {
        "trainer": trainer.ranks * (states if on_gpu else sum(rank.values())),
        "checkpoint": copied[trainer.offload] * checkpoint_bytes(config, shape) if trainer.ranks else 0,
        "offloaded activations": trainer.ranks * PINNED * waiting_bytes(shape, trainer, rollout.max_model_len),
        "servers": servers * sum(served.values())
        if served_here
        else sleepers * served["weights"],  # at level 2 in the first turn alone
        "copied weights": copied_bytes(shape, config),
        "received weights": servers * received_bytes(shape, config),
        "offloaded KV": servers * rollout.kv_offload_gb * GB,
        "published weights": 0 if rollout.weight_transport == "disk" else published_bytes(shape.parameters, config),
        "in flight": 0 if config.transfer_queue.url else min(in_flight_bytes(config), config.transfer_queue.max_bytes),
        # Resident before any weights, with torch and transformers; and of an agent worker.
        "processes": (servers + trainer.ranks) * (500 << 20) + config.agent.workers * (300 << 20),
    }
