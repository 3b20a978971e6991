"""The connection of a role to its run: the queue's URL and the run's name as options, secrets in the environment.

`own_redis` is the redis-server of a run whose recipe names none: it starts and ends with the run. `serve_redis` is one
for roles on other machines, which stops last:

    start ─► keep alive ─► SIGTERM ─► `linger_while` is gone, or `linger_s` has passed ─► stop

A scheduler that stops a job signals all of its processes at once, redis-server included: the trainer's last checkpoint
and commit, and the head's summary, come after that and still need the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shlex
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from penstock.common import Backoff, process_identity
from penstock.deploy.config import RunConfig, parse_config
from penstock.deploy.recipe_tree import ConfigError
from penstock.deploy.run.processes import RestartBudget
from penstock.deploy.run_dir import HEAD_LINE, RunDir
from penstock.transfer_queue import (
    Limits,
    NoSuchRun,
    QueueError,
    QueueUnavailable,
    TransferQueue,
    TransferQueueConfig,
)
from penstock.transfer_queue.redis import ROLES, USERS_VERSION, find_redis_server, role_users

if TYPE_CHECKING:
    from penstock.transfer_queue import Archive, RedisServer, RedisTransferQueue

logger = logging.getLogger("penstock.run")
URL_VARIABLE = "PENSTOCK_QUEUE"
RUN_VARIABLE = "PENSTOCK_RUN"
USER_VARIABLE = "PENSTOCK_REDIS_USER"
PASSWORD_VARIABLE = "PENSTOCK_REDIS_PASSWORD"  # noqa: S105 - the variable's name, not a secret
TOKEN_VARIABLE = "PENSTOCK_TOKEN"  # noqa: S105
VIEW_TOKEN_VARIABLE = "PENSTOCK_VIEW_TOKEN"  # noqa: S105
"""Opens the page to read only."""
INTERACTIVE = TransferQueueConfig(deadline_s=4.0)
"""A person waits for the answer: a queue that is away is reported soon."""


@dataclass(frozen=True)
class RunConnection:
    """Everything a role needs to join a run from this or another machine."""

    url: str
    run: str
    password: str | None
    token: str
    username: str | None = None
    """None: Redis's default user."""
    role_passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Role → password of the Redis user that has this role's name and rights; empty where the queue has none."""

    @classmethod
    def from_environment(cls, url: str | None = None, run: str | None = None) -> RunConnection:
        """Explicit values win over the environment. Raises `ConfigError` naming what is missing, or is not a URL."""
        from redis.connection import parse_url

        url = url or os.environ.get(URL_VARIABLE)
        run = run or os.environ.get(RUN_VARIABLE)
        token = os.environ.get(TOKEN_VARIABLE)
        for value, fix in (
            (url, f"--queue or {URL_VARIABLE}"),
            (run, f"--run or {RUN_VARIABLE}"),
            (token, TOKEN_VARIABLE),
        ):
            if not value:
                raise ConfigError(f"{fix} is not set; source runs/NAME/connect.env of the running run")
        try:
            parse_url(str(url))
        except ValueError as error:
            raise ConfigError(f"--queue or {URL_VARIABLE}: {error}") from None
        username, password = redis_login()
        return cls(str(url), str(run), password, str(token), username)

    @classmethod
    def from_lines(cls, text: str) -> RunConnection:
        """Read the lines that `shell_lines` wrote, without the logins of single roles. Raises `ConfigError` naming what
        is missing.
        """
        words = [word for line in text.splitlines() if line.startswith("export ") for word in shlex.split(line[7:])]
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        for name in (URL_VARIABLE, RUN_VARIABLE, TOKEN_VARIABLE):
            if not variables.get(name):
                raise ConfigError(f"{name} is missing in this connect.env")
        password, username = (variables.get(name) or None for name in (PASSWORD_VARIABLE, USER_VARIABLE))
        return cls(variables[URL_VARIABLE], variables[RUN_VARIABLE], password, variables[TOKEN_VARIABLE], username)

    def of_role(self, role: str) -> RunConnection:
        """The connection of a role: its own user of the queue, without the passwords of others."""
        if role not in self.role_passwords:
            return replace(self, role_passwords={})
        return replace(self, username=role, password=self.role_passwords[role], role_passwords={})

    def environment(self) -> Mapping[str, str]:
        login = {USER_VARIABLE: self.username or "", PASSWORD_VARIABLE: self.password or ""}
        return {URL_VARIABLE: self.url, RUN_VARIABLE: self.run, **login, TOKEN_VARIABLE: self.token}

    def shell_lines(self) -> str:
        """Return lines for a person's shell: the environment of this process, and as comments the logins of single
        roles.
        """
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self.environment().items()]
        for role, password in self.role_passwords.items():
            lines.append(f"# {role} alone: export {USER_VARIABLE}={role} {PASSWORD_VARIABLE}={shlex.quote(password)}")
        return "\n".join(lines) + "\n"

    async def connect(
        self, settings: TransferQueueConfig = TransferQueueConfig(), archive: Archive | None = None
    ) -> RedisTransferQueue:
        from penstock.transfer_queue import RedisTransferQueue  # a third of what `penstock --help` loads

        return await RedisTransferQueue.connect(
            self.url, run=self.run, config=settings, password=self.password, username=self.username, archive=archive
        )

    @contextlib.asynccontextmanager
    async def connected(self, settings: TransferQueueConfig) -> AsyncIterator[RedisTransferQueue]:
        """The queue as long as the block is open. Raises `QueueError`."""
        queue = await self.connect(settings)
        try:
            yield queue
        finally:
            await queue.close()

    async def join(self, *, with_archive: bool = False, wait_s: float = 0.0) -> tuple[RedisTransferQueue, RunConfig]:
        """The queue and the run's configuration, as `penstock run` stored it there. A trainer asks for the archive.

        A queue that is away and a run that has not begun are waited for, `wait_s` seconds. Raises `QueueError` then.
        Roles of `penstock run` wait for a Redis that restarts; those that a person starts report it soon.
        """
        deadline, text, logged = time.monotonic() + wait_s, None, False
        settings = TransferQueueConfig() if os.environ.get("PENSTOCK_SUPERVISED") else INTERACTIVE
        while text is None:
            try:
                async with self.connected(settings) as queue:
                    text = await queue.config()
            except (NoSuchRun, QueueUnavailable) as error:
                if time.monotonic() >= deadline:
                    raise
                if not logged:
                    logger.info("waiting for run %s: %s", self.run, error)
                logged = True
                await asyncio.sleep(0.5)
        config = parse_config(yaml.safe_load(text), source=f"the queue's run {self.run!r}")
        archive = archive_of(config) if with_archive else None
        return await self.connect(config.transfer_queue, archive), config


def archive_of(config: RunConfig) -> Archive:
    from penstock.transfer_queue import Archive  # loads pyarrow, which only a trainer needs

    settings = config.transfer_queue
    folder = Path(settings.archive) / config.name if settings.archive else RunDir.of(config).archive
    return Archive(folder, config.name, settings.archive_bytes)


def connection_of_run(config: RunConfig) -> RunConnection:
    """To the living run of a recipe: this shell's, where its environment names that one, else by the run's folder.

    Raises `ConfigError`.
    """
    if os.environ.get(RUN_VARIABLE) == config.name:
        return RunConnection.from_environment()
    file = RunDir.of(config).connect_env
    try:
        return RunConnection.from_lines(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}: run {config.name} is not running on this machine; source its connect.env"
        ) from None


@contextlib.contextmanager
def connect_file(link: RunConnection | None, run: RunDir) -> Iterator[None]:
    """The run's connect.env, as long as this head lives. One of a head that has taken the run over stays.

    Without a link, that of a run without a queue, it names the head alone.
    """
    text = f"{link.shell_lines() if link else ''}{HEAD_LINE}{process_identity()}\n"
    with os.fdopen(os.open(run.connect_env, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if run.connect_env.read_text(encoding="utf-8") == text:
                run.connect_env.unlink()


def redis_login() -> tuple[str | None, str | None]:
    """User and password for the queue, from the environment; an empty one counts as none."""
    return os.environ.get(USER_VARIABLE) or None, os.environ.get(PASSWORD_VARIABLE) or None


def limits_of(config: RunConfig) -> Limits:
    """Return the limits that the queue enforces, from the run's configuration."""
    knobs = config.transfer_queue
    return Limits(
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        overage=knobs.overage,
        min_group=min(knobs.min_group, config.largest_group),
        max_attempts=knobs.max_attempts,
        max_lost_leases=knobs.max_lost_leases,
        lease_ttl_s=knobs.lease_ttl_s,
        max_bytes=knobs.max_bytes,
        max_groups=knobs.max_groups,
        filter_groups=knobs.filter_groups,
        max_filtered_steps=knobs.max_filtered_steps,
        quotas=knobs.quotas,
        branches=0 if config.agent.forks is None else config.agent.forks.branches,
    )


@contextlib.asynccontextmanager
async def own_redis(
    config: RunConfig, run: RunDir, token: str
) -> AsyncIterator[tuple[RunConnection, asyncio.Task[None]]]:
    """A redis-server that lives as long as the run, with a user for each role.

    The task starts it again when it dies, and ends by raising `RedisLost`.
    """
    from penstock.transfer_queue import RedisServer

    password = secrets.token_urlsafe(32)
    binary = await asyncio.to_thread(find_redis_server)
    roles: dict[str, str] = {}
    if binary.version < USERS_VERSION:
        logger.warning("%s is older than 7.0: all roles share one password", binary.path)
    else:
        roles = {role: secrets.token_urlsafe(32) for role in ROLES}
    users = role_users(config.name, roles)
    knobs = config.transfer_queue
    server = RedisServer(
        run.redis, password, appendfsync=knobs.appendfsync, users=users, start_timeout_s=knobs.start_timeout_s
    )
    async with kept_alive(server) as keeper:
        yield RunConnection(server.url, config.name, password, token, role_passwords=roles), keeper


@contextlib.asynccontextmanager
async def kept_alive(server: RedisServer) -> AsyncIterator[asyncio.Task[None]]:
    """Starts the server, and stops it at the end. The task is `keep_alive`."""
    async with server:
        keeper = asyncio.create_task(keep_alive(server), name="redis keeper")
        try:
            yield keeper
        finally:
            keeper.cancel()
            await asyncio.wait([keeper])


LOOK_S = 0.2


class RedisLost(QueueError):
    """The run's redis-server died and cannot be kept alive."""

    @property
    def why(self) -> str:
        """The reason for the run's summary."""
        return str(self)


FAILED_STARTS = 5
"""Failed starts in a row after which redis-server is given up."""
RESTARTS, RESTARTS_WITHIN_S = 60, 600.0
"""Deaths that are outlived: more in that time, and what kills it does so whenever it has started."""


async def keep_alive(server: RedisServer) -> None:
    """Redis killed from outside comes back with its append-only file; clients retry meanwhile.

    Raises `RedisLost` if it does not come up again, or dies again and again.
    """
    budget = RestartBudget(RESTARTS, RESTARTS_WITHIN_S)
    while True:
        await asyncio.sleep(LOOK_S)
        if server.alive:
            continue
        if not budget.spend():
            raise RedisLost(f"redis-server died again and again ({budget.used_up}); see {server.log_file}")
        logger.warning("redis-server ended unexpectedly; restarting it from its append-only file")
        await _start_again(server)


_START_BACKOFF = Backoff(0.5, 10.0)


async def _start_again(server: RedisServer) -> None:
    pauses = _START_BACKOFF.pauses()
    while True:
        try:
            await server.restart()
        except (QueueError, OSError) as error:
            if pauses.failures + 1 >= FAILED_STARTS:
                raise RedisLost(
                    f"redis-server ended and did not come up again in {FAILED_STARTS} attempts: {error}"
                ) from error
            logger.error("redis-server did not come up again: %s", error)
        else:
            return
        await pauses.sleep()


async def serve(server: RedisServer, linger_while: Path | None, linger_s: float) -> None:
    """Serves until cancelled, and then as long as the file exists: the head removes its ``connect.env`` at its end.

    Raises `QueueError` if redis-server does not come up, `RedisLost` if it does not come up again.
    """
    async with kept_alive(server) as keeper:
        logger.info("queue at %s:%d and loopback", server.host, server.port)
        try:
            await asyncio.shield(keeper)
        except asyncio.CancelledError:
            # A shared disk sends no change events, and may not answer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    needed = linger_while.exists if linger_while is not None else bool
                    while not keeper.done() and await asyncio.to_thread(needed):  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_S)
            if keeper.done():
                keeper.result()  # raises: without redis-server there is nothing to linger for
            raise


class FolderQueues:
    """`own` is the run of this process's environment, wherever its folder is; the others are in `runs_dir`.

    A run that ended takes its ``connect.env`` away; one that was resumed has another, and is connected anew.
    """

    def __init__(self, runs_dir: Path, own: RunConnection | None) -> None:
        self._runs_dir = runs_dir
        self._own = own
        self._open: dict[str, tuple[RunConnection, TransferQueue]] = {}
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def names(self) -> Sequence[str]:
        runs = [path.parent.name for path in self._runs_dir.glob("*/connect.env")]
        return sorted({*runs, *([self._own.run] if self._own is not None else [])})

    async def queue(self, run: str) -> TransferQueue | None:
        """See `LiveQueues`."""
        link = await asyncio.to_thread(self._link, run)
        async with self._one_at_a_time[run]:  # an unreachable queue delays no request for another run
            if run in self._open and self._open[run][0] != link:
                await self._open.pop(run)[1].close()
            if link is None:
                return None
            if run not in self._open:
                self._open[run] = link, await link.connect(INTERACTIVE)
            return self._open[run][1]

    async def close(self) -> None:
        while self._open:
            _, (_, queue) = self._open.popitem()
            await queue.close()

    def _link(self, run: str) -> RunConnection | None:
        if self._own is not None and run == self._own.run:
            return self._own
        try:
            return RunConnection.from_lines((self._runs_dir / run / "connect.env").read_text(encoding="utf-8"))
        except (OSError, ConfigError):  # it ended, is another person's, or is being written
            return None
