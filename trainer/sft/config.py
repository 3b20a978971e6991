"""The section `sft` of a recipe: which conversations `penstock sft` trains on, and how long."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Paths = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class SftConfig(BaseModel):
    """Only for `penstock sft`; model, ranks, precision, LoRA, packs and checkpoints are those of `trainer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages: Paths = Field(
        (), description="JSONL or Parquet files with `messages` and, where wanted, `tools`; one file or a list."
    )
    runs: Paths = Field((), description="Folders of runs or evaluations whose recorded trajectories are trained on.")
    policy: str | None = Field(
        None,
        description="FILE.py:function that plays tasks of data.train; episodes with the full reward, or `min_reward`"
        " or more, are trained on.",
    )
    policy_rows: int = Field(512, ge=0, description="Tasks that the policy plays; 0: all.")
    min_reward: float | None = Field(
        None,
        description="Least reward of a trajectory of `runs` (None: any) and of an episode of `policy` (None: the task's"
        " full reward).",
    )
    newest_versions: int = Field(
        0,
        ge=0,
        description="Take only trajectories of `runs` that the newest N versions sampled; 0: those of any version.",
    )
    per_task: int = Field(
        0, ge=0, description="Most trajectories of one task of `runs`: highest reward first, then newest; 0: all."
    )
    bad_rows: Literal["stop", "skip"] = Field(
        "stop", description="A row that cannot be trained on ends the command, or is left out and counted."
    )
    validation: Paths = Field((), description="Files as in `messages`; the loss on them is eval/loss.")
    validation_share: float = Field(
        0.0, ge=0, lt=1, description="Share of the prompts held out for validation; all rows of a prompt go together."
    )
    max_tokens: int = Field(
        0, ge=0, description="Longer conversations are left out and counted; 0: what the model's context holds."
    )
    epochs: float = Field(1.0, gt=0, description="Times that each conversation is trained on, where `steps` is 0.")
    steps: int = Field(0, ge=0, description="Optimizer steps; 0: as `epochs` needs.")
    batch: int = Field(16, gt=0, description="Conversations per optimizer step.")
    lr: float = Field(1e-5, gt=0, description="AdamW learning rate.")
    lr_schedule: Literal["constant", "linear"] = Field(
        "linear", description="After the warm-up; linear decays to trainer.lr_floor."
    )
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    out: str | None = Field(None, description="Folder of the new model; None: final_model in the run's folder.")
    eval_every: int = Field(0, ge=0, description="Steps between validations; 0: before the first and after the last.")


def steps_of(sft: SftConfig, conversations: int) -> int:
    """Optimizer steps over `batch` conversations each."""
    return sft.steps or max(1, math.ceil(sft.epochs * conversations / sft.batch))
