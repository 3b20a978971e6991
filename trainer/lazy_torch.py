"""torch for files of algorithms. It is imported when an algorithm is called: `penstock run` checks names and settings
of algorithms in a process that computes nothing.

    from penstock.trainer.lazy_torch import Tensor, torch

An algorithm in a file of yours may import torch itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any
    """For annotations alone."""

    class LazyTorch:
        """A module with the attributes of torch, which is imported on first use."""

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = LazyTorch()

__all__ = ["Tensor", "torch"]
