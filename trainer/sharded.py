"""FSDP2: a module's weights, and where it learns AdamW's moments, in shards over a device mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from penstock.trainer import attention
from penstock.trainer.config import TrainerConfig
from penstock.trainer.layout import Layout
from penstock.trainer.packing import Pack, empty_pack
from penstock.trainer.ranks import Ranks
from penstock.trainer.tensor_parallel import CannotSplit, split_over


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
        found = [self.module(pack.to(self._ranks.device)) for pack in self._in_step(packs)][: len(packs)]
        # Where there is one shard only, a forward leaves the weights as it computed with them, in bfloat16 under that
        # dtype: who then reads them must find the masters.
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        return found

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
            [one for one in self.module.parameters() if one.requires_grad],
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
            # FSDP2 averages gradients over the shards' ranks; `divisor` counts all ranks, so the sum is wanted.
            (total * (self._ranks.mesh.size / divisor)).backward()
            summed += total.detach()
        return self._ranks.data.sum(float(summed)) / divisor

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


def _shard(module: Any, config: TrainerConfig, ranks: Ranks) -> nn.Module:
    """In place, in this order: split over the tensor group, compiled, computed again in the backward, sharded."""
    mesh = ranks.mesh
    if not config.offload:
        module.to(ranks.device)
    if mesh.tensor is not None:
        split_over(module, mesh.tensor)
    if mesh.context is not None:
        _check_context(module.model, ranks.layout)
        module.context = mesh.context
    arguments: dict[str, Any] = {
        "mesh": mesh.shards,
        "reshard_after_forward": mesh.size > 1,
        **_policies(config, ranks),
    }
    for block in _blocks(module):
        _prepare(block, config)
        fully_shard(block, **arguments)
    fully_shard(module, **arguments)
    return module


def _check_context(model: Any, layout: Layout) -> None:
    """Raises `CannotSplit` for a model whose attention is not ours (it would see this rank's tokens only), or has too
    few heads."""
    used, heads = model.config._attn_implementation, model.config.get_text_config().num_attention_heads
    if used != attention.NAME:
        raise CannotSplit(f"{type(model).__name__} runs with attention {used}; set trainer.parallel.context to 1")
    if heads // layout.tensor % layout.context:
        raise CannotSplit(
            f"the model's {heads} heads over trainer.parallel.tensor={layout.tensor} ranks are no multiple of "
            f"trainer.parallel.context={layout.context}"
        )


def _policies(config: TrainerConfig, ranks: Ranks) -> dict[str, Any]:
    low = torch.bfloat16 if config.dtype == "bfloat16" else None
    policies: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)}
    if config.offload:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    return policies


def _prepare(block: Any, config: TrainerConfig) -> None:
    """The block's `forward` alone is wrapped: FSDP's hooks stay outside, and no parameter gets another name."""
    if config.compile:
        block.forward = torch.compile(block.forward, dynamic=True)
    if config.recompute:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped


def _blocks(module: Any) -> list[nn.Module]:
    """The decoder layers: the modules that the model itself says must not be split."""
    names = set(getattr(module.model, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]
