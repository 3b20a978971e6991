"""megatron's distributed optimizer as the trainer uses it: look at the gradients, then take them or leave them.

float32 masters and Adam's moments of a distributed optimizer, as whole tensors of their parameters.

The optimizer spreads each parameter's state over the data-parallel ranks as a range of its flattened elements. Here the
ranges are put together, so that what converts weights converts the state too. Reads and writes megatron-core 0.16's
`DistributedOptimizer` by three of its internal methods, hence the exact pin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.trainer.config import TrainerConfig
from penstock.trainer.engine import Update


class Optimizer:
    """AdamW with masters and moments spread over data-parallel ranks. `updates` counts the steps that it has taken."""

    def __init__(self, models: Sequence[nn.Module], config: TrainerConfig) -> None:
        """After the models have their weights: the masters are copied from them."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        bfloat16 = config.dtype == "bfloat16"
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            use_distributed_optimizer=True,
            bf16=bfloat16,
            params_dtype=torch.bfloat16 if bfloat16 else torch.float32,
        )
        # Not None: then megatron would mark norms for no weight decay, which its scheduler alone heeds, and fsdp decays
        # all parameters.
        self.megatron: Any = get_megatron_optimizer(settings, list(models), config_overrides={})
        self._models: Sequence[Any] = models  # DistributedDataParallel of megatron
        self.updates = 0

    def step(self, lr: float, loss: float) -> Update:
        """One update with the gradients that are there, unless `loss` or they are not finite. A collective."""
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        # Both are sums over all ranks: every rank comes to the same decision.
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        if finite:
            for group in self.megatron.param_groups:
                group["lr"] = lr
            self.megatron.step()
            self.updates += 1
        self.clear()
        return Update(grad_norm, lr, skipped=not finite, loss=loss)

    def clear(self) -> None:
        """Gradients are 0 again."""
        for model in self._models:
            model.zero_grad_buffer()
        self.megatron.zero_grad()


MASTER = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")


class WholeStates:
    """`key` (MASTER or one of MOMENTS) of an optimizer's parameters, one at a time: float32, of a parameter's shape."""

    def __init__(self, optimizer: Any, key: str) -> None:
        self._key = key
        self._owners = {parameter: part for part in _parts(optimizer) for parameter in part.model_param_gbuf_map}

    @torch.no_grad()
    def read(self, parameter: nn.Parameter) -> Tensor:
        """A collective of data-parallel ranks."""
        value = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter in self._owners:
            value.view(-1)[self._range(parameter)] = self._own(parameter)
        # Every element is one rank's; the others add 0.
        dist.all_reduce(value, group=_data_group(parameter))
        return value

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Each rank takes its range. No collective."""
        if parameter in self._owners:
            self._own(parameter).copy_(value.view(-1)[self._range(parameter)])
        if self._key == MASTER:
            parameter.data.copy_(value)

    def _own(self, parameter: nn.Parameter) -> Tensor:
        own: Tensor = self._owners[parameter]._get_main_param_and_optimizer_states(parameter)[self._key]
        return own

    def _range(self, parameter: nn.Parameter) -> slice:
        span = self._owners[parameter]._get_model_param_range_map(parameter)["param"]
        return slice(span.start, span.end)


@torch.no_grad()
def make_moments(optimizer: Any, updates: int) -> None:
    """Moments, of values that do not matter, as after `updates` updates. Spoils the masters: set those afterwards."""
    for part in _parts(optimizer):
        part._init_optimizer_states_with_dummy_values()
        for group in part.optimizer.param_groups:
            if "step" in group:  # Transformer Engine's and Apex's Adam count by group, torch's by parameter
                group["step"] = updates
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if "step" in state:
                    state["step"] = torch.full_like(state["step"], updates)


def _parts(optimizer: Any) -> list[Any]:
    """Experts have a distributed optimizer of their own. A rank without parameters of a kind has a stub."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def _data_group(parameter: nn.Parameter) -> dist.ProcessGroup:
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()
