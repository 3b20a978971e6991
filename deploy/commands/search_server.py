"""`penstock search-server`: build the index of a corpus where it is missing, then serve it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.deploy.config import ConfigError

if TYPE_CHECKING:
    from penstock.tools.retrieval import Index


def search_server(
    *,
    corpus: Annotated[Path, typer.Option(help="JSON lines with id, title and text (or Search-R1's id and contents).")],
    index: Annotated[
        Path | None, typer.Option(help="Folder of the index; default: beside CORPUS, .index or .dense.")
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
    from penstock.tools.retrieval import BadCorpus, IndexFailed, serve

    async def role(opened: Index, token: str) -> None:
        await serve(opened, host, port, token, topk)

    try:
        token = _token()
        opened = _open(corpus, index, dense)
        typer.echo(f"{len(opened)} passages; POST http://{host}:{port}/retrieve", err=True)
        run_role(lambda: role(opened, token))
    except (ConfigError, BadCorpus, IndexFailed) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(2) from None


def _token() -> str:
    from penstock.tools import TOKEN_VARIABLE

    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set: callers of the search server must present it")
    return token


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
