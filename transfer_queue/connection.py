"""A Redis connection that outlives Redis: every call is retried with back-off until its deadline.

Retrying is safe because every script may be repeated: fences, nonces and step numbers make the second call a no-op.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoScriptError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.transfer_queue.ledger import BadPayload, LeaseLost, LedgerError, LedgerUnavailable, StepError
from penstock.transfer_queue.scripts import script

FLOOR_VERSION = (6, 2)
ATTEMPT_S = 10.0
"""One attempt; a Redis that is silent for longer is asked again on a new connection."""
MAX_CONNECTIONS = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
_REFUSALS = {"LEASELOST": LeaseLost, "BADPAYLOAD": BadPayload, "STEP": StepError, "NORUN": LedgerError}
_PASSING = ("BUSY", "MISCONF", "LOADING", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "MASTERDOWN")
"""First words of replies that say: not now."""


class Connection:
    """One store, many calls at once. Made by `connect`."""

    def __init__(self, client: aioredis.Redis, where: str, deadline_s: float) -> None:
        self._client = client
        self._where = where
        self._deadline_s = deadline_s

    @classmethod
    async def connect(
        cls, url: str, *, deadline_s: float, password: str | None = None, username: str | None = None
    ) -> Connection:
        """Connect and check the server. Raises `LedgerUnavailable`, or `LedgerError` where it is not fit for use."""
        connection = cls(_client(url, deadline_s, password, username), redact(url), deadline_s)
        try:
            _check_server(await connection.command("INFO"), connection._where)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def script(self, name: str, key: str, *args: Any) -> Any:
        """Run a script by name on the run whose hash is `key`. Raises what the script refused with."""
        wanted = script(name)

        async def attempt() -> Any:
            try:
                return await self._client.evalsha(wanted.sha, 1, key, *args)
            except NoScriptError:
                return await self._client.eval(wanted.source, 1, key, *args)

        return await self._retried(name, attempt)

    async def command(self, *args: Any) -> Any:
        """One plain command, which must be safe to repeat."""
        return await self._retried(str(args[0]), lambda: self._client.execute_command(*args))

    async def close(self) -> None:
        await self._client.aclose()

    async def _retried(self, what: str, attempt: Callable[[], Awaitable[Any]]) -> Any:
        loop = asyncio.get_running_loop()
        started, pause = loop.time(), FIRST_PAUSE_S
        while True:
            left = started + self._deadline_s - loop.time()
            try:
                async with asyncio.timeout(min(ATTEMPT_S, max(left, FIRST_PAUSE_S))):
                    return await attempt()
            except (AuthenticationError, AuthorizationError) as error:
                raise LedgerError(f"{self._where} refused the login: {error}") from error
            except (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, OSError) as error:
                cause: Exception = error
            except ResponseError as error:
                cause = _refusal(error)
            if loop.time() + pause > started + self._deadline_s:
                waited_s = loop.time() - started
                raise LedgerUnavailable(
                    f"{what}: no answer from {self._where} for {waited_s:.1f} s: {cause}"
                ) from cause
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)


def redact(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"//[^@/]*@", "//", url)


def _client(url: str, deadline_s: float, password: str | None, username: str | None) -> aioredis.Redis:
    login = {name: value for name, value in (("password", password), ("username", username)) if value is not None}
    try:
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=deadline_s,
            # `_retried` bounds every attempt. A read timeout of redis-py 8 swallows cancellations.
            socket_timeout=None,
            socket_connect_timeout=None,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            **login,
        )
    except ValueError as error:
        raise LedgerError(f"ledger URL {redact(url)!r}: {error}") from error
    return aioredis.Redis.from_pool(pool)


def _refusal(error: ResponseError) -> Exception:
    """The error to retry on; one that is final is raised."""
    code, _, text = str(error).partition(" ")
    if code in _PASSING:
        return error
    if code in _REFUSALS:
        raise _REFUSALS[code](text) from None
    raise LedgerError(text if code == "LEDGER" else str(error)) from error


def _check_server(info: dict[str, Any], where: str) -> None:
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < FLOOR_VERSION:
        raise LedgerError(f"{where} runs Redis {version}; 6.2 or newer is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise LedgerError(
            f"{where} evicts keys when full (maxmemory-policy {policy}), which would lose trajectories;"
            " set it to noeviction"
        )
