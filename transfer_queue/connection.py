"""One Redis connection pool with scripts by name, and retries that end: back-off inside a deadline, then a named cause."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoScriptError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from penstock.transfer_queue.ledger import LedgerError, LedgerUnavailable

FLOOR_VERSION = (6, 2)
SOCKET_TIMEOUT_S = 10.0
_AWAY = (ConnectionError, TimeoutError, BusyLoadingError, OSError)
_SCRIPTS = Path(__file__).parent / "lua"


class Connection:
    """Owns a pool; every call is retried while Redis is away, for at most `deadline_s`."""

    def __init__(self, url: str, *, password: str | None, username: str | None, deadline_s: float) -> None:
        self.url = url
        self._deadline_s = deadline_s
        self._client: redis.Redis = redis.from_url(
            url,
            password=password,
            username=username,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            health_check_interval=15,
        )
        common = (_SCRIPTS / "common.lua").read_text()
        self._scripts = {
            file.stem: self._client.register_script(common + file.read_text())
            for file in _SCRIPTS.glob("*.lua")
            if file.stem != "common"
        }

    async def script(self, name: str, prefix: str, *arguments: Any) -> Any:
        """Run ``lua/NAME.lua`` on the run with this prefix: one round trip. Scripts are safe to repeat."""
        return await self.call(name, lambda: self._scripts[name](keys=[prefix], args=arguments))

    async def command(self, *words: Any) -> Any:
        return await self.call(str(words[0]), lambda: self._client.execute_command(*words))

    async def call(self, what: str, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """Raises `LedgerUnavailable` after the deadline, `LedgerError` for what Redis itself refuses."""
        started, pause_s = time.monotonic(), 0.05
        while True:
            try:
                return await attempt()
            except AuthenticationError as error:
                raise LedgerError(f"{self.url}: Redis refused the password: {error}") from error
            except _AWAY as error:
                waited_s = time.monotonic() - started
                if waited_s + pause_s > self._deadline_s:
                    raise LedgerUnavailable(
                        f"{self.url} did not answer {what} for {waited_s:.0f} s: {type(error).__name__}: {error}"
                    ) from error
            except NoScriptError:
                raise
            except ResponseError as error:
                raise LedgerError(f"{what}: {error}") from error
            except RedisError as error:
                raise LedgerError(f"{what}: {error}") from error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, 1.0)

    async def check_server(self) -> None:
        """Refuse a Redis that is too old or that may evict keys. Raises `LedgerError` with the mend."""
        server = await self.call("INFO", lambda: self._client.info("server"))
        version = tuple(int(part) for part in server["redis_version"].split(".")[:2])
        if version < FLOOR_VERSION:
            raise LedgerError(f"{self.url} runs Redis {server['redis_version']}; 6.2 or newer is needed")
        memory = await self.call("INFO", lambda: self._client.info("memory"))
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise LedgerError(
                f"{self.url}: maxmemory-policy is {policy!r}, which may throw trajectories away; "
                "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
            )

    async def close(self) -> None:
        await self._client.aclose()
