"""Settings of the queue."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TransferQueueConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(
        None,
        pattern=r"^(redis|rediss|unix)://",
        description="redis://, rediss:// or unix:// of a Redis or cluster; None lets `penstock run` start one.",
    )
    appendfsync: Literal["everysec", "always"] = Field(
        "everysec", description="When the started Redis's file is synced; it is written before each answer."
    )
    start_timeout_s: float = Field(
        60.0, gt=0, description="A Redis that starts must answer, or load more of its file, within this time."
    )
    min_group: int = Field(2, ge=1, description="A group is trained without failed members if this many have rewards.")
    max_attempts: int = Field(3, ge=1, description="Infrastructure failures per episode before it is a dead letter.")
    max_lost_leases: int = Field(
        4, ge=4, description="Workers that may die while they run an episode before it is a dead letter."
    )
    lease_ttl_s: float = Field(15.0, gt=0, description="An episode whose worker is silent this long goes elsewhere.")
    registry_ttl_s: float = Field(6.0, gt=0, description="A rollout server silent this long is gone.")
    deadline_s: float = Field(60.0, gt=0, description="How long a client retries while Redis is away.")
    max_bytes: int = Field(4 << 30, gt=0, description="No group is admitted while payloads hold more than this.")
    max_groups: int = Field(0, ge=0, description="Most groups in flight, finished or in training; 0: by staleness.")
    filter_groups: Literal["none", "zero_variance"] = Field(
        "none", description="zero_variance: groups with equal rewards are not trained on, others take their place."
    )
    max_filtered_steps: int = Field(
        10, ge=0, description="A step that filters more steps' worth of groups than this stops the run; 0: no limit."
    )
    quotas: dict[str, int] = Field(
        default_factory=dict, description="data_source: most groups of it that may be in flight or wait at once."
    )
    compression: Literal["none", "zstd"] = Field("none", description="How trajectories are packed in the queue.")
    archive: str | None = Field(
        None, description="Trained batches go to a folder NAME below this one; None: to the run's folder."
    )
    archive_bytes: int = Field(
        8 << 30,
        ge=0,
        description="Most bytes of committed batches; those that a kept checkpoint lacks always stay.",
    )
    lost_payloads: Literal["drop", "strict"] = Field(
        "drop", description="A payload of a fixed step is gone: drop and count its episode, or stop the run."
    )
    overage: Literal["wait", "mask", "drop"] = Field(
        "wait", description="What happens to groups about to pass the staleness bound when a batch ships."
    )
