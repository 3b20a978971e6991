"""Estimate of the most bytes that a trainer's rank holds on its device.

With P parameters of which O are outside of the layers and H in the output layer, R ranks, L layers, hidden width h,
query and key-value widths q and kv, MLP width i (of an expert times the k experts of a token; k is 0 in a dense model),
T tokens of a packed row, b bytes of the arithmetic:

    states             =  weights 4P/R + gradients 4P/R + moments 8P/R          fully sharded, masters in float32
                          under HSDP R is the ranks of one set, trainer.ranks / parallel.replicate
    with LoRA            gradients and moments of its matrices only; a base in bfloat16 has no float32 masters
    reference            weights again, in trainer.dtype or trainer.kl.reference_dtype; with LoRA it is the base itself
    critic               weights, gradients and moments of all P, in trainer.critic.dtype
    megatron             weights b and gradients 4 of what the rank's tensor, pipeline and expert groups leave it,
                         masters and moments 12, spread over the ranks that hold the same

and the largest moment of a backward, N = (P − O)/L, with parallel.expert E of the experts' part of it 1/E:

    output layer       =  gathered b·(O + N) + its gradient (4 + b)·H + what all layers saved + a tile of logits
    the last layers    =  gathered b·(O + 2N) + gradients b·H, b·N and, after the first, 4N, the input of the
                          reduce-scatter of the one before + what is saved + what is computed again + gradients inside
    the weights outside of the layers  =  gradients (4 + max(b, 4/R))·O

    a layer saves, per token,  2·(4 + 2b)·h + (4 + b)·(q + kv) + b·(2q + 2kv + 4i + 2k·h)
                          with recompute b·h, selective also the queries, values, gate and both outputs;
                          with activation_offload L is 1, and what all layers saved is in host memory
                          with parallel.expert i and k twice, for ranks that get more tokens than others

On one shard all weights are copied in the forward: b·P. Under megatron nothing is gathered, and gradients are added up
where they are reduced; between backwards a checkpoint gathers one parameter's state at a time, in float32, of all
tensor ranks, and once more while it is merged: at most 2·4·O.

What a layer saves is that of a pre-norm block with norms of queries and keys, a gated MLP and fused attention (after
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4,
without dropout and attention matrices), as transformers computes it: norms in float32; the rows of a mixture's tokens
are copied for each of their experts. What is gathered and reduced is that of
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.deploy.config import RunConfig
from penstock.deploy.preflight.model_shape import ModelShape
from penstock.trainer import TrainerConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER = 4
"""float32: weights, gradients; two moments are two of it."""
TILE_LOGITS, TILE_COLUMNS = 1 << 25, 4096
"""Logits that exist at a time, as in `penstock.trainer.logprobs` on a GPU."""
MOMENTS_PART = 1 << 30
"""`PART_BYTES` of `penstock.trainer.engines.fsdp.host_states`."""


def rank_bytes(shape: ModelShape, config: RunConfig, *, on_gpu: bool) -> dict[str, float]:
    """Bytes of one rank of the run's trainer, by part."""
    trainer = config.trainer.resolve_dtype(on_gpu=on_gpu)
    return trainer_bytes(shape, trainer, config.rollout.max_model_len, critic=needs_critic(config))


def states_bytes(rank: Mapping[str, float]) -> float:
    """Bytes of a rank that stay from step to step."""
    return sum(rank.get(part, 0) for part in ("weights", "gradients", "moments"))


def trainer_bytes(shape: ModelShape, trainer: TrainerConfig, longest: int, *, critic: bool) -> dict[str, float]:
    """Bytes of one rank by part, when it holds most. `longest`: tokens of the longest sequence."""
    tokens = max(trainer.micro_batch_tokens, longest) / trainer.parallel.context
    states = _split(shape, trainer) if trainer.engine == "megatron" else _sharded(shape, trainer, critic=critic)
    of_a_pack = max(_moments(shape, trainer, tokens), key=lambda parts: sum(parts.values()))
    return {**states, **of_a_pack}


def context_bytes(trainer: TrainerConfig) -> float:
    """Bytes of a GPU that a rank takes outside of torch's allocator."""
    layout = trainer.parallel
    shards = trainer.ranks // layout.replicate // layout.tensor
    sizes = (shards, layout.replicate, layout.tensor, layout.context, layout.pipeline, layout.expert)
    # About what torch's kernels and the driver take of a device, and NCCL for each group of ranks.
    return (1 << 29) + (3 << 28) * sum(size > 1 for size in sizes)


def device_parts(rank: Mapping[str, float], trainer: TrainerConfig) -> dict[str, float]:
    """Return the parts of `rank` that are on its GPU. Under trainer.offload the sum of the packs' gradients is there
    until it is whole."""
    on_host = {True: {"weights", "moments"}, "optimizer": {"moments"}, False: set()}[trainer.offload]
    return {part: size for part, size in rank.items() if part not in on_host}


def turn_parts(rank: Mapping[str, float], trainer: TrainerConfig) -> dict[str, float]:
    """Return the states of `rank` that are on its device when it updates. Under trainer.offload=optimizer moments come
    in parts."""
    on_device = device_parts(rank, trainer)
    if trainer.offload == "optimizer":
        on_device["moments"] = min(rank["moments"], MOMENTS_PART)
    return on_device


def learning_parameters(shape: ModelShape, trainer: TrainerConfig) -> int:
    return _low_rank(shape, trainer, 1) or shape.parameters


def _low_rank(shape: ModelShape, trainer: TrainerConfig, parts: int) -> int:
    """Return the parameters of LoRA's matrices where experts lie in `parts`."""
    experts = shape.experts_lora // parts if "experts" in trainer.lora.names else 0
    return (shape.lora + experts) * trainer.lora.rank


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


# states --------------------------------------------------------------------------------------------------------------
def _sharded(shape: ModelShape, trainer: TrainerConfig, *, critic: bool) -> dict[str, float]:
    """Return the bytes of one rank by part, for the engine fsdp."""
    learning = MASTER * learning_parameters(shape, trainer)
    has_reference = trainer.kl.needs_reference and not trainer.lora.rank
    reference = BYTES[trainer.kl.reference_dtype or trainer.dtype] * shape.parameters if has_reference else 0
    value = BYTES[trainer.critic.dtype] * shape.parameters if critic else 0
    ranks = trainer.ranks / trainer.parallel.replicate
    low = trainer.lora.rank and trainer.dtype == shape.dtype == "bfloat16"
    width = BYTES["bfloat16"] if low else MASTER
    return {
        "weights": (width * shape.parameters + reference + value) / ranks,
        "gradients": (learning + value) / ranks,
        "moments": 2 * (learning + value) / ranks,
    }


def _split(shape: ModelShape, trainer: TrainerConfig) -> dict[str, float]:
    """Return the bytes of one rank by part, for the engine megatron: it spreads the optimizer's states over
    data-parallel ranks, and not the weights."""
    width, local = BYTES[trainer.dtype], _local_parameters(shape, trainer)
    masters = MASTER if width < MASTER else 0
    return {
        "weights": (1 + trainer.kl.needs_reference) * width * local,
        "gradients": MASTER * local,
        "moments": (masters + 2 * MASTER) * shape.parameters / trainer.ranks,
    }


def _local_parameters(shape: ModelShape, trainer: TrainerConfig) -> float:
    """Return the number of parameters of one rank of megatron after tensor, pipeline and expert parallelism."""
    layout = trainer.parallel
    dense_ranks, expert_ranks = layout.tensor * layout.pipeline, layout.expert * layout.pipeline
    return (shape.parameters - shape.experts) / dense_ranks + shape.experts / expert_ranks


# moments of a backward -----------------------------------------------------------------------------------------------
GATHERED, REDUCED, ACTIVATIONS = "gathered layers", "gradients before they are reduced", "activations"


def _moments(shape: ModelShape, trainer: TrainerConfig, tokens: float) -> Iterator[dict[str, float]]:
    """Yield, for each moment of a step, the bytes by part in addition to the states; the rank computes `tokens`
    tokens."""
    width, tensor = BYTES[trainer.dtype], trainer.parallel.tensor
    saved, again = _saved(shape, trainer)
    learning = _learning(shape, trainer)
    yield {
        GATHERED: _gathered(shape, trainer, 1),
        REDUCED: learning.head * (MASTER + (width if width < MASTER else 0)),  # added up in float32, then rounded
        ACTIVATIONS: tokens * _layers_on_device(shape, trainer) * saved + _of_logits(shape, width, tokens),
    }
    copies, mlp = _routed(shape, trainer)
    inside = width * (shape.hidden + 2 * mlp / tensor + 2 * copies)
    if trainer.parallel.expert > 1 and trainer.engine != "megatron":
        inside += width * 2 * shape.routed * shape.hidden  # sent and received
    for done in (0, 1):  # layers whose backward is over
        waiting = _layers_on_device(shape, trainer, done) * saved
        yield {
            GATHERED: _gathered(shape, trainer, 2, done),
            REDUCED: width * learning.head + (width + MASTER * done) * learning.layer,
            ACTIVATIONS: tokens * (waiting + again + inside),
        }
    if trainer.engine == "megatron":  # a save
        yield {GATHERED: 2 * MASTER * shape.outer, REDUCED: 0, ACTIVATIONS: 0}
    shards = trainer.ranks / trainer.parallel.replicate / tensor
    yield {GATHERED: 0, REDUCED: (MASTER + max(width, MASTER / shards)) * learning.outer, ACTIVATIONS: 0}


class _Learning(NamedTuple):
    """Parameters of a rank's tensor part whose gradients are reduced."""

    layer: float
    outer: float
    head: float


def _learning(shape: ModelShape, trainer: TrainerConfig) -> _Learning:
    tensor = trainer.parallel.tensor
    if trainer.engine == "megatron":  # it adds them up in its reduce buffers; the output layer's is made apart
        return _Learning(0, 0, shape.head / tensor)
    if trainer.lora.rank:
        return _Learning(_low_rank(shape, trainer, trainer.parallel.expert) / shape.layers / tensor, 0, 0)
    return _Learning(_layer(shape, trainer) / tensor, shape.outer / tensor, shape.head / tensor)


def _layer(shape: ModelShape, trainer: TrainerConfig) -> float:
    dense = shape.parameters - shape.outer - shape.experts
    return (dense + shape.experts / trainer.parallel.expert) / shape.layers


def _routed(shape: ModelShape, trainer: TrainerConfig) -> tuple[int, int]:
    """(k·h, i) of the rows that a rank's experts compute."""
    # A rank's experts may get twice the rows of an even load; `moe/load_max_over_mean` of a run has it per expert.
    most = 2 if trainer.parallel.expert > 1 and trainer.engine != "megatron" else 1
    return most * shape.routed * shape.hidden, most * shape.mlp


def _layers_on_device(shape: ModelShape, trainer: TrainerConfig, done: int = 0) -> float:
    """Return the number of layers that keep activations for their backward; a stage of a pipeline has a part of
    them."""
    layers = shape.layers / trainer.parallel.pipeline - done
    # With offload, only one layer's activations are on the device at a time.
    return min(layers, 1) if trainer.activation_offload else layers


def _gathered(shape: ModelShape, trainer: TrainerConfig, layers: int, done: int = 0) -> float:
    """Weights as the arithmetic takes them, of `layers` layers at a time. One shard is copied too, whatever its dtype,
    and a layer's copy is given back after its backward."""
    if trainer.engine == "megatron":
        return 0
    width, tensor = BYTES[trainer.dtype], trainer.parallel.tensor
    one_shard = trainer.ranks / trainer.parallel.replicate == tensor
    return width * (shape.outer + (shape.layers - done if one_shard else layers) * _layer(shape, trainer)) / tensor


def _of_logits(shape: ModelShape, width: int, tokens: float) -> float:
    """Return the bytes between the last layer and the loss: two tiles of logits in float32, one in the product's
    type."""
    columns = min(TILE_COLUMNS, shape.head // shape.hidden)
    rounded = width if width < MASTER else 0
    last = MASTER + 2 * width + width + MASTER  # norm, rows that predict, their gradient
    return tokens * last * shape.hidden + min(tokens * columns, TILE_LOGITS) * (2 * MASTER + rounded)


def waiting_bytes(shape: ModelShape, trainer: TrainerConfig, longest: int) -> float:
    """Return the bytes that trainer.activation_offload copies to the host, for one rank."""
    if not trainer.activation_offload:
        return 0.0
    tokens = max(trainer.micro_batch_tokens, longest) / trainer.parallel.context
    saved, _ = _saved(shape, trainer)
    return tokens * shape.layers * saved


def _saved(shape: ModelShape, trainer: TrainerConfig) -> tuple[float, float]:
    """Bytes per token: (of each layer until its backward, more of the one whose backward it is).

    Of the residual stream every rank of a tensor group has all, of the products between its matrices a part.
    """
    width, tensor, (copies, mlp) = BYTES[trainer.dtype], trainer.parallel.tensor, _routed(shape, trainer)
    norm = MASTER + width  # its input in float32, and normalised
    of_heads = norm * (shape.query + shape.key_value) + width * (2 * shape.query + 2 * shape.key_value)
    layer = 2 * (norm + width) * shape.hidden + 2 * width * copies + (of_heads + 4 * width * mlp) / tensor
    if not trainer.recompute:
        return layer, 0
    if trainer.recompute != "selective":
        return width * shape.hidden, layer  # its input alone
    of_mlp = copies if copies else shape.hidden + mlp / tensor
    selected = width * (of_mlp + (2 * shape.query + shape.key_value) / tensor)
    return width * shape.hidden + selected, layer - selected
