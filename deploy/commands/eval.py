"""`penstock eval`: avg@n and pass@k of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    target: Annotated[Path, typer.Argument(help="A recipe, or the folder of a run.", metavar="RECIPE|RUN")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …", metavar="[KEY=VALUE]…")] = None,
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
