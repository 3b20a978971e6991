"""`penstock queue`: look into a run's ledger, mend it, remove it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from penstock.deploy.link import PASSWORD_VARIABLE, RUN_VARIABLE, USER_VARIABLE, Link
from penstock.deploy.load_config import ConfigError
from penstock.transfer_queue.acl import RIGHTS, setuser_commands
from penstock.transfer_queue.ledger import Ledger, LedgerError

app = typer.Typer(
    help="Look into a run's ledger, mend it, remove it. `source runs/NAME/connect.env` first.", no_args_is_help=True
)
letters = typer.Typer(help="Episodes that were given up, with their cause.", no_args_is_help=True)
app.add_typer(letters, name="dead-letters")

RunArgument = Annotated[str | None, typer.Argument(help="Name of the run [PENSTOCK_RUN].")]


@app.command()
def status(run: RunArgument = None) -> None:
    """Counts by state, versions, bytes and waits, as JSON."""
    print(json.dumps(_ask(run, lambda ledger: ledger.status()), indent=2))


@app.command()
def drop(
    run: RunArgument = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete everything of a run from its ledger. There is no way back."""
    if not yes:
        typer.confirm(f"Delete everything of run {run or 'PENSTOCK_RUN'} from its ledger?", abort=True)
    print(f"{_ask(run, lambda ledger: ledger.drop_run())} keys deleted")


@app.command()
def acl(run: RunArgument = None) -> None:
    """Print users for a Redis of your own, one per role of a run; each line is for redis-cli, on every node.

    Example: penstock queue acl mine 2>logins | redis-cli --user admin --askpass
    """
    name = run or os.environ.get(RUN_VARIABLE, "")
    passwords = {role: secrets.token_urlsafe(32) for role in RIGHTS}
    try:
        print("\n".join(setuser_commands(name, passwords)))
    except LedgerError as error:
        raise _mistake(error) from None
    for role, password in passwords.items():
        typer.echo(f"export {USER_VARIABLE}={name}-{role} {PASSWORD_VARIABLE}={password}", err=True)


@letters.command("list")
def list_letters(run: RunArgument = None) -> None:
    """One line per dead letter: episode, attempts, cause."""
    for letter in _ask(run, lambda ledger: ledger.dead_letters()):
        outcome = letter["outcome"]
        print(f"{letter['episode_id']}  attempts {letter['attempts']}  {outcome['component']}: {outcome['reason']}")


@letters.command()
def show(episode_id: str, run: RunArgument = None) -> None:
    """A dead letter with its journal: what the model said and what the tools answered."""
    found = [item for item in _ask(run, lambda ledger: ledger.dead_letters(10_000)) if item["episode_id"] == episode_id]
    if not found:
        typer.secho(
            f"{episode_id}: no such dead letter; `penstock queue dead-letters list` shows them", fg="red", err=True
        )
        raise typer.Exit(1)
    print(json.dumps(found[0], indent=2, default=str))


@letters.command()
def requeue(episode_id: str, run: RunArgument = None) -> None:
    """Give a dead letter's group a new life."""
    _ask(run, lambda ledger: ledger.requeue(episode_id))
    print(f"{episode_id} is queued again")


def _ask(run: str | None, question: Callable[[Ledger], Awaitable[Any]]) -> Any:
    """Connect, ask one thing, give back plain data; mistakes are one message."""
    try:
        return _plain(asyncio.run(_asked(run, question)))
    except (ConfigError, LedgerError) as error:
        raise _mistake(error) from None


def _mistake(error: Exception) -> typer.Exit:
    typer.secho(str(error), fg="red", err=True)
    return typer.Exit(2)


async def _asked(run: str | None, question: Callable[[Ledger], Awaitable[Any]]) -> Any:
    ledger = await Link.from_environment(run=run).connect()
    try:
        return await question(ledger)
    finally:
        await ledger.close()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
