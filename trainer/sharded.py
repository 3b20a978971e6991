"""FSDP2: a module's weights, and where it learns AdamW's moments, in shards over a device mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.trainer.config import TrainerConfig
from penstock.trainer.packing import Pack, empty_pack
from penstock.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update."""

    grad_norm: float
    """Before clipping, over all ranks."""
    lr: float
    skipped: bool
    """Loss or gradient was not finite, on whichever rank: weights and moments are as before, on all."""
    loss: float = 0.0
    """sum(loss) / divisor over all ranks."""


class Sharded:
    """A module that takes packs. Every method is a collective over the ranks."""

    def __init__(self, module: nn.Module, config: TrainerConfig, ranks: Ranks) -> None:
        self.module = _shard(module, config, ranks)
        self._ranks = ranks

    @torch.no_grad()
    def score(self, packs: Sequence[Pack]) -> list[Any]:
        """What the module says of each pack, without gradient."""
        return [self.module(pack.to(self._ranks.device)) for pack in self._in_step(packs)][: len(packs)]

    def freeze(self) -> Sharded:
        self.module.requires_grad_(False)
        return self

    def _in_step(self, packs: Sequence[Pack]) -> list[Pack]:
        """As many packs on every rank: each forward and backward is a collective."""
        count = int(self._ranks.max(len(packs)))
        return [*packs, *(empty_pack() for _ in range(count - len(packs)))]


class Learning(Sharded):
    """A sharded module with an optimizer."""

    def __init__(self, module: nn.Module, config: TrainerConfig, ranks: Ranks) -> None:
        super().__init__(module, config, ranks)
        self._max_grad_norm = config.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def update(self, packs: Sequence[Pack], loss: Callable[[Pack, Any], Tensor], divisor: float, lr: float) -> Update:
        """Gradients of sum(loss) / `divisor` over all packs of all ranks, clipped, then one optimizer update."""
        return self.step(lr, self.accumulate(packs, loss, divisor))

    def accumulate(self, packs: Sequence[Pack], loss: Callable[[Pack, Any], Tensor], divisor: float) -> float:
        """The gradients; returns the loss over all ranks. A rank whose loss is not finite goes through every backward
        like the others: each is a collective."""
        summed = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for pack in self._in_step(packs):
            moved = pack.to(self._ranks.device)
            total = loss(moved, self.module(moved))
            # FSDP2 averages gradients over ranks; `divisor` counts all ranks, so the sum is wanted.
            (total * (self._ranks.world / divisor)).backward()
            summed += total.detach()
        return self._ranks.sum(float(summed)) / divisor

    def step(self, lr: float, loss: float) -> Update:
        """One optimizer update with the gradients that are there, unless `loss` or they are not finite."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        # Both are sums over all ranks: every rank comes to the same decision.
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm, lr, skipped=not finite, loss=loss)


def _shard(module: nn.Module, config: TrainerConfig, ranks: Ranks) -> nn.Module:
    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("data",))
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None, reduce_dtype=torch.float32
    )
    arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": ranks.world > 1}
    module.to(ranks.device)
    for block in _blocks(module):
        fully_shard(block, **arguments)
    fully_shard(module, **arguments)
    return module


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: the modules that the model itself says must not be split."""
    names = set(getattr(module.model, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]
