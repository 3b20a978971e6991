"""Expert parallelism: consecutive ranks share out the experts of each layer, and tokens travel to them and back.

    hidden [T, H] ─► k rows per token, sorted by expert ─► all-to-all ─► this rank's experts ─► all-to-all ─► [T, H]

rank = expert + E · (shard + shards · replicate): a rank has the experts expert · n / E … of a layer's n, and FSDP lays
these over its `shards`. Nothing is dropped: a rank computes all rows that come, however uneven. Which expert a token
takes, and its weight, are the router's on the token's own rank, so that replayed routes and loads are as without.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.trainer.engines.fsdp.context import Exchange
from penstock.trainer.engines.fsdp.row_choice import first_sentence
from penstock.trainer.engines.fsdp.tensor_parallel import CannotSplitModel

logger = logging.getLogger(__name__)
DIMENSION = "expert"
"""Last dimension of the device mesh of experts' parameters."""


def split_experts(model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Leave each rank of `mesh` its part of each layer's experts, in place. Returns the modules that hold them. Raises
    `CannotSplitModel`."""
    experts = experts_of(model, mesh.size())
    for module in experts:
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts //= mesh.size()
        module.forward = _ExpertsOverRanks(module, module.forward, mesh.get_group())
    return experts


def check_experts_of(model: str, ranks: int) -> None:
    """Check by a model's ``config.json`` that `ranks` can share its experts. Raises `CannotSplitModel`; a model that
    cannot be made without weights is left to its trial."""
    try:
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
        logger.info("%s: its experts are not checked: %s", model, first_sentence(error))
        return
    experts_of(shell, ranks)


def experts_of(model: nn.Module, ranks: int) -> list[Any]:
    """Return the modules whose parameters are stacks over all experts of a layer, and which transformers calls with
    (hidden [T, H], experts [T, k], weights [T, k])."""
    kind, setting = type(model).__name__, f"trainer.parallel.expert is {ranks}"
    modules: list[Any] = [one for one in model.modules() if is_called_by_experts(one)]
    owned = (getattr(one, "experts", None) for one in model.modules())
    other = next((one for one in owned if isinstance(one, nn.Module) and not is_called_by_experts(one)), None)
    if other is not None:
        raise CannotSplitModel(
            f"{setting}, and the experts of {kind} ({type(other).__name__}) are not one stack of matrices that is "
            "called with each token's experts: set it to 1"
        )
    if not modules:
        raise CannotSplitModel(f"{setting}, and {kind} has no layers with experts: set it to 1")
    for module in modules:
        if module.num_experts % ranks:
            fits = math.gcd(module.num_experts, ranks)
            raise CannotSplitModel(
                f"{setting}, which does not divide the {module.num_experts} experts: set it to {fits}"
            )
    return modules


def is_called_by_experts(module: Any) -> bool:
    """True for classes under transformers' `use_experts_implementation` whose parameters have a row per expert."""
    return hasattr(module, "is_transposed") and all(len(one) == module.num_experts for one in module.parameters())


@dataclass(frozen=True, slots=True)
class _ExpertsOverRanks:
    """The forward of a module that has some of its layer's experts."""

    module: Any
    plain: Callable[..., Tensor]
    """The module's own forward: hidden [S, H], experts of this rank [S, k], weights [S, k] → [S, H]"""
    group: dist.ProcessGroup

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], chosen [T, k] of all experts, weights [T, k] → [T, H]. A collective, also in the backward."""
        ranks, own, per_token = self.group.size(), self.module.num_experts, chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(ranks * own, dtype=torch.int64, device=hidden.device)
        counts.index_add_(0, chosen.flatten(), torch.ones_like(order))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        # The one wait for the device: sizes of messages are the host's.
        there, here = torch.stack([counts, received]).view(2, ranks, own).sum(-1).tolist()
        rows = Exchange.apply(hidden[order // per_token], self.group, there, here)
        experts = torch.arange(own, device=hidden.device).repeat(ranks)
        computed = self._computed(rows, experts.repeat_interleave(received, output_size=sum(here)))
        returned = Exchange.apply(computed, self.group, here, there)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        each = returned[places].view(*chosen.shape, -1)
        return (each * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _computed(self, rows: Tensor, experts: Tensor) -> Tensor:
        """rows [S, H], each for one of this rank's experts [S] → [S, H]"""
        count = len(rows)
        if not count:  # a row of zeros: the backward has the same collectives on all ranks
            rows, experts = rows.sum(0, keepdim=True), experts.new_zeros(1)
        with _local_parameters(self.module):
            return self.plain(rows, experts[:, None], rows.new_ones(len(rows), 1))[:count]


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Products take this rank's experts as plain tensors; gradients return to the parameters."""
    split: dict[str, Any] = dict(module._parameters)
    parts: dict[str, Any] = {name: one.to_local() for name, one in split.items() if isinstance(one, DTensor)}
    module._parameters.update(parts)
    try:
        yield
    finally:
        module._parameters.update(split)
