"""`penstock reward-server`: a sequence classifier that scores answers over HTTP."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from penstock.deploy.config import ConfigError


def reward_server(  # noqa: PLR0917 - typer reads the options off the parameters
    model: Annotated[str, typer.Option(help="Folder or hub name of a sequence classifier.")],
    label: Annotated[
        int | None, typer.Option(help="Label whose probability is the score, if there are several.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8900,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Dtype of the model.")] = "float32",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer; longer ones are truncated at the start.")
    ] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Maximum answers per batch.")] = 32,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a batch, including padding.")] = 16384,
    batch_wait_ms: Annotated[float, typer.Option(min=0, help="How long the first answer waits for others.")] = 10.0,
) -> None:
    """Start a reward-model server, for `agent.reward: reward_server` [PENSTOCK_REWARD_TOKEN]."""
    from penstock.deploy.run.roles import run_role
    from penstock.rollout_server import BadModel, Batcher, HuggingFaceClassifier, build_reward_app, serve_batched

    async def role() -> None:
        batches = Batcher(classifier.score, max_rows=batch_rows, max_tokens=batch_tokens, wait_s=batch_wait_ms / 1000)
        await serve_batched(build_reward_app(classifier, token, model, batches), host, port, "reward server")

    try:
        token = _token()
        classifier = HuggingFaceClassifier(model, label, dtype, max_tokens)
        typer.echo(f"{model}: POST http://{host}:{port}/score", err=True)
        run_role(role)
    except (ConfigError, BadModel, OSError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None


def _token() -> str:
    from penstock.agent_loops.rewards import TOKEN_VARIABLE

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: callers of the reward server must present it")
    return token
