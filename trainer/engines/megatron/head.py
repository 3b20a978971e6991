"""The output head, which megatron's model does not run itself: logprobs of sampled tokens straight from hidden states.

Each tensor rank has the head's rows of its part of the vocabulary; sums over the vocabulary are over all of them, a
tile of logits at a time (`trainer.logprobs`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.trainer.engines.megatron.inputs import Inputs
from penstock.trainer.logprobs import Head, token_logprobs
from penstock.trainer.packing import Pack
from penstock.trainer.policy import Outputs


def hidden_states(model: Any, arguments: dict[str, Any]) -> Tensor:
    """[S, B, H] after this stage's layers, after the last norm on the last stage; under sequence parallelism the rank's
    part of S."""
    gpt = _unwrapped(model)
    last, gpt.post_process = gpt.post_process, False
    try:
        return model(**arguments)
    finally:
        # Whoever reduces gradients of tied embeddings asks for it.
        gpt.post_process = last


def outputs_of(
    hidden: Tensor, model: Any, inputs: Inputs, pack: Pack, temperature: float, *, with_entropy: bool
) -> Outputs:
    """hidden [S, B, H] of the last stage → what the model says of all N sampled tokens, on every tensor and context
    rank the same; the gradient reaches each rank's own hidden states once."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gpt, count = _unwrapped(model), len(pack.targets)
    if gpt.config.sequence_parallel:
        # The gradient that comes back is whole on every tensor rank already: each takes its part.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    tied = gpt.share_embeddings_and_output_weights
    weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
    chosen = hidden[inputs.column, inputs.line].to(weight.dtype)
    targets = pack.targets[inputs.own]
    if not len(targets):  # of this context rank; the graph goes on, the other ranks' backward waits for this one's
        nothing = _whole(chosen.float().sum(-1), inputs.own, count)
        return Outputs(nothing, nothing if with_entropy else None)
    head = _head(weight, temperature)
    logprobs, entropy = token_logprobs(chosen, weight, None, targets, head, with_entropy=with_entropy)
    whole_entropy = None if entropy is None else _whole(entropy, inputs.own, count)
    return Outputs(_whole(logprobs, inputs.own, count), whole_entropy)


def _head(weight: Tensor, temperature: float) -> Head:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return Head(temperature, first=group.rank() * len(weight), group=group if group.size() > 1 else None)


def _whole(values: Tensor, own: Tensor, count: int) -> Tensor:
    """values [M] of this context rank's tokens → [N] of all; the gradient goes back to this rank's own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    # Forward a sum over the group, backward the gradient as it is.
    return reduce_from_tensor_model_parallel_region(values.new_zeros(count).index_copy(0, own, values), group=group)


def _unwrapped(model: Any) -> Any:
    """megatron's `GPTModel` inside its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
