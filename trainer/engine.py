"""The models of a trainer process: the policy, and where the algorithm needs them a reference policy and a critic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.batch import ModelLimits
from penstock.trainer.checkpoint import Found, begin_save, load
from penstock.trainer.config import TrainerConfig
from penstock.trainer.critic import load_critic
from penstock.trainer.flops import Flops
from penstock.trainer.lora import merged, named_weights, whole
from penstock.trainer.packing import Pack
from penstock.trainer.policy import Outputs, Policy, load_policy
from penstock.trainer.ranks import Ranks
from penstock.trainer.registry import needs_of
from penstock.trainer.schedule import learning_rate
from penstock.trainer.sharded import Learning, Sharded, Update


class PackLoss(Protocol):
    """Called by the engine for every pack of a minibatch: (pack, what the policy says) → the pack's loss, summed."""

    def __call__(self, pack: Pack, outputs: Outputs) -> Tensor: ...


class ValueLoss(Protocol):
    """The same for the critic: (pack, its values [N]) → the pack's loss, summed."""

    def __call__(self, pack: Pack, values: Tensor) -> Tensor: ...


class Engine(Protocol):
    """What the loop needs of a training backend. Every method is a collective over the ranks.

    Ranks of one replica are given the same packs and return the same numbers.
    """

    limits: ModelLimits
    temperature: float
    """Logprobs are those of logits / temperature."""
    kl_coefficient: float
    """Of trainer.kl.in_reward, as it was steered to; a checkpoint keeps it."""

    @property
    def flops(self) -> Flops | None:
        """Of its model; None where nobody counts them."""

    @property
    def has_critic(self) -> bool: ...

    @property
    def shares_prompts(self) -> bool:
        """Whether the packs' rows may share their prompts, see `packing`."""

    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Logprobs [N] of each pack under the present weights, without gradient."""

    def score_reference(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Logprobs [N] of each pack under the weights before training."""

    def values(self, packs: Sequence[Pack]) -> list[Tensor]:
        """The critic's values [N] of each pack."""

    def update(self, packs: Sequence[Pack], loss: PackLoss, divisor: float, step: int) -> Update:
        """Gradients of sum(loss) / `divisor` over all packs of all ranks, clipped, then one optimizer update."""

    def update_critic(self, packs: Sequence[Pack], loss: ValueLoss, divisor: float) -> Update:
        """The same for the critic."""

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on the host, a copy) on rank 0; nothing on the others. What LoRA learned is
        in them."""

    @property
    def adapter_settings(self) -> dict[str, Any] | None:
        """As peft's ``LoraConfig.to_dict()``; None where the whole model learns."""

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Like `weights`, of the adapter alone, float32, under peft's names."""

    def begin_save(self, path: Path) -> Future[Any]:
        """Copy weights and moments, and write them into the folder `path` in a thread. The future is done when all
        ranks wrote."""

    def load(self, found: Found) -> None:
        """Restore what `begin_save` wrote, also with another number of ranks. Raises `ValueError` where the checkpoint
        is another engine's."""

    def save_model(self, folder: Path, *, with_adapter: bool = True) -> None:
        """Write a Hugging Face folder without tokenizer; rank 0 does. What LoRA learned is added to the weights, unless
        not `with_adapter`."""

    def save_adapter(self, folder: Path) -> None:
        """Write what LoRA learned as a folder that peft loads; rank 0 does."""


class FSDPEngine:
    """Any `AutoModelForCausalLM`. One rank by default; more give the same numbers, up to rounding."""

    def __init__(self, model: str, config: TrainerConfig, ranks: Ranks, temperature: float = 1.0) -> None:
        self.config = config
        self.temperature = temperature
        self._ranks = ranks
        self.policy: Policy = load_policy(model, temperature, config)
        self.limits = _model_limits(self.policy)
        self.flops = Flops.of(self.policy.model, learns_all=self.policy.adapter is None)
        self._actor = Learning(self.policy, config, ranks)
        self.reference: Sharded | None = None
        if config.kl.needs_reference and self.policy.adapter is None:
            self.reference = Sharded(load_policy(model, temperature), config, ranks).freeze()
        self.critic: Learning | None = None
        if "values" in needs_of(ADVANTAGES.get(config.advantage)):
            self.critic = Learning(load_critic(model, config), config, ranks)
        self.kl_coefficient = config.kl.in_reward

    @property
    def has_critic(self) -> bool:
        return self.critic is not None

    @property
    def shares_prompts(self) -> bool:
        """Not over several ranks of a pack's tokens: they cut packs by place, and shared prompts are out of order."""
        return self.config.share_prompts and self.policy.shares_prompts and self.policy.context is None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._actor.optimizer

    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        return [outputs.logprobs.cpu() for outputs in self._actor.score(packs)]

    def score_reference(self, packs: Sequence[Pack]) -> list[Tensor]:
        if self.policy.adapter is not None:
            with self.policy.adapter.off():
                return self.score(packs)
        assert self.reference is not None
        return [outputs.logprobs.cpu() for outputs in self.reference.score(packs)]

    def values(self, packs: Sequence[Pack]) -> list[Tensor]:
        assert self.critic is not None
        return [values.cpu() for values in self.critic.score(packs)]

    def update(self, packs: Sequence[Pack], loss: PackLoss, divisor: float, step: int) -> Update:
        return self._actor.update(packs, loss, divisor, learning_rate(self.config, step))

    def update_critic(self, packs: Sequence[Pack], loss: ValueLoss, divisor: float) -> Update:
        assert self.critic is not None
        return self.critic.update(packs, loss, divisor, self.config.critic.lr)

    def weights(self, dtype: torch.dtype, *, with_adapter: bool = True) -> Iterator[tuple[str, Tensor]]:
        for name, tensor, change in named_weights(self.policy.model, self.policy.adapter):
            full = merged(tensor, change if with_adapter else None)
            if self._ranks.first:
                yield name, full.detach().to("cpu", dtype if full.is_floating_point() else None, copy=True)

    @property
    def adapter_settings(self) -> dict[str, Any] | None:
        return self.policy.adapter.settings if self.policy.adapter else None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        assert self.policy.adapter is not None
        for name, tensor in self.policy.adapter.tensors():
            full = whole(tensor)
            if self._ranks.first:
                yield name, full.detach().to("cpu", torch.float32, copy=True)

    def begin_save(self, path: Path) -> Future[Any]:
        return begin_save(self, self._ranks, path)

    def load(self, found: Found) -> None:
        load(self, self._ranks, found)

    def save_model(self, folder: Path, *, with_adapter: bool = True) -> None:
        weights = dict(self.weights(torch.float32, with_adapter=with_adapter))
        if self._ranks.first:
            self.policy.model.save_pretrained(folder, state_dict=weights)

    def save_adapter(self, folder: Path) -> None:
        tensors = dict(self.adapter_weights())
        if self._ranks.first and self.policy.adapter is not None:
            self.policy.adapter.save(folder, tensors)


def _model_limits(policy: Policy) -> ModelLimits:
    config = policy.model.config.get_text_config()
    return ModelLimits(config.max_position_embeddings, config.vocab_size, config.hidden_size)
