"""Logprobs and entropy of sampled tokens from logits whose vocabulary is split over T tensor ranks, float32.

logprob_n = z_n[id_n] − log Σ_v exp z_n[v]                         z = logits / temperature
entropy_n = log Σ_v exp z_n[v] − Σ_v p_n[v] · z_n[v]               v over the vocabulary of all tensor ranks
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from penstock.trainer.engines.megatron.inputs import Inputs
from penstock.trainer.packing import Pack
from penstock.trainer.policy import Outputs


def outputs_of(logits: Tensor, inputs: Inputs, pack: Pack, temperature: float, *, with_entropy: bool) -> Outputs:
    """logits [B, S, V / T] of the last stage → what the model says of all N sampled tokens, on every tensor and context
    rank the same; the gradient reaches each rank's own logits once."""
    chosen = logits[inputs.line, inputs.column]
    count = len(pack.targets)
    logprobs = _whole(_logprobs(chosen, pack.targets[inputs.own], temperature), inputs.own, count)
    if not with_entropy:
        return Outputs(logprobs, None)
    return Outputs(logprobs, _whole(_entropies(chosen, temperature), inputs.own, count))


def _logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """logits [M, V / T], targets [M] → [M]"""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # A tensor of our own: megatron's function writes into what it is given.
    scaled = logits.float() / temperature
    if not len(targets):
        return scaled.sum(-1)
    return -vocab_parallel_cross_entropy(scaled[:, None], targets[:, None])[:, 0]


def _entropies(logits: Tensor, temperature: float) -> Tensor:
    """logits [M, V / T] → [M]"""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    scaled = logits.float() / temperature
    if not len(scaled):
        return scaled.sum(-1)
    largest = scaled.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = scaled - largest[:, None]
    exponentials = shifted.exp()
    # Forward a sum over tensor ranks, backward the gradient as it is: each rank's is that of its own part.
    total = reduce_from_tensor_model_parallel_region(exponentials.sum(-1))
    weighted = reduce_from_tensor_model_parallel_region((exponentials * shifted).sum(-1))
    return total.log() - weighted / total


def _whole(values: Tensor, own: Tensor, count: int) -> Tensor:
    """values [M] of this context rank's tokens → [N] of all; the gradient goes back to this rank's own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    return reduce_from_tensor_model_parallel_region(values.new_zeros(count).index_copy(0, own, values), group=group)
