"""`penstock redis-server`: the redis-server of a run whose roles are on several machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.deploy.commands.guard import guarded
from penstock.deploy.config import ConfigError
from penstock.deploy.run.connection import PASSWORD_VARIABLE


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

    def work() -> None:
        server = RedisServer(
            directory, _password(), host=_address(host), port=port, users=_users(users), appendfsync=appendfsync
        )
        run_role(lambda: serve(server, linger_while, linger_s))

    guarded(work, QueueError)


def _password() -> str:
    password = os.environ.get(PASSWORD_VARIABLE)
    if not password:
        raise ConfigError(f"{PASSWORD_VARIABLE} is not set: other machines reach this server, it needs a password")
    return password


def _address(host: str) -> str:
    """What to listen on. A name that means loopback here, as Debian's 127.0.1.1 does, is another address elsewhere."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    named = not host.replace(".", "").isdigit() and host != "localhost"
    return "0.0.0.0" if named and address.startswith("127.") else address  # noqa: S104 - it has a password


def _users(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--users {path}: {error.strerror}") from None
