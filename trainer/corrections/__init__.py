"""Off-policy corrections: an importance weight per sampled token, without gradient. One file each."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penstock.trainer.registry import Registry

Correction = Callable[[Tensor, Tensor, float], Tensor]
"""(logprobs of the proximal policy [N], of the behaviour policy [N], cap) → weights [N]."""

CORRECTIONS: Registry[Correction] = Registry("off-policy correction", "penstock.trainer.corrections")
