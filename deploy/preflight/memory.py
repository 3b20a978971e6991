"""Estimates of the bytes that a run takes: of a trainer's rank, of an engine, of the host and of a checkpoint.

With P parameters, R ranks, L layers, hidden width h, query and key-value widths q and kv, MLP width i (of an expert
times the experts of a token), T tokens of a packed row, b bytes of the arithmetic:

    trainer, per rank  =  weights 4P/R + gradients 4P/R + moments 8P/R          fully sharded, masters in float32
                          under HSDP R is the ranks of one set, trainer.ranks / parallel.replicate
                          + gathered: two layers, embedding and head in b; on one shard the whole model, b·P
                          + activations T·b·L·(6h + 2q + 2kv + 3i); with recompute T·b·(L·h + one layer),
                            selective T·b·(L·(2h + 2q + kv + i) + one layer);
                            with activation_offload L is 2, and those of the other layers are in host memory
    with LoRA            gradients and moments of its matrices only; a base in bfloat16 has no float32 masters
    reference            weights again, in trainer.dtype or trainer.kl.reference_dtype; with LoRA it is the base itself
    critic               weights, gradients and moments of all P, in trainer.critic.dtype
    megatron             weights b and gradients 4 of what the rank's tensor, pipeline and expert groups leave it,
                         masters and moments 12, spread over the ranks that hold the same

    server             =  weights b·P + KV cache 2·L·kv·b·tokens
    copied             =  of the published version, on all ranks together, b·P, and twice that under megatron or
                          tensor parallelism; a lone rank that writes files keeps none
    received           =  of a broadcast, in host memory: staged b·P per server; in place two buckets per worker, and
                          under vLLM the tensors of one layer, or those outside of the layers
    offloaded          =  rollout.kv_offload_gb per server, in host memory
    processes          =  of each kind the same, before any weights
    in flight          =  (max_staleness + 1) · groups · members · tokens · 9 bytes in the queue

What a layer keeps for its backward pass is counted for a pre-norm block with a gated MLP and fused attention: inputs of
norms, projections and products (after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", arXiv:2205.05198, section 4, without dropout and attention matrices).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.model_shape import ModelShape
from penstock.deploy.preflight.routing import token_bytes
from penstock.deploy.run.plan import gpus_of_server, has_gpu, lent_servers
from penstock.trainer import TrainerConfig
from penstock.weight_sync import BUCKET_BYTES

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GB = 1 << 30
ON_DEVICE = 2
"""Layers whose activations are on the device at a time where the others' are not."""
MASTER = 4
"""float32: weights, gradients; two moments are two of it."""
TORCH_PROCESS = 500 << 20
"""Resident in a process that has loaded torch and transformers, before any weights."""
WORKER_PROCESS = 300 << 20


# trainer -------------------------------------------------------------------------------------------------------------
def rank_bytes(shape: ModelShape, config: RunConfig) -> dict[str, float]:
    """Bytes of one rank of the run's trainer, by part."""
    return trainer_bytes(shape, config.trainer, config.rollout.max_model_len, critic=needs_critic(config))


def states_bytes(rank: Mapping[str, float]) -> float:
    """Bytes of a rank that stay from step to step."""
    return rank["weights"] + rank["gradients"] + rank["moments"]


def trainer_bytes(shape: ModelShape, trainer: TrainerConfig, longest: int, *, critic: bool) -> dict[str, float]:
    """Of one rank, by part. `longest`: tokens of the longest sequence."""
    states = _split(shape, trainer) if trainer.engine == "megatron" else _sharded(shape, trainer, critic=critic)
    return {**states, "activations": _activations(shape, trainer, max(trainer.micro_batch_tokens, longest))}


def _sharded(shape: ModelShape, trainer: TrainerConfig, *, critic: bool) -> dict[str, float]:
    """Of the engine fsdp."""
    learning = MASTER * _learning_parameters(shape, trainer)
    has_reference = trainer.kl.needs_reference and not trainer.lora.rank
    reference = BYTES[trainer.kl.reference_dtype or trainer.dtype] * shape.parameters if has_reference else 0
    value = BYTES[trainer.critic.dtype] * shape.parameters if critic else 0
    ranks = trainer.ranks / trainer.parallel.replicate
    return {
        "weights": (_kept_width(shape, trainer) * shape.parameters + reference + value) / ranks,
        "gradients": (learning + value) / ranks,
        "moments": 2 * (learning + value) / ranks,
        "gathered layers": _gathered(shape, trainer),
    }


def _kept_width(shape: ModelShape, trainer: TrainerConfig) -> int:
    low = trainer.lora.rank and trainer.dtype == shape.dtype == "bfloat16"
    return BYTES["bfloat16"] if low else MASTER


def _gathered(shape: ModelShape, trainer: TrainerConfig) -> float:
    """Weights as the arithmetic takes them. One shard is not given back between forward and backward."""
    width, tensor = BYTES[trainer.dtype], trainer.parallel.tensor
    if trainer.ranks / trainer.parallel.replicate > tensor:
        return width * (2 * (shape.parameters - shape.outer) / shape.layers + shape.outer) / tensor
    as_kept = width == _kept_width(shape, trainer) and not trainer.offload
    return 0 if as_kept else width * shape.parameters / tensor


def _split(shape: ModelShape, trainer: TrainerConfig) -> dict[str, float]:
    """Of the engine megatron, which keeps a rank's part of the weights whole and spreads the optimizer's states."""
    width, layout = BYTES[trainer.dtype], trainer.parallel
    dense_ranks, expert_ranks = layout.tensor * layout.pipeline, layout.expert * layout.pipeline
    local = (shape.parameters - shape.experts) / dense_ranks + shape.experts / expert_ranks
    masters = MASTER if width < MASTER else 0
    return {
        "weights": (1 + trainer.kl.needs_reference) * width * local,
        "gradients": MASTER * local,
        "moments": (masters + 2 * MASTER) * shape.parameters / trainer.ranks,
    }


def _activations(shape: ModelShape, trainer: TrainerConfig, tokens: int) -> float:
    """On the device. Of the residual stream every rank of a tensor group has all, of the products between its matrices
    a part."""
    saved, once = _saved(shape, trainer)
    layers = min(shape.layers, ON_DEVICE) if trainer.activation_offload else shape.layers
    return _row_bytes(trainer, tokens) * (layers * saved + once)


def waiting_bytes(shape: ModelShape, trainer: TrainerConfig, longest: int) -> float:
    """Of one rank, in host memory: what trainer.activation_offload moves there. The last layer's never leave."""
    if not trainer.activation_offload:
        return 0.0
    saved, _ = _saved(shape, trainer)
    return _row_bytes(trainer, max(trainer.micro_batch_tokens, longest)) * (shape.layers - 1) * saved


def _saved(shape: ModelShape, trainer: TrainerConfig) -> tuple[float, float]:
    """Elements per token: (of each layer until its backward, of the one whose backward it is)."""
    products = 2 * shape.query + 2 * shape.key_value + 3 * shape.mlp
    layer = 6 * shape.hidden + products / trainer.parallel.tensor
    if not trainer.recompute:
        return layer, 0
    if trainer.recompute != "selective":
        return shape.hidden, layer  # its input alone
    # Queries, values, gate, and what attention and the MLP give, too.
    selected = 2 * shape.query + shape.key_value + shape.mlp
    return 2 * shape.hidden + selected / trainer.parallel.tensor, layer


def _row_bytes(trainer: TrainerConfig, tokens: int) -> float:
    """Of one element per token."""
    return BYTES[trainer.dtype] * tokens / trainer.parallel.context / trainer.parallel.pipeline


def needs_critic(config: RunConfig) -> bool:
    """True if a second model (the critic) is trained in addition to the policy."""
    if importlib.util.find_spec("torch") is None:
        return False
    from penstock.common import UnknownName
    from penstock.trainer import needs_of_advantage

    try:
        return bool(needs_of_advantage(config.trainer) & {"values", "implicit"})
    except UnknownName:
        return False  # `check_algorithm` says so


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Weights and two moments in float32, of the matrices that learn, and of the critic where there is one."""
    return (1 + needs_critic(config)) * 3 * MASTER * _learning_parameters(shape, config.trainer)


def _learning_parameters(shape: ModelShape, trainer: TrainerConfig) -> int:
    return shape.lora * trainer.lora.rank or shape.parameters


# engine --------------------------------------------------------------------------------------------------------------
def server_bytes(shape: ModelShape, config: RunConfig, cached_tokens: int) -> dict[str, float]:
    """Of one rollout server: `cached_tokens` is what its KV cache holds."""
    width = BYTES[config.rollout.dtype]
    return {
        "weights": width * shape.parameters,
        "KV cache": 2 * shape.layers * shape.key_value * width * cached_tokens,
    }


def cached_tokens(config: RunConfig) -> int:
    """What a server's KV cache is made for; vLLM takes what it finds, and needs room for one request at least."""
    return config.rollout.max_model_len if config.rollout.engine == "vllm" else config.rollout.kv_cache_tokens


def received_bytes(shape: ModelShape, config: RunConfig) -> float:
    """What one rollout server takes in host memory for a broadcast beside its weights; 0 under other transports."""
    rollout = config.rollout
    if not rollout.broadcasts_weights:
        return 0
    width = BYTES[rollout.dtype]
    if not rollout.receives_in_place:
        return width * shape.parameters
    workers = gpus_of_server(rollout) or 1
    whole = max((shape.parameters - shape.outer) / shape.layers, shape.outer) if rollout.engine == "vllm" else 0
    return workers * (2 * BUCKET_BYTES + width * whole)


def copied_bytes(shape: ModelShape, config: RunConfig) -> float:
    """What all ranks keep of the version that is published, until the next one. A lone rank that writes whole files,
    and adapters, leave nothing behind."""
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
    """Bytes of the host's memory by part of the run; where there are GPUs, what stays on the host beside them."""
    trainer, rollout = config.trainer, config.rollout
    on_gpu = has_gpu()
    rank, placement = rank_bytes(shape, config), config.placement
    on_host = states_bytes(rank) if trainer.offload or placement.in_turns else 0
    served_here = rollout.engine == "hf" or not on_gpu
    served = server_bytes(shape, config, cached_tokens(config))
    servers = rollout.servers + lent_servers(config)
    sleepers = servers if placement.colocated else lent_servers(config)
    return {
        "trainer": trainer.ranks * (on_host if on_gpu else sum(rank.values())),
        "offloaded activations": trainer.ranks * waiting_bytes(shape, trainer, rollout.max_model_len),
        "servers": servers * sum(served.values())
        if served_here
        else sleepers * served["weights"],  # at level 2 in the first turn alone
        "copied weights": copied_bytes(shape, config),
        "received weights": servers * received_bytes(shape, config),
        "offloaded KV": servers * rollout.kv_offload_gb * GB,
        "published weights": 0 if rollout.weight_transport == "disk" else published_bytes(shape.parameters, config),
        "in flight": 0 if config.transfer_queue.url else min(in_flight_bytes(config), config.transfer_queue.max_bytes),
        "processes": (servers + trainer.ranks) * TORCH_PROCESS + config.agent.workers * WORKER_PROCESS,
    }
