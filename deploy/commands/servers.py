"""Servers next to a run: `penstock redis-server`, `search-server`, `reward-server` and `teacher-server`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.deploy.commands.shared import user_errors
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import PASSWORD_VARIABLE

if TYPE_CHECKING:
    from penstock.tools.retrieval import Index


def redis_server(
    directory: Annotated[Path, typer.Argument(help="Folder of its append-only file, such as runs/NAME/redis.")],
    *,
    host: Annotated[str, typer.Option(help="Address or name by which others reach it.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")],
    users: Annotated[Path | None, typer.Option(help="A file with a line `user NAME …` for each further user.")] = None,
    appendfsync: Annotated[Literal["everysec", "always"], typer.Option(help="Durability.")] = "everysec",
    linger_while: Annotated[
        Path | None, typer.Option(help="On SIGTERM, keep running while this file exists: the run's connect.env.")
    ] = None,
    linger_s: Annotated[float, typer.Option(min=0, help="Maximum time to keep running after SIGTERM.")] = 25.0,
) -> None:
    """Start a redis-server that other machines reach, with a password, and keep it alive [PENSTOCK_REDIS_PASSWORD].

    Example: penstock redis-server runs/mine/redis --host 10.0.0.5 --port 6379
    """
    from penstock.deploy.run.connection import serve
    from penstock.deploy.run.roles import run_role
    from penstock.transfer_queue import QueueError, RedisServer

    with user_errors(QueueError):
        try:
            lines = users.read_text(encoding="utf-8").splitlines() if users is not None else []
        except OSError as error:
            raise ConfigError(f"--users {users}: {error.strerror}") from None
        password, address = _secret(PASSWORD_VARIABLE), _address(host)
        server = RedisServer(directory, password, host=address, port=port, users=lines, appendfsync=appendfsync)
        run_role(lambda: serve(server, linger_while, linger_s))


def _address(host: str) -> str:
    """Address to listen on. A name that means loopback here, as Debian's 127.0.1.1, is another address elsewhere."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    named = not host.replace(".", "").isdigit() and host != "localhost"
    return "0.0.0.0" if named and address.startswith("127.") else address  # noqa: S104 - it has a password


def search_server(
    *,
    corpus: Annotated[Path, typer.Option(help="JSON lines with id, title and text (or Search-R1's id and contents).")],
    index: Annotated[
        Path | None, typer.Option(help="Folder of the index; default: next to CORPUS, .index or .dense.")
    ] = None,
    dense: Annotated[
        str | None, typer.Option(help="Rank by the vectors of this sentence-transformers model instead of BM25.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8800,
    topk: Annotated[int, typer.Option(min=1, max=100, help="Passages per query if the request gives no number.")] = 3,
) -> None:
    """Start a retrieval server over a corpus, in Search-R1's request and response shape [PENSTOCK_SEARCH_TOKEN].

    Ranks by BM25, or by vectors with --dense MODEL (a folder or a hub name; needs the extra named dense).
    The index is built at the first start and kept; a changed corpus is indexed again.
    """
    from penstock.deploy.run.roles import run_role
    from penstock.tools import TOKEN_VARIABLE
    from penstock.tools.retrieval import BadCorpus, IndexFailed, serve

    with user_errors(BadCorpus, IndexFailed):
        token, opened = _secret(TOKEN_VARIABLE), _open(corpus, index, dense)
        typer.echo(f"{len(opened)} passages; POST http://{host}:{port}/retrieve", err=True)
        run_role(lambda: serve(opened, host, port, token, topk))


def _open(corpus: Path, folder: Path | None, dense: str | None) -> Index:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from penstock.tools.retrieval import open_or_build, open_or_build_dense

    columns = (TextColumn("index {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    total_bytes = corpus.stat().st_size if corpus.is_file() else 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(corpus.name, total=total_bytes, visible=False)

        def show(done_bytes: int) -> None:
            progress.update(task, completed=done_bytes, visible=True)

        return open_or_build_dense(corpus, dense, folder, show) if dense else open_or_build(corpus, folder, show)


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
    from penstock.agent_loops.rewards import TOKEN_VARIABLE
    from penstock.deploy.run.roles import run_role
    from penstock.rollout_server import BadModel, Batcher, HuggingFaceClassifier, build_reward_app, serve_batched

    with user_errors(BadModel, OSError):
        token, classifier = _secret(TOKEN_VARIABLE), HuggingFaceClassifier(model, label, dtype, max_tokens)
        typer.echo(f"{model}: POST http://{host}:{port}/score", err=True)

        async def role() -> None:
            wait_s = batch_wait_ms / 1000
            batches = Batcher(classifier.score, max_rows=batch_rows, max_tokens=batch_tokens, wait_s=wait_s)
            await serve_batched(build_reward_app(classifier, token, model, batches), host, port, "reward server")

        run_role(role)


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

    with user_errors(UnfitTeacher, OSError):
        token = _secret("PENSTOCK_TEACHER_TOKEN")
        import torch

        torch.set_num_threads(threads)
        scorer = TokenScorer(model, dtype, max_tokens)
        typer.echo(f"{model}: POST http://{host}:{port}/v1/completions", err=True)

        async def role() -> None:
            wait_s = batch_wait_ms / 1000
            batches = Batcher(scorer.score, max_rows=batch_rows, max_tokens=batch_tokens, wait_s=wait_s)
            await serve_batched(build_teacher_app(scorer, token, model, batches), host, port, "teacher server")

        run_role(role)


def _secret(variable: str) -> str:
    """Return a secret from the environment. Raises `ConfigError`: others reach the server, and must present it."""
    value = os.environ.get(variable, "")
    if not value:
        raise ConfigError(f"{variable} is not set: callers of this server must present it")
    return value
