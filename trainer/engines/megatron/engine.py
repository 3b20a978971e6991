"""The engine `megatron`, as the trainer's loop sees it.

megatron's process groups, which are global to a process: made for the group that `Ranks` opened.

How much arithmetic a model is, by megatron's description of it: a mixture computes with a part of its weights.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.rollout_server import NoRouters
from penstock.trainer.batch import ModelLimits
from penstock.trainer.config import TrainerConfig, learning_rate
from penstock.trainer.engine import Flops, PackLoss, RouterLoads, Update, ValueLoss
from penstock.trainer.engines.fsdp.saved_model import save_tensors
from penstock.trainer.engines.megatron.bridge import ModelBridge
from penstock.trainer.engines.megatron.optimizer import Optimizer
from penstock.trainer.engines.megatron.routing import StageRouters, layers_of
from penstock.trainer.engines.megatron.settings import check_machine, has_transformer_engine, takes_packed_rows
from penstock.trainer.engines.megatron.stages import Reading, Stages
from penstock.trainer.engines.megatron.state import State
from penstock.trainer.job import no_replay
from penstock.trainer.packing import Pack, RowLayout
from penstock.trainer.ranks.distributed import Ranks
from penstock.weight_sync import host_copy

NO_CRITIC = "trainer.engine megatron has no critic"
NO_LORA = "trainer.engine megatron has no LoRA"


class MegatronEngine:
    """An `Engine` over ranks that `config.parallel` arranges."""

    def __init__(
        self,
        model: str,
        config: TrainerConfig,
        ranks: Ranks,
        temperature: float = 1.0,
        *,
        routing_replay: bool = False,
    ) -> None:
        """A collective. `routing_replay`: the policy's tokens are read by the experts that packs name. Raises `BadJob`
        for a model or a machine that the engine cannot serve."""
        self.config = config = config.resolve_dtype(on_gpu=ranks.device.type == "cuda")
        check_machine(config)
        open_groups(config)
        self.temperature = temperature
        self.kl_coefficient = config.kl.in_reward
        self._ranks = ranks
        self._bridge = ModelBridge(model, config, transformer_engine=has_transformer_engine())
        self._bridge.config.finalize_model_grads_func = _reduce_gradients
        reading = Reading(config.parallel, takes_packed_rows(config), temperature)
        policy = self._bridge.build(trained=True)
        self._routers = self._wrap_routers(policy, routing_replay=routing_replay)
        self._policy = Stages(policy, reading, ranks, self._routers)
        self._reference: Stages | None = None
        if config.kl.needs_reference:
            self._reference = Stages(self._bridge.build(trained=False), reading, ranks)
        self._optimizer = Optimizer(self._policy.models, config)
        self._state = State(self._policy.models, self._bridge, self._optimizer, ranks)
        hf = self._bridge.hf_config
        mixtures = self._routers.mixtures if self._routers and routing_replay else None
        self.limits = ModelLimits(hf.max_position_embeddings, hf.vocab_size, hf.hidden_size, mixtures)
        self.flops = flops_of(self._bridge.config, hf.vocab_size)

    @property
    def has_critic(self) -> bool:
        return False

    @property
    def shares_prefixes(self) -> bool:
        return False

    @property
    def row_layout(self) -> RowLayout:
        """Also where rows become a rectangle: what fills it up is not counted."""
        return RowLayout.PACKED

    def take_router_loads(self) -> RouterLoads | None:
        if self._routers is None:
            return None
        has_aux_loss = getattr(self._bridge.hf_config, "router_aux_loss_coef", None) is not None
        return RouterLoads(self._routers.take_load(), has_aux_loss)

    def _wrap_routers(self, models: list[nn.Module], *, routing_replay: bool) -> StageRouters | None:
        """None for a model whose routers cannot be recorded. Raises `BadJob` if they must be."""
        try:
            return StageRouters(models, layers_of(self._bridge.folder), self._ranks.device)
        except NoRouters as error:
            if routing_replay:
                raise no_replay(error) from error
            return None

    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        return self._policy.score(packs)

    def score_reference(self, packs: Sequence[Pack]) -> list[Tensor]:
        assert self._reference is not None
        return self._reference.score(packs)

    def values(self, packs: Sequence[Pack]) -> list[Tensor]:
        raise NotImplementedError(NO_CRITIC)

    def update(self, packs: Sequence[Pack], loss: PackLoss, divisor: float, step: int) -> Update:
        with_entropy = self.config.entropy_bonus != 0
        total = self._policy.accumulate(packs, loss, divisor, with_entropy=with_entropy)
        return self._optimizer.step(learning_rate(self.config, step), total)

    def update_critic(self, packs: Sequence[Pack], loss: ValueLoss, divisor: float) -> Update:
        raise NotImplementedError(NO_CRITIC)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.gathered_weights():
            if self._ranks.is_rank0:
                yield name, host_copy(tensor, dtype)

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._bridge.export(self._policy.models)

    def local_shards(self, dtype: torch.dtype) -> None:
        """Tensor-parallel ranks have columns, pipeline stages have layers."""
        return None

    @property
    def state_bytes(self) -> int:
        return 3 * sum(4 * one.numel() for model in self._policy.models for one in model.parameters())

    def begin_save(self, path: Path) -> Future[Any]:
        return self._state.begin_save(path, self.kl_coefficient)

    def load(self, checkpoint: Path, written_by: int) -> None:
        self.kl_coefficient = self._state.load(checkpoint, written_by)

    @property
    def adapter_settings(self) -> None:
        return None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError(NO_LORA)

    def save_adapter(self, folder: Path) -> None:
        raise NotImplementedError(NO_LORA)

    def save_model(self, folder: Path) -> None:
        tensors = self._state.export()
        if not self._ranks.is_rank0:
            for _ in tensors:  # each is a collective
                pass
            return
        save_tensors(((name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors), folder)
        self._bridge.save_settings(folder)


def _reduce_gradients(models: list[Any], num_tokens: Any = None, **groups: Any) -> None:
    """megatron's own, without its division by a number of tokens: the loss is divided by what counts all ranks."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(models, None, **groups)


SEED = 1
"""Seed of megatron's random states. No number depends on it: weights are loaded, and dropout is off."""
_made: dict[str, Any] = {}
"""Arguments from which the groups were made, so that a second engine on the same ranks reuses them."""


def open_groups(config: TrainerConfig) -> None:
    """A collective over all ranks; a no-op where the groups of these ranks are there already."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel = config.parallel
    required = {"world": dist.group.WORLD, "parallel": parallel, "timeout_s": config.collective_timeout_s}
    if _made == required and parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        # Experts are not cut by the tensor ranks as well: mbridge would have to merge them over two groups.
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=math.ceil(config.collective_timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(SEED)
    _made.update(required)
    atexit.register(_let_go)


def _let_go() -> None:
    """megatron keeps its groups as long as the process lives, and gloo's threads live with them: they could abort the
    ending interpreter, see `Ranks.open`. Runs before the collection that is registered there."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _made.clear()


def flops_of(config: Any, vocab: int) -> Flops | None:
    """`config`: megatron's `TransformerConfig`. None for latent attention, whose matrices are not counted here."""
    if config.multi_latent_attention:
        return None
    queries = config.num_attention_heads * config.kv_channels
    keys = config.num_query_groups * config.kv_channels
    attention = config.hidden_size * (2 * queries + 2 * keys)
    mixtures = 0
    if config.num_moe_experts:  # every n-th layer, or those that a list marks
        every = config.moe_layer_freq
        mixtures = sum(every) if isinstance(every, list) else len(range(0, config.num_layers, every))
    mlps = (config.num_layers - mixtures) * _mlp(config, config.ffn_hidden_size)
    if mixtures:
        mlps += mixtures * _mixture(config)
    return Flops(
        body=config.num_layers * attention + mlps,
        head=config.hidden_size * vocab,
        attention=config.num_layers * queries,
        learns_all=True,
    )


def _mlp(config: Any, width: int) -> int:
    return (3 if config.gated_linear_unit else 2) * int(config.hidden_size) * width


def _mixture(config: Any) -> int:
    """Weights that one token meets: the router's, its experts', the shared expert's."""
    router = int(config.hidden_size * config.num_moe_experts)
    experts = config.moe_router_topk * _mlp(config, config.moe_ffn_hidden_size)
    return router + experts + _mlp(config, config.moe_shared_expert_intermediate_size or 0)
