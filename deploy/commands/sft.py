"""`penstock sft`: supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sft(
    recipe: Annotated[Path, typer.Argument(help="A recipe: one YAML file, see recipes/.", metavar="RECIPE")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value …", metavar="[KEY=VALUE]…")] = None,
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
