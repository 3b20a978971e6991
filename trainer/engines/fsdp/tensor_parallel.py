"""Tensor parallelism: a layer's matrices are shared out over ranks by the plan that the model itself has.

transformers' plan names the matrices (`colwise`, `rowwise`, …); here they become DTensors by `parallelize_module`.
Every other parameter becomes a DTensor too, whole on every rank of the group: gradients then have one mesh, which
clipping and the optimizer need. A norm between two split matrices (Qwen3's `q_norm`) sees this rank's heads only, so
its gradient is a part of the sum; left out of the plan it runs and is wrong by more than half, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from penstock.trainer.job import BadJob


class CannotSplitModel(BadJob):
    """The model cannot be shared out over a tensor group; the message says why."""


class ReplicatedWhole(ParallelStyle):
    """Parameters whole on every rank; so is what the module is given, and what it says."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _replicate, self._enter, _leave)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return tuple(
            DTensor.from_local(value, mesh, [self._placement(value)], run_check=False)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            else value
            for value in inputs
        )

    def _placement(self, value: torch.Tensor) -> Any:
        return Replicate()


class ReplicatedPerHead(ReplicatedWhole):
    """Parameters whole on every rank, given [1, L, this rank's heads, D]: their gradient is summed over the group."""

    def _placement(self, value: torch.Tensor) -> Any:
        return Shard(value.dim() - 2)


STYLES: Mapping[str, tuple[Callable[..., ParallelStyle], Mapping[str, Any]]] = {
    "colwise": (ColwiseParallel, {}),
    "rowwise": (RowwiseParallel, {}),
    "colwise_gather_output": (ColwiseParallel, {"output_layouts": Replicate()}),
    "embedding_rowwise": (RowwiseParallel, {"input_layouts": Replicate()}),
    "replicated_with_grad_allreduce": (ReplicatedPerHead, {}),
}
"""transformers' names → torch's."""
LORA: Mapping[str, Mapping[str, str]] = {
    "colwise": {"base_layer": "colwise", "lora_B.default": "colwise"},
    "rowwise": {"base_layer": "rowwise", "lora_A.default": "rowwise"},
}
"""Parts of an adapted matrix that are split; the other side of the adapter stays whole."""


def split_over(owner: Any, mesh: DeviceMesh) -> None:
    """The model `owner.model`, and whole what else `owner` has. In place. Raises `CannotSplitModel`."""
    model = owner.model
    plan = {f"model.{name}": style for name, style in plan_of(model, mesh.size()).items()}
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    for name, module in list(owner.named_modules()):
        if not list(module.parameters(recurse=False)):
            continue
        if list(module.children()):
            raise CannotSplitModel(f"{name} ({type(module).__name__}) has parameters in addition to those of its parts")
        # Every rank has loaded the same weights: each takes its part without asking another.
        kind, arguments = STYLES[plan[name]] if name in plan else (ReplicatedWhole, {})
        parallelize_module(module, mesh, kind(**arguments), src_data_rank=None)
    if tied:  # each of the two was distributed by itself
        head.weight = model.get_input_embeddings().weight


def plan_of(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Module name → style, of every matrix that is split over `size` ranks. Raises `CannotSplitModel`."""
    model_plan = model.tp_plan
    if not model_plan:
        raise CannotSplitModel(
            f"{type(model).__name__} has no plan for tensor parallelism; set trainer.parallel.tensor to 1"
        )
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in model_plan.items()}
    names = [name for name, _ in model.named_modules()]
    plan = {name: style for name in names for pattern, style in patterns.items() if pattern.fullmatch(name)}
    # Embedding and head share out the vocabulary if its size is divisible; else both stay whole.
    named = {id(module): name for name, module in model.named_modules()}
    vocabulary: Any = model.get_input_embeddings()
    embedding, head = named[id(vocabulary)], named.get(id(model.get_output_embeddings()))
    plan = {name: style for name, style in plan.items() if name not in (embedding, head)}
    if vocabulary.weight.shape[0] % size == 0:
        plan |= {embedding: "embedding_rowwise"} | ({head: "colwise_gather_output"} if head else {})
    plan = _with_adapters(plan, set(names))
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown:
        raise CannotSplitModel(
            f"{type(model).__name__} asks for {', '.join(unknown)}, which the trainer does not split yet"
        )
    _check_sizes(model, size)
    return plan


def _with_adapters(plan: Mapping[str, str], names: set[str]) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, style in plan.items():
        if f"{name}.base_layer" not in names:
            styles[name] = style
            continue
        if style not in LORA:
            raise CannotSplitModel(f"{name} has an adapter and is split {style}: leave it out of trainer.lora.targets")
        styles |= {f"{name}.{part}": of_part for part, of_part in LORA[style].items()}
    return styles


def _check_sizes(model: PreTrainedModel, size: int) -> None:
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = getattr(config, key, None)
        if number is not None and number % size:
            raise CannotSplitModel(
                f"the model's {key} is {number}, which trainer.parallel.tensor={size} does not divide"
            )


def _replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.data, mesh, [Replicate()], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local() if isinstance(output, DTensor) else output
