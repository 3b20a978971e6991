"""The ledger in Redis. Each method is one script in ``lua/`` (its contract is in `ledger.Ledger`), besides payloads.

A payload is stored before the script that acknowledges it runs, and is deleted after the script that forgets it: a
client that dies in between leaves a payload that nobody names, never a name without its payload.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.transfer_queue.checks import check_tasks, finish
from penstock.transfer_queue.codec import decode_trajectory, encode_journal, encode_task, outcome_to_plain
from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.connection import Connection
from penstock.transfer_queue.keys import Keys
from penstock.transfer_queue.ledger import (
    Announcement,
    BadPayload,
    Batch,
    DeadLetter,
    Lease,
    LeaseLost,
    LedgerError,
    Limits,
    ServerInfo,
    Status,
    Waiting,
    WeightUpdate,
)
from penstock.transfer_queue.packing import pack_plain, unpack_plain
from penstock.transfer_queue.rows import (
    lease_from_row,
    letter_from_row,
    limits_to_args,
    pack_announcement,
    pack_record,
    status_from_map,
    unpack_announcement,
)
from penstock.transfer_queue.trajectory import JournalEntry, Outcome, Task, Trajectory

READ_CHUNK = 64
"""Payloads fetched by one command: bounds the reply that Redis and client hold at once."""
SWEEP_CHUNK = 500
SUBMIT_CHUNK = 1000
"""Tasks per script where no cursor asks for all at once: Redis serves nobody else meanwhile."""


class RedisLedger:
    """`Ledger` in Redis 6.2 or newer. Safe for many tasks of one event loop; made by `connect`, ended by `close`."""

    def __init__(self, connection: Connection, run: str, registry_ttl_s: float) -> None:
        self._connection = connection
        self._keys = Keys(run)
        self._run = run
        self._registry_ttl_ms = round(registry_ttl_s * 1000)

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        config: TransferQueueConfig,
        password: str | None = None,
        username: str | None = None,
    ) -> RedisLedger:
        """Connect to ``redis://``, ``rediss://`` or ``unix://``. Raises `LedgerUnavailable` after `config.deadline_s`,
        `LedgerError` for a wrong login, a Redis older than 6.2 or one that evicts keys when full."""
        Keys(run)
        connection = await Connection.connect(url, deadline_s=config.deadline_s, password=password, username=username)
        return cls(connection, run, config.registry_ttl_s)

    async def _script(self, name: str, *args: Any) -> Any:
        return await self._connection.script(name, self._keys.run, *args)

    # the run -------------------------------------------------------------------------------------------------------
    async def create_run(self, limits: Limits, config: str) -> None:
        differs = await self._script("create_run", config, *limits_to_args(limits))
        if differs:
            name, found, wanted = (part.decode() for part in differs)
            raise LedgerError(
                f"run {self._run} exists with {name} = {found}, not {wanted}; use another name or drop it"
            )

    async def config(self) -> str:
        config = await self._connection.command("HGET", self._keys.run, "config")
        if config is None:
            raise LedgerError(f"no run {self._run} in this ledger")
        return str(config.decode())

    # data ----------------------------------------------------------------------------------------------------------
    async def submit(self, tasks: Sequence[Task], cursor: int | None = None) -> int:
        check_tasks(tasks)
        rows = [(task.task_id, task.lane, task.min_version, encode_task(task)) for task in tasks]
        size = max(1, len(rows)) if cursor is not None else SUBMIT_CHUNK
        new = 0
        for start in range(0, max(1, len(rows)), size):
            args = [item for row in rows[start : start + size] for item in row]
            new += await self._script("submit", "" if cursor is None else cursor, *args)
        return new

    async def cursor(self) -> int:
        return int(await self._connection.command("HGET", self._keys.run, "cursor") or 0)

    # agent workers -------------------------------------------------------------------------------------------------
    async def lease_episodes(self, worker: str, count: int, version: int) -> list[Lease]:
        rows = await self._script("lease_episodes", worker, count, version, _nonce())
        return [lease_from_row(row) for row in rows]

    async def renew(self, leases: Iterable[Lease]) -> list[str]:
        args = [item for lease in leases for item in (lease.episode_id, lease.fence)]
        lost = await self._script("renew", *args) if args else []
        return [episode.decode() for episode in lost]

    async def journal(self, lease: Lease, entry: JournalEntry) -> None:
        await self._script("journal", lease.episode_id, lease.fence, _nonce(), encode_journal(entry))

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        result = finish(lease, trajectory)
        payload = self._keys.payload(f"{lease.episode_id}@{lease.fence}")
        # NX: the bytes that were acknowledged first stay, whatever a repeat of the call carries.
        await self._connection.command("SET", payload, result.blob, "NX")
        lowest = "" if result.lowest_version is None else result.lowest_version
        numbers = (len(result.blob), int(result.rewarded), lowest, result.highest_version)
        outcome = pack_plain(outcome_to_plain(trajectory.outcome), "outcome")
        try:
            await self._script("complete", lease.episode_id, lease.fence, *numbers, outcome)
        except (LeaseLost, BadPayload):
            await self._connection.command("UNLINK", payload)
            raise

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        packed = pack_plain(outcome_to_plain(outcome), "outcome")
        return bool(await self._script("fail", lease.episode_id, lease.fence, packed))

    async def release(self, lease: Lease) -> None:
        await self._script("release", lease.episode_id, lease.fence)

    # trainer -------------------------------------------------------------------------------------------------------
    async def lease_batch(self, step: int) -> Batch | Waiting:
        fixed, answer = await self._script("lease_batch", step)
        return Batch(step, unpack_plain(answer, "batch")) if fixed else Waiting(answer.decode())

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        if not episode_ids:
            return []
        names = [name.decode() for name in await self._script("locate", *episode_ids)]
        for episode_id, name in zip(episode_ids, names, strict=True):
            if not name:
                raise BadPayload(f"{episode_id}: no payload; not completed, or its step is committed")
        return await self._fetch(names)

    async def _fetch(self, names: Sequence[str]) -> list[Trajectory]:
        trajectories = []
        for start in range(0, len(names), READ_CHUNK):
            chunk = names[start : start + READ_CHUNK]
            blobs = await self._connection.command("MGET", *map(self._keys.payload, chunk))
            trajectories += [_decode(name, blob) for name, blob in zip(chunk, blobs, strict=True)]
        return trajectories

    async def publish_version(self, announcement: Announcement) -> bool:
        packed = pack_announcement(announcement)
        return bool(await self._script("publish_version", announcement.version, packed, _nonce()))

    async def renew_manifest(self, announcement: Announcement) -> bool:
        return bool(await self._script("renew_manifest", announcement.version, pack_announcement(announcement)))

    async def commit(self, step: int) -> None:
        await self._script("commit", step)
        await self._sweep()

    async def _sweep(self) -> None:
        """Delete payloads that no group names any more. Their names are never used again, so twice does no harm."""
        while names := await self._connection.command("SRANDMEMBER", self._keys.garbage, SWEEP_CHUNK):
            await self._connection.command("UNLINK", *(self._keys.payload(name.decode()) for name in names))
            await self._connection.command("SREM", self._keys.garbage, *names)

    async def rewind(self, step: int) -> int:
        return int(await self._script("rewind", step))

    # versions and servers ------------------------------------------------------------------------------------------
    async def latest_version(self) -> Announcement | None:
        blob = await self._connection.command("HGET", self._keys.run, "announcement")
        return None if blob is None else unpack_announcement(blob)

    async def heartbeat(self, server: ServerInfo) -> None:
        await self._script("heartbeat", server.server_id, pack_record(server), self._registry_ttl_ms)

    async def deregister(self, server_id: str) -> None:
        await self._script("deregister", server_id)

    async def servers(self) -> list[ServerInfo]:
        infos = [ServerInfo(**unpack_plain(blob, "server")) for blob in await self._script("servers")]
        return sorted(infos, key=lambda info: info.server_id)

    async def report_update(self, update: WeightUpdate) -> None:
        await self._script("report_update", pack_record(update), _nonce())

    async def updates(self) -> list[WeightUpdate]:
        blobs = await self._connection.command("LRANGE", self._keys.updates, 0, -1)
        return [WeightUpdate(**unpack_plain(blob, "update")) for blob in blobs]

    async def held(self) -> set[str]:
        return {name.decode() for name in await self._script("held")}

    # other lanes ---------------------------------------------------------------------------------------------------
    async def results(self, lane: str) -> tuple[list[Trajectory], int]:
        names, out = await self._script("results", lane)
        return await self._fetch([name.decode() for name in names]), int(out)

    async def drop_lane(self, lane: str) -> None:
        if lane == "train":
            raise LedgerError("lane train cannot be dropped by itself; drop the run")
        await self._script("drop_lane", lane)
        await self._sweep()

    # watching ------------------------------------------------------------------------------------------------------
    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        await self._script("add_wait", f"{role}:{cause}", seconds, _nonce())

    async def status(self) -> Status:
        return status_from_map(unpack_plain(await self._script("status"), "status"))

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        return [letter_from_row(row) for row in await self._script("dead_letters", limit)]

    async def requeue(self, episode_id: str) -> None:
        await self._script("requeue", episode_id)

    async def drop_run(self) -> int:
        deleted = 0
        for pattern in self._keys.patterns():
            cursor = 0
            while True:
                cursor, found = await self._connection.command("SCAN", cursor, "MATCH", pattern, "COUNT", SWEEP_CHUNK)
                deleted += await self._connection.command("UNLINK", *found) if found else 0
                if not cursor:
                    break
        return deleted

    async def close(self) -> None:
        await self._connection.close()


def _nonce() -> str:
    """Names one call, so that its repeat after a lost reply is known as such."""
    return secrets.token_hex(8)


def _decode(name: str, blob: bytes | None) -> Trajectory:
    if blob is None:
        raise BadPayload(f"{name}: its payload is missing from Redis")
    try:
        return decode_trajectory(blob)
    except BadPayload as error:
        raise BadPayload(f"{name}: {error}") from error
