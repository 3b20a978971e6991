"""LoRA of a mixture's experts: two low-rank matrices for each matrix of an expert.

    W' = W + s·B·A      W [E, m, n] as it lies in memory, A [E, r, n], B [E, m, r]; s = alpha / r

They are parameters of the module that has the experts, and lie over the ranks as these do. No W' is ever made: rows,
sorted by expert, go through each of the layer's grouped products and through two narrow ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

ALIGNED = 8
"""Rows of a grouped product's matrices begin at multiples of 16 bytes, also in bfloat16."""


class ExpertsLora:
    """The low-rank matrices of one layer's experts, and the forward of their module."""

    def __init__(self, module: Any, rank: int, scale: float, generator: torch.Generator) -> None:
        """Puts them into `module`, in place: A as peft makes it, from `generator`, B of 0."""
        self.module, self.scale = module, scale
        self.stacks = tuple(name for name, one in module.named_parameters(recurse=False) if one.dim() == 3)
        for name in self.stacks:
            count, rows, columns = getattr(module, name).shape
            bound = columns**-0.5
            a = torch.empty(count, rank, columns).uniform_(-bound, bound, generator=generator)
            module.register_parameter(f"lora_A_{name}", nn.Parameter(a))
            module.register_parameter(f"lora_B_{name}", nn.Parameter(torch.zeros(count, rows, rank)))
        module.forward = self

    def sides(self, name: str) -> tuple[Tensor, Tensor]:
        """(A, B) of the stack of this name, as they lie on this rank."""
        return getattr(self.module, f"lora_A_{name}"), getattr(self.module, f"lora_B_{name}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(peft's ending of a name, the tensor)"""
        for name in self.stacks:
            for side, tensor in zip("AB", self.sides(name), strict=True):
                yield f"{name}.lora_{side}.weight", tensor

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], experts [T, k], weights [T, k] → [T, H]"""
        module: Any = self.module
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.zeros(module.num_experts, dtype=torch.int32, device=hidden.device)
        counts.index_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = hidden[order // chosen.shape[-1]]
        if module.has_gate:
            inner = module._apply_gate(self._product("gate_up_proj", rows, experts, ends))
        else:
            inner = module.act_fn(self._product("up_proj", rows, experts, ends))
        each = self._product("down_proj", inner, experts, ends)
        if module.has_post_expert_norm:
            each = module.post_expert_norm(each)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        each = each[places].view(*chosen.shape, -1)
        return (each * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _product(self, name: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """rows [S, in] of experts [S], of which each one's end at `ends` [E] → [S, out]"""
        weight, (a, b) = getattr(self.module, name), self.sides(name)
        if not self.module.is_transposed:  # W is [E, out, in], else [E, in, out]
            weight, a, b = weight.mT, b.mT, a.mT
        rows = rows.to(weight.dtype)
        low = grouped_mm(grouped_mm(rows, b, offs=ends), a, offs=ends)
        total = torch.add(grouped_mm(rows, weight, offs=ends), low, alpha=self.scale)
        return total + getattr(self.module, f"{name}_bias")[experts] if self.module.has_bias else total
