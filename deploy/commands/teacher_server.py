"""`penstock teacher-server`: a model that judges the tokens of finished episodes."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from penstock.deploy.config import ConfigError

TOKEN_VARIABLE = "PENSTOCK_TEACHER_TOKEN"  # noqa: S105 - the name of a variable


def teacher_server(  # noqa: PLR0917 - typer reads the options off the parameters
    model: Annotated[str, typer.Option(help="Folder or hub name of a causal language model.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8950,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Dtype of the model.")] = "float32",
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of a row; longer ones are refused.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    batch_rows: Annotated[int, typer.Option(min=1, help="Maximum rows per batch.")] = 16,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a batch, including padding.")] = 16384,
    batch_wait_ms: Annotated[float, typer.Option(min=0, help="How long the first row waits for others.")] = 10.0,
) -> None:
    """Start a teacher, for `agent.teachers` [PENSTOCK_TEACHER_TOKEN]."""
    from penstock.deploy.run.roles import run_role
    from penstock.rollout_server import Batcher, TokenScorer, UnfitTeacher, build_teacher_app, serve_batched

    async def role() -> None:
        batches = Batcher(scorer.score, max_rows=batch_rows, max_tokens=batch_tokens, wait_s=batch_wait_ms / 1000)
        await serve_batched(build_teacher_app(scorer, token, model, batches), host, port, "teacher server")

    try:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ConfigError(f"{TOKEN_VARIABLE} is not set: agent workers must present it")
        import torch

        torch.set_num_threads(threads)
        scorer = TokenScorer(model, dtype, max_tokens)
        typer.echo(f"{model}: POST http://{host}:{port}/v1/completions", err=True)
        run_role(role)
    except (ConfigError, UnfitTeacher, OSError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None
