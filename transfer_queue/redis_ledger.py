"""The ledger in Redis. Index operations are one Lua script each (`lua/`), payloads are keys of their own.

    {penstock:RUN}:meta …             index: one hash tag, one slot
    penstock:payload:RUN:EPISODE:N    payloads: spread over a cluster; N is the fence of the lease that wrote it

A payload is written before the script that acknowledges it, and deleted after the script that forgets it: what the
index names always exists. Keys to delete are noted in ``…:garbage`` until the client has unlinked them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from penstock.transfer_queue.codec import (
    check_trajectory,
    outcome_from,
    pack_entry,
    pack_task,
    pack_trajectory,
    plain_outcome,
    unpack_entry,
    unpack_task,
    unpack_trajectory,
)
from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.connection import Connection
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
    StepError,
    Waiting,
    WeightUpdate,
)
from penstock.transfer_queue.status import status_from
from penstock.transfer_queue.trajectory import JournalEntry, Outcome, OutcomeKind, Task, Trajectory

UPDATES_KEPT = 100_000


class RedisLedger:
    """See `Ledger` for what every method promises."""

    def __init__(self, connection: Connection, run: str, config: TransferQueueConfig) -> None:
        self._redis = connection
        self._run = run
        self._config = config
        self._prefix = f"{{penstock:{run}}}"
        self._fences: dict[str, int] = {}
        self._journal_lengths: dict[tuple[str, int], int] = {}

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        run: str,
        config: TransferQueueConfig,
        password: str | None = None,
        username: str | None = None,
    ) -> RedisLedger:
        """Connect and check the server. Raises `LedgerUnavailable`, or `LedgerError` naming what is wrong with it."""
        connection = Connection(url, password=password, username=username, deadline_s=config.deadline_s)
        try:
            await connection.check_server()
        except LedgerError:
            await connection.close()
            raise
        return cls(connection, run, config)

    # the run -------------------------------------------------------------------------------------------------------
    async def create_run(self, limits: Limits, config: str) -> None:
        fields: dict[str, Any] = {
            "group_size": limits.group_size,
            "groups_per_step": limits.groups_per_step,
            "max_staleness": limits.max_staleness,
            "overage": limits.overage,
            "min_group": limits.min_group,
            "max_attempts": limits.max_attempts,
            "lease_ttl_ms": int(1000 * limits.lease_ttl_s),
            "max_bytes": limits.max_bytes,
            "config": config,
        }
        differs = await self._script("create_run", *[word for pair in fields.items() for word in pair])
        if differs:
            field, stored = (value.decode() for value in differs)
            raise LedgerError(f"run {self._run!r} exists with {field} {stored}, now {fields[field]}: use another name")

    async def config(self) -> str:
        stored = await self._redis.command("HGET", f"{self._prefix}:meta", "config")
        if stored is None:
            raise LedgerError(f"there is no run {self._run!r} in the ledger at {self._redis.url}")
        return stored.decode()

    # data ----------------------------------------------------------------------------------------------------------
    async def submit(self, tasks: Sequence[Task], cursor: int | None = None) -> int:
        new = 0
        for lane in dict.fromkeys(task.lane for task in tasks):
            words: list[Any] = [lane, "" if cursor is None or lane != "train" else cursor]
            for task in tasks:
                if task.lane == lane:
                    words += [task.task_id, pack_task(task), task.min_version]
            new += await self._script("submit", *words)
        return new

    async def cursor(self) -> int:
        return int(await self._redis.command("HGET", f"{self._prefix}:meta", "cursor") or 0)

    # agent workers -------------------------------------------------------------------------------------------------
    async def lease_episodes(self, worker: str, count: int, version: int) -> list[Lease]:
        if count <= 0:
            return []
        rows = await self._script("lease_episodes", worker, count, version)
        leases = [self._lease(*row) for row in rows]
        for lease in leases:
            self._journal_lengths[lease.episode_id, lease.fence] = len(lease.journal)
        return leases

    @staticmethod
    def _lease(
        name: bytes, task: bytes, member: int, attempt: int, fence: int, floor: int, journal: list[bytes]
    ) -> Lease:
        entries = tuple(unpack_entry(entry) for entry in journal)
        return Lease(name.decode(), unpack_task(task), member, attempt, fence, floor, entries)

    async def renew(self, leases: Iterable[Lease]) -> list[str]:
        words = [word for lease in leases for word in (lease.episode_id, lease.fence)]
        return [name.decode() for name in await self._script("renew", *words)] if words else []

    async def journal(self, lease: Lease, entry: JournalEntry) -> None:
        key = (lease.episode_id, lease.fence)
        position = self._journal_lengths.setdefault(key, len(lease.journal))
        if not await self._script("journal", lease.episode_id, lease.fence, position, pack_entry(entry)):
            self._ended(lease)
            raise LeaseLost(f"{lease.episode_id}: leased to another worker since")
        self._journal_lengths[key] = position + 1

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        self._check(lease, trajectory)
        payload = pack_trajectory(trajectory)
        if len(payload) > self._config.max_payload_bytes:
            raise BadPayload(f"payload: {len(payload)} bytes, the limit is {self._config.max_payload_bytes}")
        key = self._payload_key(lease.episode_id, lease.fence)
        await self._redis.command("SET", key, payload)
        newest = max(
            (int(s.version_spans[:, 0].max()) for s in trajectory.segments if len(s.version_spans)), default=-1
        )
        rewarded = int(trajectory.reward is not None)
        accepted = await self._script("complete", lease.episode_id, lease.fence, newest, rewarded, len(payload))
        if accepted != 1:
            await self._redis.command("UNLINK", key)
        if accepted == -1:
            raise BadPayload(f"version_spans: version {newest} has not been published yet")
        self._ended(lease)
        if accepted == 0:
            raise LeaseLost(f"{lease.episode_id}: leased to another worker since")
        await self._collect_garbage()

    @staticmethod
    def _check(lease: Lease, trajectory: Trajectory) -> None:
        if trajectory.episode_id != lease.episode_id:
            raise BadPayload(f"episode_id: {trajectory.episode_id!r} under a lease of {lease.episode_id!r}")
        oldest = trajectory.min_version
        if oldest is not None and oldest < lease.min_version:
            raise BadPayload(f"version_spans: version {oldest} is below the episode's floor {lease.min_version}")
        check_trajectory(trajectory)

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        packed = msgpack.packb(plain_outcome(outcome))
        again = int(outcome.kind is OutcomeKind.INFRA_ERROR)
        result = await self._script("fail", lease.episode_id, lease.fence, packed, again)
        self._ended(lease)
        if result < 0:
            raise LeaseLost(f"{lease.episode_id}: leased to another worker since")
        await self._collect_garbage()
        return bool(result)

    async def release(self, lease: Lease) -> None:
        await self._script("release", lease.episode_id, lease.fence)
        self._ended(lease)

    def _ended(self, lease: Lease) -> None:
        self._journal_lengths.pop((lease.episode_id, lease.fence), None)

    # trainer -------------------------------------------------------------------------------------------------------
    async def lease_batch(self, step: int) -> Batch | Waiting:
        code, answer = await self._script("lease_batch", step)
        if code < 0:
            raise StepError(answer.decode())
        if code == 0:
            return Waiting(answer.decode())
        await self._collect_garbage()
        return Batch(step, tuple(tuple(self._remember(name) for name in group) for group in answer))

    def _remember(self, name_and_fence: bytes) -> str:
        name, _, fence = name_and_fence.decode().partition("\0")
        self._fences[name] = int(fence)
        return name

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        keys = [await self._payload_key_of(episode) for episode in episode_ids]
        payloads = [await self._redis.command("GET", key) for key in keys]
        return [self._unpacked(*pair) for pair in zip(episode_ids, payloads, strict=True)]

    @staticmethod
    def _unpacked(episode: str, payload: bytes | None) -> Trajectory:
        if payload is None:
            raise BadPayload(f"{episode}: its payload is not in the ledger (committed, dropped or never completed)")
        try:
            return unpack_trajectory(payload)
        except BadPayload as error:
            raise BadPayload(f"{episode}: {error}") from error

    async def _payload_key_of(self, episode: str) -> str:
        if episode not in self._fences:
            fence = await self._redis.command("HGET", f"{self._prefix}:episode:{episode}", "fence")
            self._fences[episode] = int(fence or 0)
        return self._payload_key(episode, self._fences[episode])

    async def publish_version(self, announcement: Announcement) -> bool:
        manifest = msgpack.packb(dict(announcement.manifest))
        result = await self._script("publish_version", announcement.version, manifest)
        if result < 0:
            raise StepError(
                f"version {announcement.version} cannot follow: its step was never leased, or one is left out"
            )
        return bool(result)

    async def renew_manifest(self, announcement: Announcement) -> bool:
        manifest = msgpack.packb(dict(announcement.manifest))
        return bool(await self._script("renew_manifest", announcement.version, manifest))

    async def commit(self, step: int) -> None:
        result = await self._script("commit", step)
        if result[0] < 0:
            raise StepError(result[1].decode())
        await self._collect_garbage()

    async def rewind(self, step: int) -> int:
        code, answer = await self._script("rewind", step)
        if code < 0:
            raise StepError(answer.decode())
        return answer

    async def held(self) -> set[str]:
        return {name.decode() for name in await self._redis.command("SMEMBERS", f"{self._prefix}:held")}

    # versions and servers ------------------------------------------------------------------------------------------
    async def latest_version(self) -> Announcement | None:
        version, manifest = await self._redis.command("HMGET", f"{self._prefix}:meta", "version", "manifest")
        return Announcement(int(version), msgpack.unpackb(manifest)) if manifest is not None else None

    async def heartbeat(self, server: ServerInfo) -> None:
        described = msgpack.packb(_fields(server))
        await self._script("heartbeat", server.server_id, described, int(1000 * self._config.registry_ttl_s))

    async def deregister(self, server_id: str) -> None:
        await self._redis.command("ZREM", f"{self._prefix}:heartbeats", server_id)
        await self._redis.command("HDEL", f"{self._prefix}:servers", server_id)

    async def servers(self) -> list[ServerInfo]:
        found = [ServerInfo(**msgpack.unpackb(row)) for row in await self._script("servers")]
        return sorted(found, key=lambda server: server.server_id)

    async def report_update(self, update: WeightUpdate) -> None:
        await self._redis.command("RPUSH", f"{self._prefix}:updates", msgpack.packb(_fields(update)))
        await self._redis.command("LTRIM", f"{self._prefix}:updates", -UPDATES_KEPT, -1)

    async def updates(self) -> list[WeightUpdate]:
        rows = await self._redis.command("LRANGE", f"{self._prefix}:updates", 0, -1)
        return [WeightUpdate(**msgpack.unpackb(row)) for row in rows]

    # other lanes ---------------------------------------------------------------------------------------------------
    async def results(self, lane: str) -> tuple[list[Trajectory], int]:
        done, out = await self._script("results", lane)
        return await self.read([self._remember(name) for name in done]), out

    async def drop_lane(self, lane: str) -> None:
        await self._script("drop_lane", lane)
        await self._collect_garbage()

    # watching ------------------------------------------------------------------------------------------------------
    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        await self._redis.command("HINCRBYFLOAT", f"{self._prefix}:waits", f"{role}:{cause}", seconds)

    async def status(self) -> Status:
        return status_from(*await self._script("status"))

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        flat = await self._redis.command("HGETALL", f"{self._prefix}:dead")
        pairs = (
            list(flat.items())[:limit]
            if isinstance(flat, dict)
            else list(zip(flat[::2], flat[1::2], strict=True))[:limit]
        )
        return [await self._dead_letter(name.decode(), *msgpack.unpackb(packed, raw=True)) for name, packed in pairs]

    async def _dead_letter(self, name: str, outcome: bytes, attempts: int) -> DeadLetter:
        journal = await self._redis.command("LRANGE", f"{self._prefix}:deadjournal:{name}", 0, -1)
        entries = tuple(unpack_entry(entry) for entry in journal)
        return DeadLetter(name, outcome_from(msgpack.unpackb(outcome)), attempts, entries)

    async def requeue(self, episode_id: str) -> None:
        answer = await self._script("requeue", episode_id)
        if answer != 1:
            raise LedgerError(f"{episode_id}: {answer[0].decode()}")

    async def drop_run(self) -> int:
        deleted = 0
        for pattern in (f"{self._prefix}:*", f"penstock:payload:{self._run}:*"):
            cursor: Any = 0
            while True:
                cursor, keys = await self._redis.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
                deleted += await self._redis.command("UNLINK", *keys) if keys else 0
                if int(cursor) == 0:
                    break
        return deleted

    async def close(self) -> None:
        await self._redis.close()

    # helpers -------------------------------------------------------------------------------------------------------
    async def _script(self, name: str, *arguments: Any) -> Any:
        return await self._redis.script(name, self._prefix, *arguments)

    def _payload_key(self, episode: str, fence: int) -> str:
        return f"penstock:payload:{self._run}:{episode}:{fence}"

    async def _collect_garbage(self) -> None:
        """Unlink payloads that the index has forgotten. A client that dies here leaves the notes for the next one."""
        notes = await self._redis.command("SRANDMEMBER", f"{self._prefix}:garbage", 512)
        if not notes:
            return
        pairs = [note.decode().partition("\0") for note in notes]
        for name, _, _ in pairs:
            self._fences.pop(name, None)
        await self._redis.command("UNLINK", *[self._payload_key(name, int(fence)) for name, _, fence in pairs])
        await self._redis.command("SREM", f"{self._prefix}:garbage", *notes)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}
