"""The routers of a mixture in a rank's part of the model: which experts read a token, and how evenly they share out.

    Pack.experts [L, layers, k]
        │  columns of this stage's layers, tokens of this context rank and, under sequence parallelism, tensor rank
        ▼
    Routing ─► GPTModel ─► TransformerBlock ─► a layer's forward ─► TopKRouter ─► topk_routing_with_score_function
                           as `attention_bias`  takes it out                       asks `router_replay` which k experts

The choice is the pack's if it knows one; the weights are those that megatron-core makes of the scores which the
trainer's own gate gives the chosen experts, so gradients flow into the gate. Experts are numbered over all ranks:
expert parallelism changes nothing here.

`attention_bias` is the one argument that a block hands to its layers alike in a forward and in what is computed again
in a backward (`TransformerBlock._checkpointed_forward` keeps it in a closure). So each pack's backward finds its own
experts, however many packs a pipeline has under way. megatron-core's `RouterReplay` is not used: it lists the routers
of all models of a process, keeps the experts of the backwards in a queue by order, and knows no token without experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.rollout_server import (
    LayerLoad,
    MixtureLayers,
    Mixtures,
    NoRouters,
    Routing,
    mixture_layers,
    replayed_choice,
)
from penstock.trainer.engines.megatron.bridge import unwrapped
from penstock.trainer.engines.megatron.inputs import Inputs
from penstock.trainer.packing import Pack

CARRIER = "attention_bias"
"""Argument of a layer's forward that holds a `Routing`."""


class StageRouters:
    """Routers of one model's layers on this rank, wrapped in place. A forward without `arguments` is routed freely."""

    def __init__(self, models: Sequence[nn.Module], layers: MixtureLayers, device: torch.device) -> None:
        """Raises `NoRouters` where the routers would choose by themselves, or are not where `layers` says."""
        self._layers = layers
        self._device = device
        blocks = [unwrapped(model).decoder for model in models]
        self._shares_tokens = any(block.config.sequence_parallel for block in blocks)
        own = [layer for block in blocks for layer in block.layers]
        self.columns = _columns(own, layers)
        """Columns of `Pack.experts`, by layer with experts of this rank."""
        self._choosers: list[_Chooser] = []
        for layer in own:
            chooser = None
            if hasattr(layer.mlp, "router"):
                chooser = _Chooser(layer.mlp.router, len(self._choosers))
                self._choosers.append(chooser)
            layer.forward = _taking_out(layer.forward, chooser)
        self._clear()

    @property
    def mixtures(self) -> Mixtures:
        """Return the mixtures of the whole model."""
        return self._layers.mixtures

    def arguments(self, pack: Pack, inputs: Inputs) -> dict[str, Any]:
        """Return arguments of `GPTModel.forward` in addition to those of `inputs`."""
        return {"extra_block_kwargs": {CARRIER: self.routing(pack, inputs)}}

    def routing(self, pack: Pack, inputs: Inputs) -> Routing:
        """Return the routing of the tokens that this rank's layers read, in the order of its hidden states [S, B,
        H].
        """
        real = torch.zeros(inputs.size, dtype=torch.bool, device=pack.ids.device)
        # A pack without a target keeps step with the others: nothing is learned from its token.
        real[inputs.place] = len(pack.targets) > 0
        if pack.experts is None:
            return Routing(None, self._part(real))
        known = pack.experts[inputs.tokens][:, self.columns]
        # Equal numbers are no choice: what fills up goes where the router sends it.
        experts = known.new_zeros(inputs.size, *known.shape[1:])
        experts[inputs.place] = known
        return Routing(self._part(experts), self._part(real))

    def take_load(self) -> list[LayerLoad]:
        """Return the load by layer of the whole model, summed over the ranks of this replica: what was learned from
        since the last call. A collective of those ranks.
        """
        from megatron.core import parallel_state

        experts = self.mixtures.experts
        numbers = torch.zeros(self.mixtures.layers, 2 * experts + 3, dtype=torch.float64, device=self._device)
        for column, chooser in zip(self.columns, self._choosers, strict=True):
            numbers[column] = torch.cat([chooser.load.chosen, chooser.load.probability, chooser.load.tokens])
        self._clear()
        # Tensor ranks that do not share out the tokens have counted the same ones.
        tokens = (
            parallel_state.get_tensor_and_context_parallel_group()
            if self._shares_tokens
            else parallel_state.get_context_parallel_group()
        )
        for group in (tokens, parallel_state.get_pipeline_model_parallel_group()):
            dist.all_reduce(numbers, group=group)
        return [LayerLoad(one[:experts], one[experts:-3], one[-3:]) for one in numbers]

    def _clear(self) -> None:
        for chooser in self._choosers:
            chooser.load = LayerLoad.zeros(self.mixtures.experts, self._device)

    def _part(self, values: Tensor) -> Tensor:
        """[S · B, …] → this tensor rank's range of S"""
        if not self._shares_tokens:
            return values
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        return values.chunk(group.size())[group.rank()]


class _Chooser:
    """Stands in the place of `TopKRouter.router_replay`, of the layer that is number `number` of this rank's with
    experts."""

    def __init__(self, router: Any, number: int) -> None:
        self.routing: Routing | None = None
        """Routing of the current call."""
        self.load: LayerLoad
        self._number = number
        router.router_replay = self

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """scores [T, E] → (scores of the chosen experts, the chosen experts), each [T, k]; megatron-core calls it."""
        weights, alone = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen, known = alone, None
        routing = self.routing or Routing()
        if routing.experts is not None:
            chosen, known = replayed_choice(alone, routing.experts[:, self._number])
            # Not `weights`: a router that chooses among groups of experts has hidden the scores of the other groups.
            weights = scores.gather(-1, chosen)
        if torch.is_grad_enabled():
            self.load.add(scores.detach(), chosen, known, alone, routing.real)
        return weights, chosen


def _taking_out(forward: Callable[..., Any], chooser: _Chooser | None) -> Callable[..., Any]:
    """A layer's forward that gives the `Routing` in its arguments to `chooser`, and to nothing else."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        routing = kwargs.pop(CARRIER, None)
        if chooser is None:
            return forward(*args, **kwargs)
        chooser.routing = routing
        try:
            return forward(*args, **kwargs)
        finally:
            chooser.routing = None

    return wrapped


def _columns(own: Sequence[Any], layers: MixtureLayers) -> list[int]:
    """Return the places of `own` among all layers with experts. Raises `NoRouters`."""
    routers = {layer.layer_number - 1: layer.mlp.router for layer in own if hasattr(layer.mlp, "router")}
    expected = [number for number in layers.with_experts if number in {layer.layer_number - 1 for layer in own}]
    if list(routers) != expected:
        raise NoRouters(
            f"megatron-core builds layers {list(routers)} with experts, where the model's settings say {expected}"
        )
    for router in routers.values():
        _check_router(router, layers)
    return [layers.with_experts.index(number) for number in routers]


def _check_router(router: Any, layers: MixtureLayers) -> None:
    mixtures, config = layers.mixtures, router.config
    # Under these settings megatron's routers do not ask a chooser.
    settings = {
        "moe_router_fusion": True,
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_router_force_load_balancing": True,
    }
    own_way = [name for name, value in settings.items() if getattr(config, name, None) == value]
    if own_way:
        raise NoRouters(f"megatron-core's routers cannot replay experts under {', '.join(own_way)}")
    if (router.topk, config.num_moe_experts) != (mixtures.per_token, mixtures.experts):
        raise NoRouters(
            f"megatron-core chooses {router.topk} of {config.num_moe_experts} experts, where the model's settings say "
            f"{mixtures.per_token} of {mixtures.experts}"
        )


def layers_of(folder: Path) -> MixtureLayers:
    """Return the layers of the model in `folder`, numbered as engines number them. Raises `NoRouters`."""
    try:
        return mixture_layers(json.loads((folder / "config.json").read_text()))
    except ValueError as error:
        raise NoRouters(str(error)) from error
