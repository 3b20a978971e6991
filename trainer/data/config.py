"""The section `data` of a recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from penstock.trainer.data.curriculum import CurriculumConfig


class DataConfig(BaseModel):
    """Tasks of training and evaluation, and their order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: str = Field(
        description="Parquet or JSONL (file or folder) with verl's columns, FILE.py:TASKS, generate:SPEC, harbor:FOLDER"
        " or reasoning_gym:TASK."
    )
    eval: str | None = Field(None, description="Same for evaluation; None: no evaluation.")
    eval_limit: int = Field(0, ge=0, description="Evaluate on the first rows only; 0 takes all.")
    shuffle: bool = Field(True, description="A new order each epoch, from the seed.")
    curriculum: CurriculumConfig | None = Field(
        None,
        description="Tasks come by the weights of their data sources and by how often they are passed, not epoch after"
        " epoch; {} takes the defaults (page 'My own data and model').",
    )
