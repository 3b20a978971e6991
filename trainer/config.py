"""Settings of the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(40, gt=0, description="Optimizer steps (published versions) of the run.")
    ranks: int = Field(1, gt=0, description="Trainer processes, started by torchrun on one machine.")
    threads: int = Field(1, gt=0, description="CPU threads per trainer process.")
    advantage: str = Field("grpo", description="Registered advantage estimator.")
    loss: str = Field("decoupled_ppo", description="Registered policy loss.")
    correction: str | None = Field(
        "truncated_is", description="Registered off-policy correction; needed where max_staleness > 0."
    )
    correction_cap: float = Field(2.0, gt=0, description="Upper bound of the importance weights.")
    clip_low: float = Field(0.2, gt=0, description="Lower clip range of the ratio to the proximal policy.")
    clip_high: float = Field(0.28, gt=0, description="Upper clip range of the ratio to the proximal policy.")
    minibatches: int = Field(1, gt=0, description="Optimizer updates per step; each takes its share of the groups.")
    lr: float = Field(1e-6, gt=0, description="AdamW learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up of the learning rate.")
    lr_schedule: Literal["constant", "linear"] = Field(
        "constant", description="After the warm-up; linear decays to the floor."
    )
    lr_floor: float = Field(0.1, ge=0, le=1, description="Share of lr that the last step has under lr_schedule linear.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Arithmetic; master weights stay float32.")
    micro_batch_tokens: int = Field(2048, gt=0, description="Token budget of one packed forward and backward.")
    checkpoint_every: int = Field(10, gt=0, description="Steps between checkpoints (and ledger commits).")
    keep_checkpoints: int = Field(2, gt=0, description="Newest checkpoints kept.")
    eval_every: int = Field(0, ge=0, description="Steps between evaluations; 0: only at the end.")
    batch_timeout_s: float = Field(300.0, gt=0, description="A batch not ready by then stops the run, cause told.")
    max_bad_steps: int = Field(3, ge=0, description="Steps with NaN or infinite gradients in a row that are skipped.")
    max_restarts: int = Field(3, ge=0, description="Restarts of the trainer after a crash.")
    save_trajectories: int = Field(8, ge=0, description="Trajectories written out per step for people to read.")
