"""megatron's process groups, which are global to a process: made for the group that `Ranks` opened."""

from __future__ import annotations

import atexit
from typing import Any

import torch.distributed as dist

from penstock.trainer.config import ParallelConfig

SEED = 1
"""Of megatron's random states. No number depends on it: weights are loaded, and there is no dropout."""

_made: dict[str, Any] = {}
"""What the groups were made from, so that a second engine on the same ranks takes them over."""


def open_groups(parallel: ParallelConfig) -> None:
    """A collective over all ranks; a no-op where the groups of these ranks are there already."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    wanted = {"world": dist.group.WORLD, "parallel": parallel}
    if _made == wanted and parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        # Experts are not cut by the tensor ranks as well: mbridge would have to merge them over two groups.
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(SEED)
    _made.update(wanted)
    atexit.register(_let_go)


def _let_go() -> None:
    """megatron keeps its groups as long as the process lives, and gloo's threads live with them: they could abort the
    ending interpreter, see `Ranks.open`. Runs before the collection that is registered there."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    _made.clear()
