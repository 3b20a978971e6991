"""float32 masters and Adam's moments of a distributed optimizer, as whole tensors of their parameters.

The optimizer spreads each parameter's state over the data-parallel ranks as a range of its flattened elements. Here the
ranges are put together, so that what converts weights converts the state too. Reads and writes megatron-core 0.16's
`DistributedOptimizer` by three of its internal methods, hence the exact pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MASTER = "param"
MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def whole_states(optimizer: Any, parameters: Iterable[nn.Parameter], key: str) -> dict[nn.Parameter, Tensor]:
    """`key` (MASTER or one of MOMENTS) of each parameter, float32, its shape. A collective of data-parallel ranks."""
    owners = _owners(optimizer)
    found = {}
    for parameter in parameters:
        value = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter in owners:
            own = owners[parameter]._get_main_param_and_optimizer_states(parameter)[key]
            value.view(-1)[_range(owners[parameter], parameter)] = own
        # Every element is one rank's; the others add 0.
        dist.all_reduce(value, group=_data_group(parameter))
        found[parameter] = value
    return found


@torch.no_grad()
def set_states(optimizer: Any, values: Mapping[nn.Parameter, Tensor], key: str) -> None:
    """Each rank takes its range of each value. No collective."""
    owners = _owners(optimizer)
    for parameter, value in values.items():
        if parameter in owners:
            own = owners[parameter]._get_main_param_and_optimizer_states(parameter)[key]
            own.copy_(value.view(-1)[_range(owners[parameter], parameter)])


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


def _owners(optimizer: Any) -> dict[nn.Parameter, Any]:
    return {parameter: part for part in _parts(optimizer) for parameter in part.model_param_gbuf_map}


def _range(owner: Any, parameter: nn.Parameter) -> slice:
    found = owner._get_model_param_range_map(parameter)["param"]
    return slice(found.start, found.end)


def _data_group(parameter: nn.Parameter) -> dist.ProcessGroup:
    from megatron.core import parallel_state

    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()
