"""How a run samples where nobody asks for something else."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.errors import InfraFailure
from penstock.rollout_server import Sampling
from penstock.transfer_queue import Lease


def usual_sampling(config: AgentConfig, stop_token_ids: Sequence[int], lease: Lease) -> Sampling:
    """The recipe's values with those of the task over them. Raises `InfraFailure` where the task's are wrong.

    A task's ``greedy_member`` names the one episode of its group that is sampled greedily.
    """
    usual = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_new_tokens,
        "stop_token_ids": tuple(stop_token_ids),
    }
    wanted = {**usual, **lease.task.sampling}
    if wanted.pop("greedy_member", None) == lease.member:
        wanted["temperature"] = 0.0
    try:
        return Sampling(**wanted)
    except ValidationError as error:
        raise InfraFailure("task", f"bad sampling of {lease.task.task_id}: {error}") from error
