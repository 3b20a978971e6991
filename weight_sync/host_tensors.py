"""Copies of weights in host memory."""

from __future__ import annotations

import torch


def host_copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of `tensor` on the CPU; if it is floating-point, in `dtype`.

    It is cast on its own device: otherwise float32 crosses the bus, and one CPU thread casts it.
    """
    tensor = tensor.detach()
    target = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(target, copy=True) if tensor.is_cpu else tensor.to(target).cpu()
