"""The configuration of a run: one typed tree, read from a recipe (a YAML file) and dotted overrides.

Every error names the key and how to fix it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.agent_loops import AgentConfig
from penstock.dashboard import DashboardConfig
from penstock.deploy.config_schema import ConfigSchema
from penstock.deploy.costs import CostConfig
from penstock.deploy.recipe_tree import (
    ConfigError,
    change_paths,
    read_recipe,
    references,
    resolve_paths,
    set_key,
    yaml_problem,
)
from penstock.rollout_server import RolloutConfig
from penstock.sandbox import SandboxConfig
from penstock.service import ServeConfig
from penstock.tools import ToolConfig, read_tools
from penstock.trainer import DataConfig, SftConfig, TrainerConfig
from penstock.transfer_queue import TransferQueueConfig

NO_TASKS = "none"
"""`data.train` of a recipe for `penstock sft` that names no tasks."""
RUN_FILE, ABOVE = "config.yaml", ".."
"""The configuration in a run's folder, and the `runs_dir` in it: the folder above, wherever that is."""
STALENESS_NAMES = {"sync": 0, "one_step_off": 1, "fully_async": 2}


def _staleness(value: Any) -> Any:
    """The versions that a name stands for. Raises `ValueError` for another name, and for a truth value."""
    if not isinstance(value, str | bool) or str(value).isdecimal():
        return value
    if isinstance(value, bool) or value not in STALENESS_NAMES:
        names = ", ".join(STALENESS_NAMES)
        raise ValueError(f"must be {names} or a number from 0 to 64")
    return STALENESS_NAMES[value]


class PlacementConfig(BaseModel):
    """Which devices the roles of one machine compute on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    colocated: bool = Field(
        False,
        description="Engines and trainer share the same devices, in turns: engines sleep while the trainer takes its"
        " step, and its states wait in host memory while they sample. `penstock run` on one machine.",
    )
    lend: bool = Field(
        False,
        description="The trainer's devices sample between its steps too: as many more rollout servers as fit on them"
        " are asleep while a step is trained. `penstock run` on one machine.",
    )
    memory_budget_bytes: int = Field(
        0,
        ge=0,
        description="Most bytes of the shared devices together that weights, KV caches, gradients and moments of both"
        " sides may take; engine hf. 0: the devices' own size.",
    )
    sleep_level: Literal[1, 2] | None = Field(
        None,
        description="What an engine releases besides its KV cache: 1 moves its weights to host memory, 2 drops them and"
        " loads the newest version when it wakes. Not set: 2 with vllm, 1 with other engines.",
    )

    @property
    def in_turns(self) -> bool:
        """Some engine and the trainer share devices."""
        return self.colocated or self.lend


class TelemetryConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    metrics: bool = Field(True, description="Agent workers, trainer and `penstock run` serve /metrics too.")
    host: str = Field("127.0.0.1", description="Address of these metrics servers; rollout servers use rollout.host.")
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="First of up to 32 ports tried; 0 takes free ports, listed in prometheus-targets.json.",
    )


Bundle = dict[str, float]


class RayConfig(BaseModel):
    """Only for `penstock run --on ray`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout: Bundle = Field(
        default_factory=dict,
        description="Resources of one rollout server, as {CPU: 8, GPU: 2}; default: CPU 1, and GPU 1"
        " if the cluster has GPUs.",
    )
    agent: Bundle = Field(default_factory=dict, description="Resources of one agent worker; default: CPU 1.")
    trainer: Bundle = Field(
        default_factory=dict,
        description="Resources of the trainer; default: a CPU per rank and thread, a GPU per rank if there are GPUs.",
    )
    env: tuple[str, ...] = Field(
        (), description="Environment variables of this machine passed to every role, such as WANDB_API_KEY."
    )


class RunConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Names runs/NAME and the queue's keys."
    )
    runs_dir: str = Field("runs", description="Folder that holds the runs.")
    seed: int = Field(0, description="Seed of data order, sampling and initialisation.")
    model: str = Field(description="Model folder or hub name (AutoModelForCausalLM, AutoTokenizer).")
    max_staleness: Annotated[int, BeforeValidator(_staleness)] = Field(
        2,
        ge=0,
        le=64,
        description="Maximum age of the policy of trained tokens, in versions: sync 0, one_step_off 1, fully_async 2.",
    )
    group_size: int = Field(8, ge=1, description="Episodes per task.")
    groups_per_step: int = Field(8, ge=1, description="Tasks per optimizer step.")
    stall_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Time without progress after which a stalled run ends; the stalled component is reported, and every"
        " local role's stacks are in its log.",
    )
    data: DataConfig
    agent: AgentConfig = AgentConfig()
    tools: Annotated[list[ToolConfig], BeforeValidator(read_tools)] = Field(
        default_factory=list,
        description="Tools the agent may call: entries, or names alone; or a YAML file with a list of entries, ours or"
        " verl's.",
    )
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    transfer_queue: TransferQueueConfig = TransferQueueConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    dashboard: DashboardConfig = DashboardConfig()
    placement: PlacementConfig = PlacementConfig()
    ray: RayConfig = RayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    costs: CostConfig = CostConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def sleep_level(self) -> Literal[1, 2]:
        """The sleep level of engines in the trainer's turn, after which a new version is loaded: a copy of the old one
        is waste.

        SGLang decides at its start: without the copy it keeps the model's own weights, which no announcement brings
        back, on the device in the trainer's first turn. `hf` has its weights in host memory anyway.
        """
        return self.placement.sleep_level or (2 if self.rollout.engine == "vllm" else 1)

    @property
    def largest_group(self) -> int:
        """Episodes per task of the data source that has most."""
        sizes = (own.group_size for own in self.trainer.sources.values())
        return max([self.group_size, *(size for size in sizes if size is not None)])


SCHEMA = ConfigSchema(RunConfig)


def load_config(recipe: Path, overrides: Sequence[str] = (), *, with_tasks: bool = True) -> RunConfig:
    """Read `recipe` (YAML or Python), apply ``a.b=value`` overrides (values are YAML), resolve paths, check everything.

    Paths of `model`, `data.train`, `data.eval`, `sft`, loop, environment, rewards and tools become absolute, so that
    every role finds them: those in the file relative to its folder, those in overrides to the current directory,
    each to the other if it does not exist there. `recipes/…` of an override may also be a file that ships with
    Penstock. The configuration of a run (`dump_config`) is read as of the folder where it is, which may have moved.
    `with_tasks`: `data.train` is required. Raises `ConfigError`.
    """
    tree = read_recipe(recipe)
    if recipe.name == RUN_FILE and tree.get("runs_dir") == ABOVE:
        run = recipe.parent.resolve()
        tree |= {"runs_dir": str(run.parent), "name": run.name}
    if not with_tasks:
        tree["data"] = {"train": NO_TASKS, **(tree.get("data") or {})}
    folders = [recipe.parent.resolve(), Path.cwd()]
    resolve_paths(tree, folders)
    for override in overrides:
        _apply_override(tree, override)
    resolve_paths(tree, folders[::-1])
    return parse_config(tree, str(recipe), overrides)


def load_sandbox(recipe: Path | None, overrides: Sequence[str] = ()) -> SandboxConfig:
    """The `sandbox` section alone, of a recipe (whose other sections may be missing) and overrides.

    Raises `ConfigError`.
    """
    tree = {"sandbox": (read_recipe(recipe) if recipe is not None else {}).get("sandbox") or {}}
    for override in overrides:
        _apply_override(tree, override)
    if strangers := sorted(set(tree) - {"sandbox"}):
        raise ConfigError(f"a sandbox server reads only sandbox.*, not {', '.join(strangers)}")
    try:
        return SandboxConfig.model_validate(tree["sandbox"])
    except ValidationError as error:
        raise ConfigError(SCHEMA.complaints(error, str(recipe or "overrides"), "sandbox")) from None


def parse_config(tree: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Check a plain tree, which `overrides` are in. Raises `ConfigError` with one line per problem."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(SCHEMA.complaints(error, source, overrides=overrides)) from None


def dump_config(config: RunConfig, run: Path | None = None) -> str:
    """The resolved tree as YAML; `parse_config(yaml.safe_load(text))` gives the same config again.

    `run`: the folder of the run. Paths in it are relative to it; `load_config` of its file resolves them.
    """
    tree = config.model_dump(mode="json")
    if run is not None:
        tree["runs_dir"] = ABOVE
        change_paths(tree, lambda text: text.removeprefix(f"{run}/"))
    return yaml.safe_dump(tree, sort_keys=False)


def code_files(config: RunConfig) -> set[Path]:
    """Return the Python files that loops, environments, rewards and tools name."""
    files = set[Path]()
    names = (holder.get(key) for holder, key in references(config.model_dump(mode="json")))
    for name in names:
        if isinstance(name, str) and ".py:" in name and (file := Path(name.rpartition(":")[0])).is_file():
            files.add(file)
    return files


def _apply_override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"override {override!r}: write it as section.key=value, for example trainer.lr=1e-6")
    if dotted.startswith("+"):
        raise ConfigError(f"override {override!r}: a key that is not set needs no +: {override.lstrip('+')}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = yaml_problem(error)
        fix = "close its bracket" if "<stream end>" in problem else "quote text as '\"…\"'"
        raise ConfigError(f"override {override!r}: the value is not valid YAML ({problem}); {fix}") from None
    kind = SCHEMA.annotation(dotted)
    if kind in (str, str | None):
        if isinstance(value, int | float | date) or (value is None and not text.strip() and kind is str):
            value = text.strip()  # YAML reads name=2026-12-01 as a date
    elif isinstance(value, str):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-6 as a string; people mean the number
            value = float(value)
    set_key(tree, dotted, value, f"override {override!r}")
