"""Adapters of several clients in one engine: each in its turn lies in the model's low-rank matrices.

The model's matrices have the rank R of trainer.lora.rank. An adapter of rank r ≤ R uses r of their rows and columns and
0 elsewhere; where A and B are 0, so are both gradients, and AdamW leaves 0 as it is: its numbers are those of a model
of rank r. An adapter has weights, moments and the gradients that have added up since its last step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.common import atomic_path
from penstock.trainer.engines.fsdp.host_states import on_this_rank
from penstock.trainer.engines.fsdp.lora import Adapter

MOMENTS = ("exp_avg", "exp_avg_sq")
ATTENTION = ("attn", "attention", "mixer")
"""Parts of the names of a layer's modules that are no MLP."""


@dataclass(slots=True)
class AdapterState:
    """One adapter on the host, by peft's names of its matrices; A [r, in], B [out, r]."""

    rank: int
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """``exp_avg`` and ``exp_avg_sq`` by their matrix's name; empty before the first step."""
    steps: int = 0
    """Updates in the moments."""
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Write all of it; the file is there whole or not at all."""
        from safetensors.torch import save_file

        tensors = {f"weights.{name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"gradients.{name}": tensor for name, tensor in self.gradients.items()}
        for key in MOMENTS:
            tensors |= {f"{key}.{name}": moments[key] for name, moments in self.moments.items()}
        numbers = {"rank": str(self.rank), "steps": str(self.steps)}
        with atomic_path(file, durable=True) as unfinished:
            save_file({name: one.contiguous() for name, one in tensors.items()}, unfinished, numbers)

    @classmethod
    def read(cls, file: Path) -> AdapterState:
        """Raises `OSError`, and `SafetensorError` for a damaged file."""
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            numbers, state = opened.metadata(), cls(0, {})
            for key in opened.keys():  # noqa: SIM118 - no mapping
                kind, _, name = key.partition(".")
                if kind in MOMENTS:
                    state.moments.setdefault(name, {})[kind] = opened.get_tensor(key)
                else:
                    getattr(state, kind)[name] = opened.get_tensor(key)
        state.rank, state.steps = int(numbers["rank"]), int(numbers["steps"])
        return state

    def write_peft(self, folder: Path, settings: Mapping[str, Any], alpha: float) -> None:
        """Write the weights alone as a folder that peft, vLLM and SGLang load. `settings`: the engine's."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        own = {**settings, "r": self.rank, "lora_alpha": alpha}
        text = json.dumps({key: sorted(value) if isinstance(value, set) else value for key, value in own.items()})
        with atomic_path(folder / "adapter_config.json", durable=True) as unfinished:
            unfinished.write_text(text)
        with atomic_path(folder / "adapter_model.safetensors", durable=True) as unfinished:
            save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, unfinished)


class AdapterPlace:
    """The matrices of a model, and which adapter lies in them. One rank; between updates, in the torch thread."""

    def __init__(self, adapter: Adapter, optimizer: torch.optim.Optimizer, alpha: float) -> None:
        self._adapter, self._optimizer, self._alpha = adapter, optimizer, alpha
        self.most = int(adapter.settings["r"])
        """R"""

    def new(self, rank: int, seed: int, *, attention: bool = True, mlp: bool = True) -> AdapterState:
        """An adapter before training: A as peft makes it, from `seed`, B of 0; in modules that it leaves out A is 0 as
        well, and stays so."""
        weights: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self._matrices():
            matrix = torch.zeros(_cut(name, on_this_rank(parameter), rank).shape)
            of_attention = any(part in name for part in ATTENTION)
            if "lora_A" in name and (attention if of_attention else mlp):
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
            weights[name] = matrix
        return AdapterState(rank, weights)

    def take(self, rank: int) -> AdapterState:
        """A copy of the adapter of `rank` that lies here."""
        state = AdapterState(rank, {})
        for name, parameter in self._matrices():
            state.weights[name] = _copied(name, parameter, rank)
            if parameter.grad is not None:
                state.gradients[name] = _copied(name, parameter.grad, rank)
            if moments := self._optimizer.state.get(parameter):
                state.moments[name] = {key: _copied(name, moments[key], rank) for key in MOMENTS}
                state.steps = int(moments["step"])
        return state

    @torch.no_grad()
    def put(self, state: AdapterState) -> None:
        """Replace the adapter that lies here by `state`."""
        self._adapter.set_scale(self._alpha / state.rank)
        for name, parameter in self._matrices():
            _fill(name, on_this_rank(parameter), state.weights[name])
            gradient, moments = state.gradients.get(name), state.moments.get(name)
            parameter.grad = None if gradient is None else _like(name, parameter, gradient)
            if moments is None:
                self._optimizer.state.pop(parameter, None)
                continue
            step = torch.tensor(float(state.steps), device=on_this_rank(parameter).device)
            made: dict[str, Tensor] = {key: _like(name, parameter, moments[key]) for key in MOMENTS}
            self._optimizer.state[parameter] = {"step": step, **made}

    def _matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, tensor in self._adapter.tensors():
            assert isinstance(tensor, nn.Parameter)
            yield name, tensor


def _cut(name: str, matrix: Tensor, rank: int) -> Tensor:
    return matrix[:rank] if "lora_A" in name else matrix[:, :rank]


def _copied(name: str, tensor: Tensor, rank: int) -> Tensor:
    return _cut(name, on_this_rank(tensor).detach(), rank).to("cpu", torch.float32, copy=True)


def _fill(name: str, matrix: Tensor, values: Tensor) -> None:
    rank = values.shape[0] if "lora_A" in name else values.shape[1]
    matrix.zero_()
    _cut(name, matrix, rank).copy_(values)


def _like(name: str, parameter: Tensor, values: Tensor) -> Tensor:
    """`values` as a tensor that is shaped, typed and sharded as `parameter`."""
    local = torch.zeros_like(on_this_rank(parameter).detach())
    _fill(name, local, values)
    return DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local
