"""LoRA: the model stays as it is, low-rank matrices next to some of its matrices learn.

    W' = W + s·B·A      A [r, in], B [out, r]; s = alpha / r; B starts at 0: before training W' = W

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), section 4.1. Only A and B have
gradients and moments, only they are in checkpoints and in published versions; the reference policy is the same model
with s = 0, so it needs no further weights. peft puts them next to linear layers; those of experts that are one stack
are ours (`experts_lora`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.trainer.config import LoraConfig
from penstock.trainer.engines.fsdp.experts import is_called_by_experts
from penstock.trainer.engines.fsdp.experts_lora import ALIGNED, ExpertsLora
from penstock.trainer.engines.fsdp.host_states import on_this_rank
from penstock.trainer.engines.fsdp.row_choice import first_sentence
from penstock.trainer.engines.fsdp.saved_model import save_shared
from penstock.trainer.job import BadJob
from penstock.weight_sync import HubNames

NAME = "default"
"""peft's name for the one adapter of a model; part of its parameters' names."""
LOW_RANK = re.compile(r"\.lora_[AB][._]")
"""Part of the name of each parameter of an adapter."""
EXPERTS = "experts"
"""Name in trainer.lora.targets of the modules that have all experts of a layer."""
ALL_LINEAR = "all-linear"
SEED = 0
"""Seed of A's first values: equal on all ranks, each of which keeps a part of it."""


class LowRank(NamedTuple):
    """The two matrices of one W, or stacks of them, as they lie on this rank, and what their product is multiplied
    by."""

    a: Tensor
    b: Tensor
    scale: float


class Adapter:
    """The low-rank matrices in a model. Where weights are sharded, what gives tensors out is a collective."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, names: HubNames) -> None:
        """Puts them into `model`, in place. Raises `BadJob` where no module has one of the target names, or where
        embedding, head or a router have one, and `ImportError` where peft is not installed."""
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        alpha: Any = config.alpha  # an int to peft's types, any number to its arithmetic
        targets: Any = _targets(model, config)
        self._settings = PeftConfig(
            r=config.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        if targets:
            try:
                with torch.random.fork_rng(), weightless(model):
                    torch.manual_seed(SEED)
                    inject_adapter_in_model(self._settings, model, NAME)
            except ValueError as error:
                raise BadJob(f"trainer.lora.targets is {config.targets}: {first_sentence(error)}") from error
        if self._settings.target_parameters:
            raise BadJob(
                f"trainer.lora.targets reaches {', '.join(sorted(self._settings.target_parameters))} of the experts or "
                "their router, which get no low-rank matrices by that name: name modules of attention, and `experts`"
            )
        model.requires_grad_(False)
        self._names = names
        self._experts = _experts(model, config, names) if EXPERTS in config.names else {}
        if self._experts:  # what others who load the saved adapter look for: the names in the files
            self._settings.target_modules = {*(self._settings.target_modules or ()), *self._names_of_experts()}
        self._layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
        # Logprobs are computed from the head's own weight; an adapter next to it would learn nothing.
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        for name, layer in self._layers.items():
            if any(layer is end for end in ends):
                raise BadJob(f"trainer.lora.targets has {name}: embedding and head get no low-rank matrices here")
        for layer in self._layers.values():
            for side in (layer.lora_A, layer.lora_B):
                side[NAME].requires_grad_(True)

    def _names_of_experts(self) -> Iterator[str]:
        for stack in (f"{name}.{own}" for name, experts in self._experts.items() for own in experts.stacks):
            stored = (one for row in self._names.experts(stack) or () for one in row)
            yield from (one.removesuffix(".weight").rpartition(".")[2] for one in stored)

    def lower_base(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Keep what does not learn in `dtype`, in place. Before the model is sharded."""
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """Return peft's ``LoraConfig.to_dict()``, for `WeightPublisher.write_adapter`."""
        settings: dict[str, Any] = self._settings.to_dict()
        return settings

    @property
    def has_experts(self) -> bool:
        return bool(self._experts)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, the tensor as it lies on this rank); of experts whole stacks."""
        for name, layer in self._layers.items():
            for side in ("lora_A", "lora_B"):
                yield f"base_model.model.{name}.{side}.weight", getattr(layer, side)[NAME].weight
        for name, experts in self._experts.items():
            yield from ((f"base_model.model.{name}.{ending}", tensor) for ending, tensor in experts.tensors())

    def published(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a whole one of `tensors` under the names of the model's files, by which servers merge: of experts that
        the files have one by one, those of each of an expert's matrices."""
        changed, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        if tensor.dim() == 2:
            changed += ".weight"
        matrices: Iterable[tuple[str, Tensor]]
        if (stored := self._names.stored_name(changed)) is not None:
            matrices = [(stored, tensor)]
        elif side == "B":  # joined as the stack is
            matrices = self._names.split_experts(changed, tensor, 0)
        else:  # one for all that the stack joins
            rows = zip(self._names.experts(changed) or (), tensor, strict=True)
            matrices = ((one, a.clone()) for row, a in rows for one in row)
        for stored, matrix in matrices:
            module = stored.removesuffix(".weight") if matrix.dim() == 2 else stored
            yield f"base_model.model.{module}.lora_{side}.weight", matrix

    def of(self, name: str) -> LowRank | None:
        """Return the change of the parameter of this name (in the model with the adapter)."""
        owner, _, own = name.rpartition(".")
        if (experts := self._experts.get(owner)) is not None and own in experts.stacks:
            return LowRank(*experts.sides(own), experts.scale)
        layer = self._layers.get(owner.removesuffix(".base_layer")) if name.endswith(".base_layer.weight") else None
        return LowRank(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME]) if layer else None

    def set_scale(self, scale: float) -> None:
        """Multiply the product of each two matrices by `scale` from here on."""
        self._scale([scale] * (len(self._layers) + len(self._experts)))

    def _scale(self, scales: Iterable[float]) -> list[float]:
        """Returns those before."""
        before, new = [], iter(scales)
        for layer in self._layers.values():
            before.append(layer.scaling[NAME])
            layer.scaling[NAME] = next(new)
        for experts in self._experts.values():
            before.append(experts.scale)
            experts.scale = next(new)
        return before

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was before training."""
        before = self._scale([0.0] * (len(self._layers) + len(self._experts)))
        try:
            yield
        finally:
            self._scale(before)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write a peft folder with `tensors`, which are complete and on the host."""
        folder.mkdir(parents=True, exist_ok=True)
        self._settings.save_pretrained(str(folder))
        weights = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_shared(weights, folder / "adapter_model.safetensors")


MAMBAS = frozenset({"falcon_h1", "nemotron_h"})
"""Types of models in which peft refuses a mixer's `out_proj`: a kernel for training without row bounds reads its
weight."""


def _targets(model: PreTrainedModel, config: LoraConfig) -> str | list[str]:
    """Return the targets for peft, whose all-linear would also reach experts that are one parameter, and layers that it
    refuses. Raises `BadJob` for a name that peft would leave out without a word.
    """
    if isinstance(config.targets, str) and config.targets not in (ALL_LINEAR, EXPERTS):
        return config.targets
    named = _known(model, [one for one in config.names if one not in (ALL_LINEAR, EXPERTS)])
    if ALL_LINEAR not in config.names:
        return named
    owners = (module for module in model.modules() if not isinstance(module, nn.Conv1d))
    # All experts of a layer in one parameter [E, …].
    stacked = any(one.dim() == 3 for module in owners for one in module.parameters(recurse=False))
    if not stacked and model.config.model_type not in MAMBAS:
        return ALL_LINEAR
    head = model.get_output_embeddings()
    # The class itself: a router that is a kind of linear layer returns more than its product.
    linear = {
        name.rpartition(".")[2] for name, part in model.named_modules() if type(part) is nn.Linear and part is not head
    }
    # Names that peft uses for experts that are one parameter, anywhere in the model.
    experts = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
    excluded = (experts if stacked else set()) | ({"out_proj"} if model.config.model_type in MAMBAS else set())
    return sorted((linear - excluded) | set(named))


def _experts(model: PreTrainedModel, config: LoraConfig, names: HubNames) -> dict[str, ExpertsLora]:
    """Return the matrices of each layer's experts by the names of their modules."""
    setting, kind = f"trainer.lora.targets has {EXPERTS}", type(model).__name__
    modules = {name: one for name, one in model.named_modules() if is_called_by_experts(one)}
    if not modules:
        raise BadJob(f"{setting}, and {kind} has no experts that are one stack of matrices: remove it")
    if config.rank % ALIGNED:
        fits = -(-config.rank // ALIGNED) * ALIGNED
        raise BadJob(f"{setting}, and trainer.lora.rank {config.rank} is no multiple of {ALIGNED}: set it to {fits}")
    generator = torch.Generator().manual_seed(SEED)
    layers = {
        name: ExpertsLora(one, config.rank, config.alpha / config.rank, generator) for name, one in modules.items()
    }
    for stack in (f"{name}.{own}" for name, experts in layers.items() for own in experts.stacks):
        if names.stored_name(stack) is None and names.experts(stack) is None:
            raise BadJob(f"{setting}, and the files of {kind} have {stack} in parts of several experts: remove it")
    return layers


def _known(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    names = {f".{name}" for name, part in model.named_modules() if hasattr(part, "weight")}
    for target in targets:
        if not any(name.endswith(f".{target}") for name in names):
            raise BadJob(
                f"trainer.lora.targets has {target}, and {type(model).__name__} has no matrix of that name (those of "
                f"stacked experts are named {EXPERTS}): remove it"
            )
    return list(targets)


@contextmanager
def weightless(model: nn.Module) -> Iterator[None]:
    """Parameters on meta are zeros on the host meanwhile, which take no memory: peft puts its matrices where those of
    the model are, and on meta their first values would be lost."""
    places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
    replaced = [
        (owner, name, parameter)
        for owner, name in places
        if (parameter := owner[name]) is not None and parameter.is_meta
    ]
    for owner, name, parameter in replaced:
        owner[name] = nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), requires_grad=False)
    try:
        yield
    finally:
        for owner, name, parameter in replaced:
            owner[name] = parameter


def named_weights(model: nn.Module, adapter: Adapter | None) -> Iterator[tuple[str, Tensor, LowRank | None]]:
    """(the model's name, tensor as it lies on this rank, what is to be added to it), without the adapter's own.

    A tied embedding comes once, under its first name.
    """
    for name, parameter in model.named_parameters():
        if not LOW_RANK.search(name):
            yield name.replace(".base_layer.", "."), parameter, adapter.of(name) if adapter else None
    persistent = model.state_dict().keys()
    yield from ((name, buffer, None) for name, buffer in model.named_buffers() if name in persistent)


def gathered(tensor: Tensor) -> Tensor:
    """A collective where `tensor` is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def merged(tensor: Tensor, change: LowRank | None) -> Tensor:
    """W', whole; in float32 where something is added. A collective if they are sharded."""
    return _added(gathered(tensor), change and LowRank(gathered(change.a), gathered(change.b), change.scale))


@torch.no_grad()
def merged_part(tensor: DTensor, change: LowRank | None) -> Tensor:
    """`merged` of this rank's experts, whose matrices lie as they do."""
    return _added(tensor.to_local(), change and LowRank(on_this_rank(change.a), on_this_rank(change.b), change.scale))


def _added(weight: Tensor, change: LowRank | None) -> Tensor:
    if change is None:
        return weight
    return torch.add(weight.float(), change.b.float() @ change.a.float(), alpha=change.scale)
