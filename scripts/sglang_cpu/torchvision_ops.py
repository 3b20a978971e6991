"""Lets `import torchvision` pass on a CPU build of torch; loaded at every start of the environment by a .pth file.

torchvision's wheel is a CUDA build, so its compiled operators do not load there, but its import registers shapes for
them. They are declared just before that import; text models never call them.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)


class DeclareFirst(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first looked for; finds nothing itself."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Always None: the ordinary finders go on."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare() -> None:
    import torch

    for name in OPERATORS:
        torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")


sys.meta_path.insert(0, DeclareFirst())
