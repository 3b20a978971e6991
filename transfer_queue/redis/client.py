"""A Redis connection that survives restarts of Redis: every call is retried with back-off until its deadline.

    Connection ── one attempt, retried ──► Routes (which server) ──► Node (its connections, one round trip)

Retries are safe because every script may be repeated: fences, nonces and step numbers make the second call a no-op.
Scripts are Redis functions (`scripts`). A Redis that does not know them, because it is new or its machine lost its
newest writes, gets them from the first client that may load functions: the run's owner. The others wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import BusyLoadingError, NoPermissionError, NoScriptError, ResponseError

from penstock.common import Backoff
from penstock.transfer_queue.codec.packing import Packed
from penstock.transfer_queue.errors import QueueUnavailable
from penstock.transfer_queue.redis.cluster import Cluster, Node, NotSent, RedisCall, Routes, redact
from penstock.transfer_queue.redis.replies import FunctionsMissing, check_passing, check_server, knows_functions
from penstock.transfer_queue.redis.scripts import library, script

ATTEMPT_S = 10.0
"""One attempt; a Redis that is silent for longer is asked again on a new connection."""
SLOWEST_BYTES_PER_S = 4 << 20
"""An attempt that sends much is given time for it at this rate."""
LOADING_TIMEOUT_S = 60.0
"""Longest time in which a Redis that loads its file makes no progress."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
_BACKOFF = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=(0.5, 1.0))


class Connection:
    """Connection to one store (a redis-server or a Redis Cluster) for concurrent calls. Create it with `connect`.

    Calls raise `QueueUnavailable` after the deadline, which begins again while a Redis that came back reads more of its
    file, and the refusals of the store: `LeaseLost`, `BadPayload`,
    `StepError`, otherwise `QueueError`.
    """

    def __init__(
        self, routes: Routes, where: str, deadline_s: float, loading_timeout_s: float = LOADING_TIMEOUT_S
    ) -> None:
        self._routes = routes
        self._where = where
        self._deadline_s = deadline_s
        self._loading_timeout_s = loading_timeout_s
        self._functions = True
        """False for a Redis 6.2: scripts are sent by EVALSHA."""
        self._may_load = True
        """False once Redis has refused this login to load functions."""

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        deadline_s: float,
        password: str | None = None,
        username: str | None = None,
        loading_timeout_s: float = LOADING_TIMEOUT_S,
    ) -> Connection:
        """``redis://``, ``rediss://`` (``?ssl_ca_certs=FILE``) or ``unix://``; of a cluster, any of its nodes.

        A Redis that loads its file is waited for: at most `loading_timeout_s` without progress, also in later calls.
        Raises `QueueUnavailable`, or `QueueError` if a server does not meet the requirements.
        """
        where = redact(url)
        connection = cls(Node.of_url(url, password, username), where, deadline_s, loading_timeout_s)
        try:
            (info,) = await connection.infos()
            if info.get("cluster_enabled"):
                await connection.close()
                connection = cls(Cluster(Node.of_url(url, password, username)), where, deadline_s, loading_timeout_s)
            infos = await connection.infos()
            for each in infos:
                check_server(each, where)
            connection._functions = all(map(knows_functions, infos))
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def spreads(self) -> bool:
        """True for a Redis Cluster: payloads lie on several servers, and a script does not see them."""
        return self._routes.spreads

    async def script(self, name: str, key: str, *args: Any, keys: Sequence[str] = ()) -> Any:
        """Run a script by name with KEYS = [key, *keys]; on a cluster all of one slot."""
        call = self._script_call(name, key, args, keys)
        await self._finish(name, [[call]])
        return call.reply

    async def command(self, *args: Any) -> Any:
        """Run one command, which must be safe to repeat; its keys are in one slot. Replies are those of redis-py."""
        return (await self.many([args]))[0]

    async def many(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Independent, repeatable commands in one round trip (per server of a cluster); results in order.

        Not a transaction: others may see a part of it. Only failed commands are sent again.
        """
        calls = [RedisCall(command) for command in commands]
        if calls:
            await self._finish(str(commands[0][0]), [calls])
        return [_in_python(call) for call in calls]

    async def write_and_run(
        self, writes: Sequence[Sequence[Any]], name: str, key: str, *args: Any, keys: Sequence[str] = ()
    ) -> Any:
        """Writes, then a script that must see them: one round trip, or on a cluster one for each of the two.

        The whole is repeated until all of it succeeds. On one server the script runs even if a write before it failed:
        it must check for what it needs and refuse with ``RETRY …``.
        """
        stored, run = [RedisCall(write) for write in writes], self._script_call(name, key, args, keys)
        await self._finish(name, [stored, [run]] if self.spreads else [[*stored, run]], together=True)
        return run.reply

    async def scan(self, pattern: str) -> AsyncIterator[list[bytes]]:
        """All keys of a glob pattern, in chunks; a key may come twice. Waits for servers that are down."""
        for node in await self._masters():
            cursor = b"0"
            while True:
                # A thousand keys per SCAN: Redis blocks other clients meanwhile.
                call = RedisCall(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000), node)
                await self._finish("SCAN", [[call]])
                cursor, keys = call.reply
                if keys:
                    yield keys
                if cursor == b"0":
                    break

    async def info(self) -> dict[str, Any]:
        """INFO of the server; for a cluster of one master, with `used_memory` summed over all."""
        infos = await self.infos()
        return {**infos[0], "used_memory": sum(info["used_memory"] for info in infos)}

    async def infos(self) -> list[dict[str, Any]]:
        """INFO of every server that holds keys."""
        calls = [RedisCall(("INFO",), node) for node in await self._masters()]
        await self._finish("INFO", [calls])
        return [_in_python(call) for call in calls]

    async def close(self) -> None:
        await self._routes.close()

    # retrying ------------------------------------------------------------------------------------------------------
    async def _masters(self) -> Sequence[Node]:
        await self._finish("PING", [[RedisCall(("PING",))]])  # a cluster's map of slots is known then
        return self._routes.masters

    async def _finish(self, what: str, phases: Sequence[Sequence[RedisCall]], together: bool = False) -> None:
        """Run the calls phase by phase until all have succeeded; `together`: if one is repeated, all are."""
        loop = asyncio.get_running_loop()
        started, pauses, loaded = loop.time(), _BACKOFF.pauses(), 0
        deadline = started + self._deadline_s
        limit_s = _limit_s([call for phase in phases for call in phase])
        reason: Exception | None = None
        while True:
            cause = await self._attempt(phases, min(limit_s, max(deadline - loop.time(), FIRST_PAUSE_S)))
            if cause is None:
                return
            # An attempt shortly before the deadline may get no reply: what was answered before it says more.
            reason = reason if reason and isinstance(cause, NotSent) else cause
            if isinstance(cause, BusyLoadingError):
                before, loaded = loaded, await self._loaded_bytes(loaded)
                if loaded > before:
                    deadline = max(deadline, loop.time() + self._loading_timeout_s)
            pause_s = pauses.next_s()
            if loop.time() + pause_s > deadline:
                waited_s = loop.time() - started
                raise QueueUnavailable(
                    f"{what}: no answer from {self._where} for {waited_s:.1f} s: {reason}"
                ) from reason
            for call in chain.from_iterable(phases) if together else ():
                call.forget()
            await asyncio.sleep(pause_s)

    async def _loaded_bytes(self, before: int) -> int:
        """Returns the bytes of their files that the servers have read; `before` if no server answers."""
        calls = [RedisCall(("INFO", "persistence"), node) for node in self._routes.masters]
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await self._routes.run(calls)
        except TimeoutError:
            return before
        infos = [_in_python(call) for call in calls if call.error is None]
        return sum(int(info.get("loading_loaded_bytes", 0)) for info in infos) if infos else before

    async def _attempt(self, phases: Sequence[Sequence[RedisCall]], limit_s: float) -> Exception | None:
        """The reason why calls are unfinished, or None. Raises errors that a retry cannot fix."""
        with contextlib.suppress(TimeoutError):  # what got no reply says so
            async with asyncio.timeout(limit_s):
                for phase in phases:
                    missing = [call for call in phase if call.error is not None]
                    if missing:
                        await self._routes.run(missing)
                    unknown = [call for call in missing if _is_unknown(call)]
                    if unknown and await self._teach(unknown):
                        await self._routes.run(unknown)
                    if any(call.error is not None for call in phase):
                        break  # a script must see the writes of the phase before it
        errors = [call.error for call in chain.from_iterable(phases) if call.error is not None]
        for error in errors:
            check_passing(error, self._where)
        return errors[0] if errors else None

    def _script_call(self, name: str, key: str, args: Sequence[Any], keys: Sequence[str]) -> RedisCall:
        command = ("FCALL", library().function(name)) if self._functions else ("EVALSHA", script(name).sha)
        return RedisCall((*command, 1 + len(keys), key, *keys, *args), script=name)

    async def _teach(self, calls: Sequence[RedisCall]) -> bool:
        """True once Redis knows the calls' scripts; otherwise each call says why it does not.

        The library is loaded on every server that holds keys; its name is that of its contents.
        """
        if not self._functions:
            for call in calls:
                call.args = ("EVAL", script(call.script).source, *call.args[2:])
            return True
        failed: list[Exception] = []
        if self._may_load:
            loads = [RedisCall(("FUNCTION", "LOAD", library().source), node) for node in self._routes.masters]
            await self._routes.run(loads)
            failed = [load.error for load in loads if load.error and "already exists" not in str(load.error)]
            self._may_load = not any(isinstance(error, NoPermissionError) for error in failed)
            if not failed:
                return True
        for call in calls:
            call.error = FunctionsMissing(library().name, failed[0] if self._may_load else None)
        return False


def _is_unknown(call: RedisCall) -> bool:
    error = call.error
    return isinstance(error, NoScriptError) or (
        isinstance(error, ResponseError) and bool(call.script) and str(error) == "Function not found"
    )


def _limit_s(calls: Sequence[RedisCall]) -> float:
    """Longest time of one attempt at them."""
    size = 0
    for arg in chain.from_iterable(call.args for call in calls):
        if type(arg) is Packed:
            size += arg.size
        elif type(arg) is bytes or type(arg) is memoryview:
            size += len(arg)
    return ATTEMPT_S + size / SLOWEST_BYTES_PER_S


def _in_python(call: RedisCall) -> Any:
    convert = _replies().get(call.args[0])
    return call.reply if convert is None else convert(call.reply)


@cache
def _replies() -> Any:
    """Command → how redis-py turns its reply into Python: OK → True, HGETALL → dict, INFO → dict."""
    return aioredis.Redis(protocol=2).response_callbacks
