"""The one typed tree of a run. A recipe is a YAML file of it; dotted overrides come on top."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from penstock.agent_loops import AgentConfig
from penstock.dashboard import DashboardConfig
from penstock.deploy.placements.ray.config import RayConfig
from penstock.deploy.telemetry.config import TelemetryConfig
from penstock.rollout_server import RolloutConfig
from penstock.sandbox import SandboxConfig
from penstock.tools import ToolConfig, read_tools
from penstock.trainer import TrainerConfig
from penstock.transfer_queue import TransferQueueConfig

STALENESS_NAMES = {"sync": 0, "one_step_off": 1, "fully_async": 2}


def _staleness(value: Any) -> Any:
    return STALENESS_NAMES.get(value, value) if isinstance(value, str) else value


class DataConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    train: str = Field(description="Parquet or JSONL with verl's columns, or generate:SPEC (see docs).")
    eval: str | None = Field(None, description="Same for evaluation; None: no evaluation.")
    eval_limit: int = Field(0, ge=0, description="Evaluate on the first rows only; 0 takes all.")
    shuffle: bool = Field(True, description="A new order each epoch, from the seed.")


class RunConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Names runs/NAME and the queue's keys."
    )
    runs_dir: str = Field("runs", description="Folder that holds the runs.")
    seed: int = Field(0, description="Of data order, sampling and initialisation.")
    model: str = Field(description="Model folder or hub name (AutoModelForCausalLM, AutoTokenizer).")
    max_staleness: Annotated[int, BeforeValidator(_staleness)] = Field(
        2,
        ge=0,
        le=64,
        description="Oldest policy trained on, in versions: sync 0, one_step_off 1, fully_async 2.",
    )
    group_size: int = Field(8, ge=1, description="Episodes per task.")
    groups_per_step: int = Field(8, ge=1, description="Tasks per optimizer step.")
    stall_timeout_s: float = Field(
        300.0,
        gt=0,
        description="A run in which nothing moves for this long is stuck: the part that holds it up is told.",
    )
    stall_action: Literal["warn", "stop"] = Field(
        "stop", description="What becomes of a stuck run, once every local role has written its stacks into its log."
    )
    data: DataConfig
    agent: AgentConfig = AgentConfig()
    tools: Annotated[list[ToolConfig], BeforeValidator(read_tools)] = Field(
        default_factory=list,
        description="Tools the agent may call, or a YAML file with a list of them, ours or verl's.",
    )
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    transfer_queue: TransferQueueConfig = TransferQueueConfig()
    trainer: TrainerConfig = TrainerConfig()
    dashboard: DashboardConfig = DashboardConfig()
    ray: RayConfig = RayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
