"""LoRA: the model stays as it is, low-rank matrices next to some of its matrices learn.

    W' = W + s·B·A      A [r, in], B [out, r]; s = alpha / r; B starts at 0: before training W' = W

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), section 4.1. Only A and B have
gradients and moments, only they are in checkpoints and in published versions; the reference policy is the same model
with s = 0, so it needs no further weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from penstock.trainer.config import LoraConfig
from penstock.trainer.engines.fsdp.row_choice import first_sentence
from penstock.trainer.engines.fsdp.saved_model import save_shared
from penstock.trainer.job import BadJob

NAME = "default"
"""peft's name for the one adapter of a model; part of its parameters' names."""
SEED = 0
"""Seed of A's first values: equal on all ranks, each of which keeps a part of it."""


class LowRank(NamedTuple):
    """The two matrices of one W, as they lie on this rank, and what their product is multiplied by."""

    a: Tensor
    b: Tensor
    scale: float


class Adapter:
    """The low-rank matrices in a model. Where weights are sharded, what gives tensors out is a collective."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        """Puts them into `model`, in place. Raises `BadJob` where no module has one of the target names, or where
        embedding, head or stacked experts have one, and `ImportError` where peft is not installed."""
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        alpha: Any = config.alpha  # an int to peft's types, any number to its arithmetic
        targets: Any = _targets(model, config)
        self._settings = PeftConfig(
            r=config.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        try:
            with torch.random.fork_rng(), weightless(model):
                torch.manual_seed(SEED)
                inject_adapter_in_model(self._settings, model, NAME)
        except ValueError as error:
            raise BadJob(f"trainer.lora.targets is {config.targets}: {first_sentence(error)}") from error
        if self._settings.target_parameters:
            raise BadJob(
                f"trainer.lora.targets reaches {', '.join(sorted(self._settings.target_parameters))} of the experts or "
                "their router, which get no low-rank matrices here: name modules of attention alone"
            )
        model.requires_grad_(False)
        self._layers: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
        # Logprobs are computed from the head's own weight; an adapter next to it would learn nothing.
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        for name, layer in self._layers.items():
            if any(layer is end for end in ends):
                raise BadJob(f"trainer.lora.targets has {name}: embedding and head get no low-rank matrices here")
        for layer in self._layers.values():
            for side in (layer.lora_A, layer.lora_B):
                side[NAME].requires_grad_(True)

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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's name, the tensor as it lies on this rank)"""
        for name, layer in self._layers.items():
            for side in ("lora_A", "lora_B"):
                yield f"base_model.model.{name}.{side}.weight", getattr(layer, side)[NAME].weight

    def of(self, name: str) -> LowRank | None:
        """Return the change of the parameter of this name (in the model with the adapter)."""
        layer = (
            self._layers.get(name.removesuffix(".base_layer.weight")) if name.endswith(".base_layer.weight") else None
        )
        return LowRank(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME]) if layer else None

    def set_scale(self, scale: float) -> None:
        """Multiply the product of each two matrices by `scale` from here on."""
        for layer in self._layers.values():
            layer.scaling[NAME] = scale

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was before training."""
        scales = [layer.scaling[NAME] for layer in self._layers.values()]
        for layer in self._layers.values():
            layer.scaling[NAME] = 0.0
        try:
            yield
        finally:
            for layer, scale in zip(self._layers.values(), scales, strict=True):
                layer.scaling[NAME] = scale

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
    if config.targets != "all-linear":
        return config.targets if isinstance(config.targets, str) else _known(model, config.targets)
    owners = (module for module in model.modules() if not isinstance(module, nn.Conv1d))
    # All experts of a layer in one parameter [E, …].
    stacked = any(one.dim() == 3 for module in owners for one in module.parameters(recurse=False))
    if not stacked and model.config.model_type not in MAMBAS:
        return "all-linear"
    head = model.get_output_embeddings()
    # The class itself: a router that is a kind of linear layer returns more than its product.
    linear = {
        name.rpartition(".")[2] for name, part in model.named_modules() if type(part) is nn.Linear and part is not head
    }
    # Names that peft uses for experts that are one parameter, anywhere in the model.
    experts = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
    excluded = (experts if stacked else set()) | ({"out_proj"} if model.config.model_type in MAMBAS else set())
    return sorted(linear - excluded)


def _known(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    names = {f".{name}" for name, part in model.named_modules() if hasattr(part, "weight")}
    for target in targets:
        if not any(name.endswith(f".{target}") for name in names):
            raise BadJob(
                f"trainer.lora.targets has {target}, and {type(model).__name__} has no matrix of that name (those of "
                "stacked experts get no low-rank matrices): remove it"
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
        if f".lora_A.{NAME}." not in name and f".lora_B.{NAME}." not in name:
            yield name.replace(".base_layer.", "."), parameter, adapter.of(name) if adapter else None
    persistent = model.state_dict().keys()
    yield from ((name, buffer, None) for name, buffer in model.named_buffers() if name in persistent)


def gathered(tensor: Tensor) -> Tensor:
    """A collective where `tensor` is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def merged(tensor: Tensor, change: LowRank | None) -> Tensor:
    """W', whole; in float32 where something is added. A collective if they are sharded."""
    full = gathered(tensor)
    if change is None:
        return full
    product = gathered(change.b).float() @ gathered(change.a).float()
    return torch.add(full.float(), product, alpha=change.scale)
