"""Episode filters: how much each episode of a group weighs in the loss. One file each."""

from __future__ import annotations

from collections.abc import Callable

from penstock.common import Registry
from penstock.trainer.lazy_torch import Tensor

EpisodeFilter = Callable[..., Tensor]
"""``(rewards [E], group [E], *, setting=default, …) → weights [E]``, at least 0, mean 1 over each group."""

FILTERS: Registry[EpisodeFilter] = Registry("episode filter", package="penstock.trainer.filters")
