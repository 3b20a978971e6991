"""`penstock serve`: a training service."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.commands.shared import Overrides, Recipe


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
