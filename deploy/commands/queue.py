"""`penstock queue`: look into a run's queue, fix it, remove it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from penstock.common import read_jsonl
from penstock.dashboard import decoder_of, plain, whole_letter
from penstock.deploy.commands.shared import RUNS, load_run, user_errors
from penstock.deploy.config import RUN_FILE
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.connection import (
    INTERACTIVE,
    PASSWORD_VARIABLE,
    RUN_VARIABLE,
    URL_VARIABLE,
    USER_VARIABLE,
    RunConnection,
)
from penstock.deploy.run_dir import RunDir, no_such_run
from penstock.transfer_queue import (
    QueueError,
    QueueUnavailable,
    TransferQueue,
    TransferQueueConfig,
    exposition,
    version_lags,
)
from penstock.transfer_queue.redis import RIGHTS, setuser_commands

app = typer.Typer(
    help="Look into a run's queue, fix it, remove it. Where runs/NAME is elsewhere, source its connect.env first.",
    no_args_is_help=True,
)
letters = typer.Typer(help="Failed episodes, with their cause.", no_args_is_help=True)
app.add_typer(letters, name="dead-letters")

Answer = TypeVar("Answer")
RunArgument = Annotated[str | None, typer.Argument(help="Name of the run, or its folder [PENSTOCK_RUN].")]


@app.command()
def status(
    run: RunArgument = None,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Prometheus's text format.")] = False,
) -> None:
    """Counts by state, versions, ages, bytes, waits, and rollout servers with their lag, as JSON.

    Of a run that ended: its summary.json, since its queue ended with it.
    """
    if not prometheus and (ended := _ended(run)) is not None:
        summary = json.loads(ended.summary.read_text(encoding="utf-8"))
        print(json.dumps({"run": ended.root.name, "alive": False, **summary}, indent=2))
        return
    queue_status, servers = _ask(run, lambda queue: asyncio.gather(queue.status(), queue.servers()))
    if prometheus:
        print(exposition(_connection(run).run, queue_status, servers).decode(), end="")
        return
    lags = version_lags(queue_status, servers)
    listed = {s.server_id: {**plain(s), "version_lag": lags[s.server_id]} for s in servers}
    print(json.dumps({**plain(queue_status), "servers": listed}, indent=2))


@app.command()
def export(
    run: RunArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of GET /metrics.")] = 9464,
    every_s: Annotated[float, typer.Option(help="Seconds between two polls of the queue.", min=0.1)] = 5.0,
) -> None:
    """Serve the queue's numbers to Prometheus, with the run's token as bearer credentials, until interrupted."""
    from penstock.common import listen, serve
    from penstock.deploy.telemetry.metrics import QueueExporter, make_app

    with user_errors():
        link = _connection(run)
    _ask(
        run,
        lambda queue: serve(make_app(QueueExporter(queue, link.run, every_s), link.token), listen(host, port)),
        TransferQueueConfig(),
    )


@app.command()
def drop(run: RunArgument = None, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Delete everything of a run from its queue. This cannot be undone."""
    if not yes:
        typer.confirm(f"Delete everything of run {run or 'PENSTOCK_RUN'} from its queue?", abort=True)
    print(f"{_ask(run, lambda queue: queue.drop_run())} keys deleted")


@app.command()
def acl(run: RunArgument = None) -> None:
    """Print users for a Redis of your own, one per role of a run; each line is for redis-cli, on every node.

    Example: penstock queue acl mine 2>logins.env | REDISCLI_AUTH=PASSWORD redis-cli --user ADMIN
    """
    name = run or os.environ.get(RUN_VARIABLE, "")
    passwords = {role: secrets.token_urlsafe(32) for role in RIGHTS}
    with user_errors(QueueError):
        print("\n".join(setuser_commands(name, passwords)))
    for role, password in passwords.items():
        typer.echo(f"export {USER_VARIABLE}={name}-{role} {PASSWORD_VARIABLE}={password}", err=True)


@letters.command("list")
def list_letters(
    run: RunArgument = None,
    limit: Annotated[int, typer.Option(help="Maximum number of letters.", min=1)] = 100,
    start: Annotated[int, typer.Option(help="Number of oldest letters to skip.", min=0)] = 0,
) -> None:
    """One line per dead letter, oldest first: episode, attempts, cause. Of a run that ended: its first 100 letters."""
    ended = _letters_of_ended(run)
    if ended is None:
        listed = [whole_letter(letter, None) for letter in _ask(run, lambda queue: queue.dead_letters(limit, start))]
    else:
        listed = ended[start : start + limit]
    for letter in listed:
        print(f"{letter['episode']}  attempts {letter['attempts']}  {letter['component']}: {letter['reason']}")


@letters.command()
def show(episode_id: str, run: RunArgument = None) -> None:
    """Show a dead letter with its journal: model output and tool results, as JSON."""
    ended = _letters_of_ended(run)
    if ended is None:
        whole = _ask(run, lambda queue: queue.dead_letter(episode_id))
        letter = None if whole is None else whole_letter(whole, _decoder(run))
    else:
        letter = next((one for one in ended if one["episode"] == episode_id), None)
    if letter is None:
        message = f"{episode_id}: no such dead letter; `penstock queue dead-letters list` shows them"
        typer.secho(message, fg="red", err=True)
        raise typer.Exit(1)
    print(json.dumps(letter, indent=2, ensure_ascii=False))


def _decoder(run: str | None) -> Callable[[Sequence[int]], str] | None:
    """None, and ids are shown as numbers, where the run's folder or its tokenizer is not here."""
    folder = _folder(run or os.environ.get(RUN_VARIABLE, ""))
    return decoder_of(load_run(folder).model) if (folder / RUN_FILE).is_file() else None


@letters.command()
def requeue(episode_id: str, run: RunArgument = None) -> None:
    """Queue a dead letter's group again."""
    _ask(run, lambda queue: queue.requeue(episode_id))
    print(f"the whole group of {episode_id} is queued again")


def _ask(
    run: str | None, question: Callable[[TransferQueue], Awaitable[Answer]], settings: TransferQueueConfig | None = None
) -> Answer:
    """Connects to the run's queue and asks one question; user errors are one message."""

    async def ask() -> Answer:
        async with _connection(run).connected(settings or INTERACTIVE) as queue:
            return await question(queue)

    with user_errors(QueueError):
        try:
            return asyncio.run(ask())
        except QueueUnavailable as error:
            raise ConfigError(
                f"{error}\n  fix: source connect.env of the living run, or correct {URL_VARIABLE}"
            ) from None


def _connection(run: str | None) -> RunConnection:
    """Return the connection that the environment names, else that of the run's folder. Raises `ConfigError`."""
    if run is None or (os.environ.get(URL_VARIABLE) and Path(run).name == run):
        return RunConnection.from_environment(run=run)
    folder = _folder(run)
    try:
        return RunConnection.from_lines((folder / "connect.env").read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not folder.is_dir():
            raise ConfigError(no_such_run(folder.parent, folder.name)) from None
        raise ConfigError(
            f"run {folder.name} is not running, and its queue ended with it: {folder / 'summary.json'} says what it "
            f"left, `penstock run … --resume` brings the queue back"
        ) from None
    except OSError as error:
        raise ConfigError(f"{folder / 'connect.env'} cannot be read: {error}") from error


def _folder(run: str) -> Path:
    return Path(run) if Path(run).name != run else RUNS / run


def _letters_of_ended(run: str | None) -> list[dict[str, Any]] | None:
    folder = _ended(run)
    return None if folder is None else read_jsonl(folder.dead_letters)


def _ended(run: str | None) -> RunDir | None:
    """None if it is not known to have ended: no summary, or a queue to ask."""
    name = run or os.environ.get(RUN_VARIABLE, "")
    folder = RunDir(_folder(name))
    return folder if name and folder.summary.exists() and not folder.connect_env.exists() else None
