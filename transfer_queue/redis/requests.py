"""Requests of a training service's clients in Redis: an id each, run once, its first result kept for a while.

    penstock:{RUN}:service:request:ID      hash: fields of the request; content and result once it is done
    penstock:{RUN}:service:index:NAME      hash: n:NUMBER → id and digest; of a model also `next`, which is not due yet
    penstock:{RUN}:service:ready:OWNER     list of an owner's ids that are due
    penstock:{RUN}:service:owners          list of the owners that have any; the first is the next to have its turn
    penstock:{RUN}:service:waiting, done   hashes: owner → requests without a result, with one
    penstock:{RUN}:service:tokens, steps   hashes: owner → what requests with a result have used
    penstock:{RUN}:service:bytes           hash: owner → bytes of requests without a result, expected results included
    penstock:{RUN}:service:results         hash: owner → bytes of results that were not fetched
    penstock:{RUN}:service:unfetched:OWNER sorted set: these results' ids and bytes, by the time of their end
    penstock:{RUN}:service:log, first      list of ids in the order in which they are run; how many are trimmed
    penstock:{RUN}:service:open            set: ids without an order that have no result
    penstock:{RUN}:service:records:KIND    hash: name → JSON

The key of a request is its number in its index: a client that repeats a call gets the id of the first. The bodies of
the log stay until they are trimmed, done or not: a trainer that restarts runs again what its newest point lacks.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from penstock.transfer_queue.errors import QueueError
from penstock.transfer_queue.redis.client import Connection
from penstock.transfer_queue.redis.keys import Keys

RETENTION_S, FETCHED_S = 24 * 3600.0, 600.0
"""For how long a result can be fetched, and fetched again."""
Submission = Literal["new", "known", "other", "old", "full", "quota", "bytes"]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a client."""

    owner: str
    kind: str
    body: bytes
    index: str
    """The series that `number` belongs to: a model's, or a sampling session's."""
    number: int
    ordered: bool = True
    """Run in the order of numbers, which begin with 1 and have no gaps."""
    digest: str = ""
    """Equal for repetitions of one request; empty: of kind and body."""
    result_bytes: int = 0
    """Most bytes of its result, where these are not bounded by the body's."""
    accepted: float = field(default_factory=time.time)
    """Unix time, by the clock of the API's machine."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    content: str
    """The media type."""
    data: bytes


class ClientUsage(NamedTuple):
    """Resources that requests have used."""

    tokens: int = 0
    steps: int = 0
    """Optimizer steps."""


@dataclass(frozen=True, slots=True)
class Record:
    """A fact that outlives processes; an empty `text` deletes it."""

    kind: str
    name: str
    text: str


class LogForgotten(QueueError):
    """Redis has lost requests that were acknowledged: its machine died, and its newest writes with it."""


class RequestLog:
    """Each method is one script or one command, safe to repeat."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection, self._prefix = connection, keys.index

    async def submit(
        self, request: ClientRequest, of_index: int, of_owner: int, owner_bytes: int
    ) -> tuple[Submission, str]:
        """(what happened, the id that the request's number has): ``known`` for a repetition, ``other`` for another
        request of that number, ``old`` for a number that is forgotten. ``full``: `of_index` requests of the index have
        no result; ``quota``: `of_owner` requests of the owner have none; ``bytes``: these, and results that were not
        fetched, have half of `owner_bytes`; the other half is for requests that their model waits for."""
        digest = request.digest or hashlib.sha256(request.kind.encode() + b"\0" + request.body).hexdigest()[:32]
        where = (request.index, request.number, digest, int(request.ordered), of_index, of_owner)
        fields = (request.kind, request.body, request.accepted, owner_bytes, request.result_bytes)
        request_id = secrets.token_hex(16)
        how, its_id = await self._script("submit_request", request_id, request.owner, *where, *fields)
        return how.decode(), its_id.decode()

    async def read(self, position: int, count: int) -> list[str]:
        """Ids of the log from `position` on, at most `count`. What is due enters the log here, owners in turn. Raises
        `LogForgotten`."""
        first, end, *ids = await self._script("read_requests", position, count)
        if not first <= position <= end:
            raise LogForgotten(f"the log has requests {first} to {end}, and the newest point is at {position}")
        return [one.decode() for one in ids]

    async def open_requests(self) -> list[str]:
        """Ids of requests without an order that have no result."""
        return [one.decode() for one in await self._command("SMEMBERS", "open")]

    async def request(self, request_id: str) -> ClientRequest | None:
        """None for one that is not there, or whose body is gone."""
        names = ("owner", "kind", "body", "index", "number", "accepted")
        fields = await self._command("HMGET", f"request:{request_id}", *names)
        if None in fields:
            return None
        owner, kind, body, index, number, accepted = fields
        request = ClientRequest(owner.decode(), kind.decode(), body, index.decode(), int(number))
        return replace(request, accepted=float(accepted))

    async def counts(self) -> dict[str, dict[str, int]]:
        """Requests by owner: those that are ``waiting`` for a result, their ``bytes`` with expected results, and those
        that were ever ``done``."""
        names = ("waiting", "bytes", "done")
        replies = await self._connection.many([("HGETALL", f"{self._prefix}service:{name}") for name in names])
        return {
            name: {owner.decode(): int(number) for owner, number in sorted(reply.items())}
            for name, reply in zip(names, replies, strict=True)
        }

    async def owner(self, request_id: str) -> str | None:
        owner = await self._command("HGET", f"request:{request_id}", "owner")
        return None if owner is None else str(owner.decode())

    async def done(self, request_ids: Sequence[str]) -> set[str]:
        """Return those that have a result, or are not there (any more)."""
        keys = [f"{self._prefix}service:request:{one}" for one in request_ids]
        replies = await self._connection.many([("HMGET", key, "owner", "content") for key in keys])
        return {one for one, (owner, content) in zip(request_ids, replies, strict=True) if content or owner is None}

    async def result(self, request_id: str) -> RequestResult | None:
        content, data = await self._command("HMGET", f"request:{request_id}", "content", "result")
        return None if content is None else RequestResult(content.decode(), data)

    async def finish(
        self, request_id: str, result: RequestResult, records: Iterable[Record] = (), used: ClientUsage | None = None
    ) -> bool:
        """True if this is the request's first result; records are written, and what it used is counted, with it or not
        at all."""
        flat = [part for one in records for part in (one.kind, one.name, one.text)]
        fixed = (request_id, result.content, result.data, round(RETENTION_S * 1000))
        return bool(await self._script("finish_request", *fixed, *(used or ClientUsage()), *flat))

    async def used(self, owner: str) -> ClientUsage:
        """The sum over the owner's requests with a result."""
        tokens, steps = [await self._command("HGET", name, owner) for name in ("tokens", "steps")]
        return ClientUsage(int(tokens or 0), int(steps or 0))

    async def fetched(self, request_id: str) -> None:
        """A client has the result: it counts no more among the owner's bytes, and is kept for `FETCHED_S`."""
        await self._script("fetched_request", request_id, round(FETCHED_S * 1000))

    async def trim(self, position: int) -> None:
        """Drop the bodies before `position`: what they changed is durable, and they are never run again."""
        # The last 1,000 requests of each model stay known after they leave the log: a late repetition finds its result.
        retention_ms, fetched_ms = round(RETENTION_S * 1000), round(FETCHED_S * 1000)
        await self._script("trim_requests", position, retention_ms, 1000, fetched_ms)

    async def end_waiting(self, index: str, result: RequestResult) -> int:
        """Give `result` to the requests of an index that wait for numbers that are not here; returns how many. The
        index ends: it is kept as long as their results."""
        retention_ms = round(RETENTION_S * 1000)
        return int(await self._script("end_waiting_requests", index, result.content, result.data, retention_ms))

    # records -------------------------------------------------------------------------------------------------------
    async def put(self, record: Record) -> None:
        if record.text:
            await self._command("HSET", f"records:{record.kind}", record.name, record.text)
        else:
            await self._command("HDEL", f"records:{record.kind}", record.name)

    async def record(self, kind: str, name: str) -> str | None:
        text = await self._command("HGET", f"records:{kind}", name)
        return None if text is None else str(text.decode())

    async def records(self, kind: str) -> Mapping[str, str]:
        """Name → text."""
        everything = await self._command("HGETALL", f"records:{kind}")
        return {name.decode(): text.decode() for name, text in everything.items()}

    async def _script(self, name: str, *args: object) -> Any:
        return await self._connection.script(name, self._prefix, *args)

    async def _command(self, name: str, key: str, *args: object) -> Any:
        return await self._connection.command(name, f"{self._prefix}service:{key}", *args)
