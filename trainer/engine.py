"""The models of a trainer process: the policy, and where the algorithm needs them a reference policy and a critic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.trainer.advantages import ADVANTAGES
from penstock.trainer.batch import ModelLimits
from penstock.trainer.config import TrainerConfig
from penstock.trainer.critic import load_critic
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
    """What the loop needs of a training backend. Every method is a collective over the ranks."""

    limits: ModelLimits
    kl_coefficient: float
    """Of trainer.kl.in_reward, as it was steered to; a checkpoint keeps it."""

    @property
    def has_critic(self) -> bool: ...

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
        """(Hugging Face name, full tensor on the host, a copy) on rank 0; nothing on the others."""


class FSDPEngine:
    """Any `AutoModelForCausalLM`. One rank by default; more give the same numbers, up to rounding."""

    def __init__(self, model: str, config: TrainerConfig, ranks: Ranks, temperature: float = 1.0) -> None:
        self.config = config
        self._ranks = ranks
        self.policy: Policy = load_policy(model, temperature, with_entropy=config.entropy_bonus != 0)
        self._actor = Learning(self.policy, config, ranks)
        self.limits = _model_limits(self.policy)
        self.reference: Sharded | None = None
        if config.kl.needs_reference:
            self.reference = Sharded(load_policy(model, temperature), config, ranks).freeze()
        self.critic: Learning | None = None
        if "values" in needs_of(ADVANTAGES.get(config.advantage)):
            self.critic = Learning(load_critic(model), config, ranks)
        self.kl_coefficient = config.kl.in_reward

    @property
    def has_critic(self) -> bool:
        return self.critic is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._actor.optimizer

    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        return [outputs.logprobs.cpu() for outputs in self._actor.score(packs)]

    def score_reference(self, packs: Sequence[Pack]) -> list[Tensor]:
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

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._named_tensors():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._ranks.first:
                yield name, full.detach().to("cpu", dtype if full.is_floating_point() else None, copy=True)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A tied embedding comes once, under its first name, as in the model's own safetensors."""
        model = self.policy.model
        yield from model.named_parameters()
        persistent = model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _model_limits(policy: Policy) -> ModelLimits:
    config = policy.model.config.get_text_config()
    return ModelLimits(context=config.max_position_embeddings, vocab=config.vocab_size)
