"""FSDP2: the policy's weights and AdamW's moments in shards over a device mesh, gloo on CPUs, nccl on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.trainer.batch import ModelLimits
from penstock.trainer.config import TrainerConfig
from penstock.trainer.packing import Pack, empty_pack
from penstock.trainer.policy import Policy, load_policy
from penstock.trainer.ranks import Ranks
from penstock.trainer.schedule import learning_rate


class PackLoss(Protocol):
    """Called by the engine for every pack of a minibatch: (pack, its logprobs [N]) → the pack's loss, summed."""

    def __call__(self, pack: Pack, logprobs: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update."""

    grad_norm: float
    """Before clipping, over all ranks."""
    lr: float
    skipped: bool
    """The gradient was not finite: weights and moments are as before."""


class Engine(Protocol):
    """What the loop needs of a training backend. Every method is a collective over the ranks."""

    limits: ModelLimits

    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        """Logprobs [N] of each pack under the present weights, without gradient."""

    def update(self, packs: Sequence[Pack], loss: PackLoss, tokens: float, step: int) -> Update:
        """Gradients of sum(loss) / `tokens` over all packs of all ranks, clipped, then one optimizer update."""

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on the host, a copy) on rank 0; nothing on the others."""


class FSDPEngine:
    """Any `AutoModelForCausalLM`. One rank by default; more give the same numbers, up to rounding."""

    def __init__(self, model: str, config: TrainerConfig, ranks: Ranks, temperature: float = 1.0) -> None:
        self._config = config
        self._ranks = ranks
        self.policy = _shard(load_policy(model, temperature), config, ranks)
        self.limits = _model_limits(self.policy)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    @torch.no_grad()
    def score(self, packs: Sequence[Pack]) -> list[Tensor]:
        scores = [self.policy(pack.to(self._ranks.device)).cpu() for pack in self._in_step(packs)]
        return scores[: len(packs)]

    def update(self, packs: Sequence[Pack], loss: PackLoss, tokens: float, step: int) -> Update:
        for pack in self._in_step(packs):
            moved = pack.to(self._ranks.device)
            total = loss(moved, self.policy(moved))
            # FSDP2 averages gradients over ranks; `tokens` counts all ranks, so the sum is wanted.
            (total * (self._ranks.world / tokens)).backward()
        return self._optimizer_step(step)

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

    def _in_step(self, packs: Sequence[Pack]) -> list[Pack]:
        """As many packs on every rank: each forward and backward is a collective."""
        count = int(self._ranks.max(len(packs)))
        return [*packs, *(empty_pack() for _ in range(count - len(packs)))]

    def _optimizer_step(self, step: int) -> Update:
        lr = learning_rate(self._config, step)
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = grad_norm - grad_norm == 0
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm, lr, skipped=not finite)


def _shard(policy: Policy, config: TrainerConfig, ranks: Ranks) -> Policy:
    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("data",))
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None, reduce_dtype=torch.float32
    )
    arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": ranks.world > 1}
    policy.to(ranks.device)
    for module in _blocks(policy.model):
        fully_shard(module, **arguments)
    fully_shard(policy, **arguments)
    return policy


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: the modules that the model itself says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _model_limits(policy: Policy) -> ModelLimits:
    config = policy.model.config.get_text_config()
    return ModelLimits(context=config.max_position_embeddings, vocab=config.vocab_size)
