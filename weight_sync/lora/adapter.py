"""LoRA adapters in peft's names: their settings, and what they add to which tensor of the model folder.

    W' = W + s·B·A      A [r, in], B [out, r], W [out, in]; s = alpha / r, or alpha / √r with ``use_rslora``

W is a tensor of version 0, the model folder that trainer and servers start from: a linear layer's ``weight``, or a
stack of all experts of a layer [E, m, n], of which A is [E, r, n] and B [E, m, r]. Every adapter applies to that base,
never to the adapter before. Anything else than such a W (DoRA, biases, embeddings, whole modules) is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from penstock.weight_sync.files.file_format import dtype_name
from penstock.weight_sync.manifest import TensorEntry

NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_MEANT = ("r", "lora_alpha", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern")
# fmt: off
_MEANS_NOTHING_HERE = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying", "bias",
    "lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "qalora_group_size", "runtime_config",
    "megatron_config", "megatron_core",
}
"""Keys that describe how the adapter was made, or that `_refuse_others` checks."""


class BadAdapter(ValueError):
    """These are not tensors and settings of a LoRA adapter that can be merged; the message names which is not."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of peft's ``LoraConfig`` that the merged weights hang on, under its names."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    """W is [in, out]."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """r of the modules whose name ends with the key, a regular expression; likewise `alpha_pattern`."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_peft(cls, config: Mapping[str, Any]) -> AdapterConfig:
        """Return the configuration of ``LoraConfig.to_dict()``, or of `as_dict`. Raises `BadAdapter` naming what is not
        supported.
        """
        _refuse_others(config)
        try:
            adapter = cls(**{name: config[name] for name in _MEANT if config.get(name) is not None})
            ranks = [adapter.r, *adapter.rank_pattern.values()]
            numbers = [*ranks, adapter.lora_alpha, *adapter.alpha_pattern.values()]
            _ = [re.compile(key) for key in (*adapter.rank_pattern, *adapter.alpha_pattern)]
        except (TypeError, AttributeError, re.error) as error:
            raise BadAdapter(f"the adapter's settings cannot be read: {error}") from error
        if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
            raise BadAdapter(f"a rank of the adapter is not a positive integer: {ranks}")
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise BadAdapter(f"lora_alpha or a value of alpha_pattern is not a number: {numbers}")
        return adapter

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a manifest."""
        return asdict(self)

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor of B·A."""
        rank = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one tensor of the base."""

    a: torch.Tensor  # [r, in]; of experts [E, r, n]
    b: torch.Tensor  # [out, r]; of experts [E, m, r]
    scale: float
    transposed: bool
    """The base's is [in, out]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that it changes."""
        *count, out, into = *self.b.shape[:-1], self.a.shape[-1]
        return (*count, into, out) if self.transposed else (*count, out, into)

    def add_to(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`weight` with this added, in float32, rounded once to `dtype`. `weight` itself may be used up."""
        target = weight.float().mT if self.transposed else weight.float()
        add = target.addmm_ if target.dim() == 2 else target.baddbmm_
        total = add(self.b.float(), self.a.float(), alpha=self.scale)
        return (total.mT if self.transposed else total).to(dtype).contiguous()


def read_adapter(folder: Path) -> dict[str, LowRank]:
    """Return the changes of peft's folder by name of the base's tensor. Raises `BadAdapter`, `OSError`, and
    `SafetensorError` for a damaged file."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    return changes_of(AdapterConfig.from_peft(settings), load_file(folder / "adapter_model.safetensors"))


def changes_of(config: AdapterConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, LowRank]:
    """Return the changes by name of the base's tensor. Raises `BadAdapter` naming the adapter's tensor."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = NAME.fullmatch(name)
        if not match:
            raise BadAdapter(f"tensor {name!r} is neither lora_A nor lora_B of a linear layer, in peft's names")
        if tensor.dim() not in (2, 3) or not tensor.is_floating_point():
            form = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            raise BadAdapter(f"tensor {name!r} is {form}, not a matrix of floats or a stack of them")
        has, rank = tensor.shape[-2 if match["side"] == "A" else -1], config.rank(match["module"])
        if has != rank:
            raise BadAdapter(f"tensor {name!r} has rank {has}, the adapter's settings say {rank}")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise BadAdapter("the adapter has no tensors")
    for module, pair in sides.items():
        if missing := {"A", "B"} - pair.keys():
            raise BadAdapter(f"tensor 'base_model.model.{module}.lora_{missing.pop()}.weight' is missing")
        if pair["A"].shape[:-2] != pair["B"].shape[:-2]:
            raise BadAdapter(f"lora_A and lora_B of {module!r} are of other numbers of experts")
    return {
        # A stack is a parameter itself, a matrix that of a module.
        f"{module}.weight" if pair["A"].dim() == 2 else module: LowRank(
            pair["A"], pair["B"], config.scale(module), config.fan_in_fan_out
        )
        for module, pair in sides.items()
    }


def check_base(changes: Mapping[str, LowRank], base: Mapping[str, TensorEntry]) -> None:
    """Check that `base` (entries by name) can be changed so. Raises `BadAdapter` naming the base's tensor."""
    for name, change in changes.items():
        if name not in base:
            raise BadAdapter(f"the adapter changes tensor {name!r}, which the model folder does not have")
        entry = base[name]
        if entry.shape != change.shape:
            raise BadAdapter(
                f"the adapter is for a tensor {name!r} of shape {list(change.shape)},"
                f" the model's has {list(entry.shape)}"
            )
        if entry.dtype not in ("float32", "bfloat16", "float16"):
            raise BadAdapter(f"tensor {name!r} of the model is {entry.dtype}: adapters are merged into floats only")
        if name == "lm_head.weight":
            # A head and an embedding of the same bytes are one parameter in the engine: one cannot change alone.
            for other, embedding in base.items():
                if other.endswith("embed_tokens.weight") and embedding.xxh3 == entry.xxh3:
                    raise BadAdapter(f"the adapter changes tensor {name!r}, which is tied to {other!r}")


def _refuse_others(config: Mapping[str, Any]) -> None:
    if not isinstance(config, Mapping):
        raise BadAdapter(f"the adapter's settings are a {type(config).__name__}, not names and values")
    if config.get("peft_type", "LORA") != "LORA":
        raise BadAdapter(f"peft_type {config['peft_type']} is not supported: LORA is")
    if config.get("bias", "none") != "none":
        raise BadAdapter(f"bias={config['bias']!r} is not supported: only lora_A and lora_B travel")
    # Values of ``init_lora_weights`` that leave W as it is in the folder; "pissa" and the like change it.
    if (start := config.get("init_lora_weights")) not in (True, False, None, "gaussian", "eva", "orthogonal"):
        raise BadAdapter(f"init_lora_weights={start!r} is not supported: it changes the weights of version 0")
    for name in sorted(config.keys() - _MEANS_NOTHING_HERE - set(_MEANT)):
        if config[name]:
            raise BadAdapter(f"{name}={config[name]!r} is not supported: the adapter could not be merged by W + s·B·A")
    if missing := [name for name in ("r", "lora_alpha") if config.get(name) is None]:
        raise BadAdapter(f"the adapter's settings have no {missing[0]}")


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Return the value that peft looks up: of the first key that is the module's name, or its end behind a dot."""
    for key, value in patterns.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise
