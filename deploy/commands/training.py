"""Commands that train and measure: `penstock sft`, `serve`, `eval`, `bench` and `train export`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Never

import typer

from penstock.deploy.commands.shared import (
    RUNS,
    Overrides,
    Recipe,
    RunName,
    RunsDir,
    folder_of_run,
    own_or_shipped,
    refuse,
    run_or_path,
    user_errors,
)

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MODEL_VARIABLE = "PENSTOCK_BENCH_MODEL"


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue an earlier one of this name.")] = False,
) -> None:
    """Fine-tune a model on conversations: of files, of a run's trajectories, or of a scripted policy (section sft).

    What is learned is token for token what an episode of the recipe would hold, with loss on what the model writes
    alone. The new model is in runs/NAME/final_model; NAME is the recipe's with -sft behind it, unless name=… is given.

    Examples: penstock sft recipes/retool/cpu.yaml sft.messages=demonstrations.jsonl sft.steps=100 sft.lr=5e-4

    penstock sft recipes/retool/cpu.yaml sft.runs=runs/retool-cpu sft.min_reward=1 sft.per_task=2
    """
    from penstock.deploy.sft.head import fine_tune_recipe

    raise typer.Exit(fine_tune_recipe(recipe, overrides or [], resume=resume))


def serve(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0: a free one.")] = 8790,
    model_name: Annotated[
        str | None, typer.Option(help="The base model as clients call it; default: its folder's name.")
    ] = None,
) -> None:
    """Serve training: clients train and sample LoRA adapters of the recipe's model with Tinker's SDK, unchanged.

    Of the recipe count model, rollout, trainer (lora.rank is the largest rank of a client, checkpoint_every the
    optimizer steps between points that a restart begins from) and transfer_queue. Everything is in runs/NAME: the same
    command continues after a stop or a crash, and no acknowledged request is lost or run twice.

    Keys: PENSTOCK_SERVICE_KEYS="alice=tml-…,bob=tml-…", or else one that is made and is in runs/NAME/service/key. Each
    key sees what is its own alone.

    Examples: penstock serve recipes/calculator.yaml model=Qwen/Qwen3-4B-Instruct-2507 rollout.engine=vllm

    export TINKER_BASE_URL=http://127.0.0.1:8790 TINKER_API_KEY=$(cat runs/service/service/key)

    python -m tinker_cookbook.recipes.math_rl.train model_name=Qwen3-4B-Instruct-2507 loss_fn=ppo
    """
    from penstock.deploy.serving import serve_recipe

    status = serve_recipe(recipe, overrides or [], host=host, port=port, model_name=model_name)
    raise typer.Exit(status)


def _target(path: Path) -> Path | None:
    return own_or_shipped(run_or_path(path))


def evaluate(
    target: Annotated[
        Path, typer.Argument(help="A recipe, or a run's name or folder.", metavar="RECIPE|RUN", callback=_target)
    ],
    overrides: Overrides = None,
    *,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="A step of the run, or a model folder; default: its final model, else its newest checkpoint."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A served model: http://HOST:PORT of a rollout server or of vLLM [PENSTOCK_SERVED_KEY]."),
    ] = None,
    samples: Annotated[int, typer.Option("--n", min=1, help="Samples per task.")] = 8,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Default: the recipe's agent.temperature; 0 with --n 1.")
    ] = None,
    split: Annotated[str, typer.Option(help="The recipe's data.eval or data.train: eval or train.")] = "eval",
    data: Annotated[
        list[str] | None, typer.Option(help="A dataset in place of the recipe's; may be given several times.")
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="The first rows of each dataset only; 0: all.")] = 0,
    name: Annotated[str | None, typer.Option(help="Of the evaluation's folder; default: NAME-eval.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
) -> None:
    """Measure a model on tasks: mean reward (avg@n) and pass@k, with intervals, by data source.

    The episodes go through the same servers, workers, loop, tools and reward as in training. Results are in
    runs/NAME-eval; an evaluation that was interrupted or killed is continued by the same command.

    Examples: penstock eval runs/calculator --n 8

    penstock eval recipes/calculator.yaml --checkpoint runs/calculator/final_model --rows 64 --json
    """
    from penstock.deploy.evaluation.head import evaluate_target
    from penstock.deploy.evaluation.target import EvalRequest

    request = EvalRequest(
        target,
        overrides or [],
        checkpoint=checkpoint,
        url=url,
        samples=samples,
        temperature=temperature,
        split=split,
        data=data or [],
        rows=rows,
        name=name,
    )
    raise typer.Exit(evaluate_target(request, as_json=as_json))


def export(
    run: RunName,
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to be made.")],
    step: Annotated[int | None, typer.Option(help="Of which step; the newest checkpoint without it.")] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder, in one process, whatever number of ranks saved them.

    Example: penstock train export runs/mine models/mine --step 40
    """
    from penstock.deploy.config import load_config
    from penstock.deploy.run_dir import RunDir
    from penstock.trainer import NotSaved, export_checkpoint

    with user_errors(OSError, ValueError, NotSaved):
        place = RunDir(folder_of_run(run, runs_dir))
        config = load_config(place.config)
        checkpoint = place.checkpoints / f"step_{place.saved_step(step):08d}"
        done = export_checkpoint(checkpoint, config.model, config.trainer, folder)
    typer.echo(f"{folder}: the weights after {done} steps")


def bench(
    name: Annotated[str, typer.Argument(help="One of the files in benchmarks/, without .py; `list` names them.")],
    model: Annotated[
        str | None,
        typer.Option(help="In place of the benchmark's own: one of its sizes, a fetched model, or a folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure one part against a named reference, in the same minute.

    Runs `measure()` of benchmarks/NAME.py, which returns {bench, ratio, figures, setup}.

    Examples: penstock bench queue --json

    penstock bench compare --model smollm2-135m --json
    """
    if name == "list":
        for file in _available():
            typer.echo(file)
        return
    if threading.current_thread() is threading.main_thread():  # others may not set what a signal does
        signal.signal(signal.SIGTERM, _leave)
    benchmark = _load(name)
    if model is not None:
        if MODEL_VARIABLE not in (benchmark.__doc__ or ""):
            refuse(f"--model: {name} measures no model, or its own alone")
        from penstock.deploy.pretrained import find_fetched

        os.environ[MODEL_VARIABLE] = str(find_fetched(model) or model)
    result = benchmark.measure()
    if as_json:
        typer.echo(json.dumps(result))
        return
    for part in ("setup", "figures", "ratio"):
        typer.echo(f"{part}:")
        for key, value in result[part].items():
            typer.echo(f"  {key}: {value}")


def _leave(number: int, _frame: FrameType | None) -> Never:
    """Ends the process by an exception, as Ctrl-C does, so that a benchmark's `finally` blocks remove what it made."""
    raise SystemExit(128 + number)


def _available() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.py"))


def _load(name: str) -> ModuleType:
    if name not in _available():
        refuse(f"{name}: no such benchmark; there are: {', '.join(_available()) or 'none'}")
    spec = importlib.util.spec_from_file_location(f"penstock_bench_{name}", FOLDER / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{FOLDER / name}.py cannot be loaded")
    if str(FOLDER.parent) not in sys.path:
        sys.path.append(str(FOLDER.parent))  # for benchmarks.support, which several benchmarks share
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it is being made
    spec.loader.exec_module(module)
    return module
