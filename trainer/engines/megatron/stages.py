"""Packs through a model in stages, in megatron's own schedules (one stage: one after the other; several: 1F1B).

Only the last stage has the head. What is measured there is sent to the other stages, so that all ranks of a replica
have the same numbers.

The output head, which megatron's model does not run itself: logprobs of sampled tokens straight from hidden states.

Each tensor rank has the head's rows of its part of the vocabulary; sums over the vocabulary are over all of them, a
tile of logits at a time (`trainer.logprobs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.trainer.config import ParallelConfig
from penstock.trainer.engines.megatron.bridge import unwrapped
from penstock.trainer.engines.megatron.inputs import Inputs, packed, rectangle
from penstock.trainer.engines.megatron.routing import StageRouters
from penstock.trainer.logprobs import Head, Outputs, token_logprobs
from penstock.trainer.packing import Pack, empty_pack
from penstock.trainer.ranks.distributed import Ranks


@dataclass(frozen=True, slots=True)
class Reading:
    """The layout of packs, and the temperature at which their tokens were sampled."""

    parallel: ParallelConfig
    packed: bool
    """Rows end to end, see `inputs`; else in a rectangle."""
    temperature: float

    def layout(self, pack: Pack) -> Inputs:
        # Under sequence parallelism tensor ranks share out the tokens between the matrices.
        align, contexts = self.parallel.tensor, self.parallel.context
        if not self.packed:
            return rectangle(pack, align)
        from megatron.core import parallel_state

        pieces = 2 * contexts if contexts > 1 else 1
        return packed(pack, align * pieces, contexts, parallel_state.get_context_parallel_rank())


class Stages:
    """This rank's part of a model. Every method is a collective over all ranks."""

    def __init__(
        self, models: list[nn.Module], reading: Reading, ranks: Ranks, routers: StageRouters | None = None
    ) -> None:
        """`routers`: of these models, to which the experts of packs are given."""
        self.models = models
        self._reading = reading
        self._ranks = ranks
        self._routers = routers

    @torch.no_grad()
    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Logprobs [N] of each pack, on the host."""
        logprobs = self._run(packs, lambda pack, outputs: outputs.logprobs, backward=False, with_entropy=False)
        return self._from_last_stage([len(pack.targets) for pack in packs], logprobs[: len(packs)])

    def accumulate(
        self, packs: Sequence[Pack], loss: Callable[[Pack, Outputs], Tensor], divisor: float, *, with_entropy: bool
    ) -> float:
        """Gradients of sum(loss) / `divisor` over all packs of all replicas; returns that sum."""
        losses = self._run(
            packs, lambda pack, outputs: loss(pack, outputs) / divisor, backward=True, with_entropy=with_entropy
        )
        # The last stage has them; it reports for its copy of the model.
        return self._ranks.data.sum(sum(float(one) for one in losses))

    def _run(
        self,
        packs: Sequence[Pack],
        consume: Callable[[Pack, Outputs], Tensor],
        *,
        backward: bool,
        with_entropy: bool,
    ) -> list[Any]:
        """Return the result of `consume` for each pack, without gradient; empty on all stages but the last."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        turns = self._in_step(packs)
        if not turns:
            return []

        temperature = self._reading.temperature

        def last(pack: Pack, inputs: Inputs, model: Any, hidden: Tensor, non_loss_data: bool = False) -> Any:
            outputs = outputs_of(hidden, model, inputs, pack, temperature, with_entropy=with_entropy)
            result = consume(pack, outputs)
            if non_loss_data:
                return result
            # (loss, number of tokens, what to keep): gradients are not divided by the number, the loss has its divisor.
            return result, torch.zeros((), dtype=torch.int, device=result.device), result.detach()

        def forward(turn: Iterator[Pack], model: nn.Module) -> tuple[Tensor, Any]:
            pack = next(turn).to(self._ranks.device)
            inputs = self._reading.layout(pack)
            routed = {} if self._routers is None else self._routers.arguments(pack, inputs)
            return hidden_states(model, {**inputs.arguments, **routed}), partial(last, pack, inputs, model)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(turns),
            model=self.models,
            num_microbatches=len(turns),
            seq_length=1,  # not looked at: shapes vary and travel with the tensors
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )

    def _in_step(self, packs: Sequence[Pack]) -> list[Pack]:
        """Return equally many packs in every replica: experts are shared out among replicas."""
        count = int(self._ranks.max(len(packs)))
        return [*packs, *(empty_pack() for _ in range(count - len(packs)))]

    def _from_last_stage(self, sizes: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors [sizes[i]] of the last stage, on the host of every stage."""
        from megatron.core import parallel_state

        group = parallel_state.get_pipeline_model_parallel_group()
        if not sum(sizes):
            return [torch.zeros(0) for _ in sizes]
        if group.size() == 1:
            return [one.cpu() for one in tensors]
        numbers = torch.empty(sum(sizes), dtype=torch.float32, device=self._ranks.device)
        if parallel_state.is_pipeline_last_stage():
            numbers = torch.cat(list(tensors))
        dist.broadcast(numbers, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return list(numbers.cpu().split(list(sizes)))


def hidden_states(model: Any, arguments: dict[str, Any]) -> Tensor:
    """[S, B, H] after this stage's layers, after the last norm on the last stage; under sequence parallelism the rank's
    part of S."""
    gpt = unwrapped(model)
    last, gpt.post_process = gpt.post_process, False
    try:
        return model(**arguments)
    finally:
        # The reduction of tied embeddings' gradients asks for it.
        gpt.post_process = last


def outputs_of(
    hidden: Tensor, model: Any, inputs: Inputs, pack: Pack, temperature: float, *, with_entropy: bool
) -> Outputs:
    """hidden [S, B, H] of the last stage → what the model says of all N sampled tokens, on every tensor and context
    rank the same; the gradient reaches each rank's own hidden states once."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gpt, count = unwrapped(model), len(pack.targets)
    if gpt.config.sequence_parallel:
        # The gradient that comes back is whole on every tensor rank already: each takes its part.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    tied = gpt.share_embeddings_and_output_weights
    weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
    chosen = hidden[inputs.column, inputs.line].to(weight.dtype)
    targets = pack.targets[inputs.own]
    if len(targets):
        own = token_logprobs(chosen, weight, None, targets, _head(weight, temperature), with_entropy=with_entropy)
    else:  # of this context rank; the graph continues, the other ranks' backward waits for this one's
        nothing = chosen.float().sum(-1)
        own = Outputs(nothing, nothing if with_entropy else None)
    # As many sums over the context group on a rank without a token as on the others.
    entropy = None if own.entropy is None else _whole(own.entropy, inputs.own, count)
    return Outputs(_whole(own.logprobs, inputs.own, count), entropy)


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
