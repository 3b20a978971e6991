"""What a role reserves on a Ray cluster."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

Bundle = dict[str, float]


class RayConfig(BaseModel):
    """Only for `penstock run --on ray`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout: Bundle = Field(
        default_factory=dict,
        description="What one rollout server reserves, in Ray's names, as {CPU: 8, GPU: 2}; not named: CPU 1, and GPU 1"
        " where the cluster has any.",
    )
    agent: Bundle = Field(default_factory=dict, description="The same of one agent worker; not named: CPU 1.")
    trainer: Bundle = Field(
        default_factory=dict,
        description="The same of the trainer; not named: a CPU per rank and thread, a GPU per rank if it has any.",
    )
    env: tuple[str, ...] = Field(
        (), description="Variables of this machine's environment that every role gets too, as WANDB_API_KEY."
    )
