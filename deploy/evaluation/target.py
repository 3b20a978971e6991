"""The target of `penstock eval`: a recipe's model, a checkpoint of a run, a model folder, or a served model.

RECIPE                     the recipe's model
RUN                        its final_model, else its newest checkpoint
… --checkpoint 40          the run's checkpoint after 40 steps, written as a model folder first
… --checkpoint FOLDER      a model folder
… --url http://host:8000   a server: its weights are whatever it serves; the recipe's model gives the tokenizer
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common import nearest
from penstock.deploy.config import RunConfig, code_files, load_config, parse_config
from penstock.deploy.pretrained import find_fetched
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.rehearsal import rows_of
from penstock.deploy.run_dir import RunDir, no_such_run
from penstock.trainer import DatasetRow


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The command line of `penstock eval`."""

    target: Path
    """A recipe, or the folder of a run."""
    overrides: Sequence[str] = ()
    checkpoint: str | None = None
    url: str | None = None
    samples: int = 8
    """Per task."""
    temperature: float | None = None
    """None: the recipe's agent.temperature, and 0 for one sample."""
    split: str = "eval"
    """``eval`` or ``train``: which of the recipe's datasets."""
    data: Sequence[str] = ()
    """Datasets in place of the recipe's."""
    rows: int = 0
    """The first of each dataset only; 0: all."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """All that is known before anything starts."""

    config: RunConfig
    """Configuration of the evaluation: its name, its model, no trainer."""
    source: str
    """Description of the target, for people."""
    export: tuple[Path, int] | None
    """(run, step) of a checkpoint that is to be written to `config.model` first."""
    rows: Sequence[DatasetRow]
    samples: int
    temperature: float

    @property
    def run(self) -> RunDir:
        return RunDir.of(self.config)

    def settings(self) -> dict[str, Any]:
        """Settings that determine the results; two evaluations of equal settings may share a folder."""
        config, folder, weights = self.config, Path(self.config.model), ""
        if self.export is not None:  # the exported model may be that of an earlier run of this name
            run, step = self.export
            folder = run / "checkpoints" / f"step_{step:08d}"
        if config.rollout.engine != "served" and folder.is_dir():  # of a hub's model or a server's nothing is known
            states = ((path.name, path.stat()) for path in sorted(folder.glob("*")) if path.is_file())
            weights = _digest([[name, state.st_size, state.st_mtime_ns] for name, state in states])
        # These say how fast episodes run, or are asked for apart.
        others = {"workers", "max_restarts", "concurrency", "server_requests", "capture", "temperature"}
        return {
            "model": self.source,
            "weights": weights,
            "samples": self.samples,
            "temperature": self.temperature,
            "rows": _digest([_plain(row) for row in self.rows]),
            "agent": config.agent.model_dump(mode="json", exclude=others),
            "code": _digest([file.read_text(encoding="utf-8") for file in sorted(code_files(config))]),
            "tools": _digest([tool.model_dump(mode="json") for tool in config.tools]),
            "rollout": config.rollout.model_dump(mode="json", include={"engine", "dtype", "max_model_len", "url"}),
        }


def resolve_target(request: EvalRequest) -> EvalPlan:
    """Return the plan of an evaluation. Raises `ConfigError`, `DataError`."""
    run = RunDir(request.target.resolve()) if request.target.is_dir() else None
    if run is not None and not run.config.exists():
        raise ConfigError(f"{request.target}: no config.yaml, so no run's folder; give a recipe or a run")
    if run is None and not request.target.exists() and request.target.suffix not in (".yaml", ".yml", ".py"):
        recipes = [file.name for end in ("py", "yaml") for file in request.target.parent.glob(f"*.{end}")]
        hint = nearest(request.target.name, recipes)
        raise ConfigError(f"{no_such_run(request.target.parent, request.target.name)}; or give a recipe's file{hint}")
    config = load_config(run.config if run else request.target, request.overrides, with_tasks=False)
    model, source, step = _model(request, config, run)
    name = request.name or f"{config.name}-eval{'' if step is None else f'-step{step}'}"
    temperature = request.temperature
    if temperature is None:
        temperature = config.agent.temperature if request.samples > 1 else 0.0
    if request.samples > 1 and temperature == 0:
        raise ConfigError(f"--temperature 0 with --n {request.samples}: a task's samples would be the same; use --n 1")
    rows = _rows(request, config)
    # A queue without training has these limits; the server and workers run here.
    rollout: dict[str, Any] = {"evaluation_server": False, "port": 0}  # next to a living run of the recipe
    if request.url is not None:
        rollout |= {"engine": "served", "url": request.url, "servers": 1}
    elif not config.rollout.servers:
        raise ConfigError("rollout.servers is 0: a run's servers are elsewhere; give rollout.servers=1 or --url")
    if not config.agent.workers:
        raise ConfigError(
            "agent.workers is 0: agents of others, or workers elsewhere, run these episodes; give agent.workers=1 "
            "where agent.loop runs them as well"
        )
    tree = config.model_dump(mode="json")
    tree |= {"name": name, "runs_dir": str(Path(config.runs_dir).resolve())}
    tree |= {"group_size": 1, "groups_per_step": 1, "max_staleness": 0}
    tree["rollout"] |= rollout
    tree["agent"]["forks"] = None
    planned = parse_config(tree, source="penstock eval")
    export = None
    if step is not None and run is not None:
        export, model = (run.root, step), str(RunDir.of(planned).root / "model")
    planned = planned.model_copy(update={"model": model})
    return EvalPlan(planned, source, export, rows, request.samples, temperature)


def _model(request: EvalRequest, config: RunConfig, run: RunDir | None) -> tuple[str, str, int | None]:
    """(model folder or hub name, what it is for people, step of a checkpoint that is to be exported)"""
    if request.url is not None:
        if request.checkpoint is not None:
            raise ConfigError("--url and --checkpoint: a server has its own weights; give one of them")
        return config.model, f"what {request.url} serves", None
    if request.checkpoint is not None and not request.checkpoint.isdecimal():
        folder = find_fetched(request.checkpoint) or Path(request.checkpoint).resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--checkpoint {request.checkpoint}: no model folder (config.json), and no step's number")
        return str(folder), str(folder), None
    if run is None:
        if request.checkpoint is not None:
            raise ConfigError(f"--checkpoint {request.checkpoint}: a step needs a run's folder, and this is a recipe")
        return config.model, config.model, None
    final = run.root / "final_model"
    if request.checkpoint is None and final.is_dir():
        return str(final), str(final), None
    step = run.saved_step(None if request.checkpoint is None else int(request.checkpoint))
    return config.model, f"{run.root}, step {step}", step


def _rows(request: EvalRequest, config: RunConfig) -> list[DatasetRow]:
    """Return the rows in order. Raises `ConfigError` if there are none."""
    limit = request.rows or (config.data.eval_limit if request.split == "eval" and not request.data else 0)
    if not request.data:
        return rows_of(config, request.split, limit)
    rows: list[DatasetRow] = []
    for path in request.data:
        data = config.data.model_copy(update={"eval": path})
        rows += rows_of(config.model_copy(update={"data": data}), "eval", request.rows)
    return rows


def export_model(plan: EvalPlan) -> None:
    """Writes the checkpoint as a model folder, in a process that may load torch. Raises `ConfigError`."""
    folder = Path(plan.config.model)
    if plan.export is None or folder.exists():
        return
    run, step = plan.export
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f"{folder.name}.exporting*"):  # by a process that was killed; it may still write
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.exporting.") as scratch:
        exported = Path(scratch) / "model"
        words = ["train", "export", str(run), str(exported), "--step", str(step)]
        command = [sys.executable, "-m", "penstock.deploy.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600.0, check=False)
        if done.returncode:
            raise ConfigError(f"the checkpoint of step {step} was not written as a model: {done.stderr.strip()}")
        if not folder.exists():  # else another evaluation has written it meanwhile
            exported.rename(folder)


# digests -----------------------------------------------------------------------------------------------------------
def _plain(row: DatasetRow) -> Mapping[str, Any]:
    return {
        "messages": list(row.messages),
        "data_source": row.data_source,
        "ground_truth": row.ground_truth,
        "agent_name": row.agent_name,
        "extra_info": dict(row.extra_info),
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
