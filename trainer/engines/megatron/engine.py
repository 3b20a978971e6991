"""The engine `megatron`, as the trainer's loop sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.trainer.batch import ModelLimits
from penstock.trainer.checkpoint import Found
from penstock.trainer.config import TrainerConfig
from penstock.trainer.engine import PackLoss, ValueLoss
from penstock.trainer.engines.megatron.arithmetic import flops_of
from penstock.trainer.engines.megatron.bridge import ModelBridge
from penstock.trainer.engines.megatron.learning import Optimizer
from penstock.trainer.engines.megatron.parallel import open_groups
from penstock.trainer.engines.megatron.settings import check_machine, has_transformer_engine, takes_packed_rows
from penstock.trainer.engines.megatron.stages import Reading, Stages
from penstock.trainer.engines.megatron.state import State
from penstock.trainer.packing import Pack
from penstock.trainer.ranks import Ranks
from penstock.trainer.schedule import learning_rate
from penstock.trainer.sharded import Update

NO_CRITIC = "trainer.engine megatron has no critic"
NO_LORA = "trainer.engine megatron has no LoRA"


class MegatronEngine:
    """An `Engine` over ranks that `config.parallel` arranges."""

    def __init__(self, model: str, config: TrainerConfig, ranks: Ranks, temperature: float = 1.0) -> None:
        """A collective. Raises `BadJob` for a model or a machine that the engine cannot serve."""
        check_machine(config)
        open_groups(config.parallel)
        self.config = config
        self.temperature = temperature
        self.kl_coefficient = config.kl.in_reward
        self._ranks = ranks
        self._bridge = ModelBridge(model, config, transformer_engine=has_transformer_engine())
        self._bridge.config.finalize_model_grads_func = _reduce_gradients
        reading = Reading(config.parallel, takes_packed_rows(config), temperature)
        self._policy = Stages(self._bridge.build(trained=True), reading, ranks)
        self._reference: Stages | None = None
        if config.kl.needs_reference:
            self._reference = Stages(self._bridge.build(trained=False), reading, ranks)
        self._optimizer = Optimizer(self._policy.models, config)
        self._state = State(self._policy.models, self._bridge, self._optimizer, ranks)
        hf = self._bridge.hf_config
        self.limits = ModelLimits(hf.max_position_embeddings, hf.vocab_size, hf.hidden_size)
        self.flops = flops_of(self._bridge.config, hf.vocab_size)

    @property
    def has_critic(self) -> bool:
        return False

    @property
    def shares_prompts(self) -> bool:
        return False

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
        for name, tensor in self._bridge.export(self._policy.models):
            if self._ranks.first:
                yield name, tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True)

    def begin_save(self, path: Path) -> Future[Any]:
        return self._state.begin_save(path, self.kl_coefficient)

    def load(self, found: Found) -> None:
        self.kl_coefficient = self._state.load(found)

    @property
    def adapter_settings(self) -> None:
        return None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError(NO_LORA)

    def save_adapter(self, folder: Path) -> None:
        raise NotImplementedError(NO_LORA)

    def save_model(self, folder: Path, *, with_adapter: bool = True) -> None:
        from huggingface_hub import save_torch_state_dict

        weights: dict[str, Tensor] = {}
        for name, tensor in self._state.export():
            if self._ranks.first:
                weights[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if self._ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(weights, folder)
            self._bridge.save_settings(folder)


def _reduce_gradients(models: list[Any], num_tokens: Any = None, **groups: Any) -> None:
    """megatron's own, without its division by a number of tokens: the loss is divided by what counts all ranks."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(models, None, **groups)
