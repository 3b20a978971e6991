"""The queue in Redis. Each method is one script in ``lua/`` (contract: `queue.TransferQueue`), except payloads.

A payload is stored before the script that acknowledges it, in the same round trip where one server holds both, and
deleted after the script that drops it: a client that dies in between leaves an unreferenced payload, never a reference
without a payload.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.transfer_queue.codec.packing import check_compression, pack_plain, unpack_plain
from penstock.transfer_queue.codec.trajectories import (
    encode_journal,
    encode_task,
    mark_of,
    outcome_to_plain,
    pack_announcement,
    pack_mark,
    unpack_announcement,
    unpack_mark,
)
from penstock.transfer_queue.config import TransferQueueConfig
from penstock.transfer_queue.errors import (
    JournalMismatch,
    NoSuchRun,
    QueueError,
    RunTaken,
)
from penstock.transfer_queue.ledger import LedgerEntry, UsageReport
from penstock.transfer_queue.metrics import MEMBER_COST, journal_cost, task_cost
from penstock.transfer_queue.redis.client import Connection
from penstock.transfer_queue.redis.completions import Completions
from penstock.transfer_queue.redis.keys import LAYOUT, Keys
from penstock.transfer_queue.redis.payloads import UNACKNOWLEDGED_S, PayloadReader, Payloads, StoredPayload
from penstock.transfer_queue.redis.replies import (
    layout_refused,
    lease_from_row,
    ledger_entry,
    letter_from_row,
    limits_to_args,
    other_limit,
    pack_record,
    status_from_map,
    turn_report_from_map,
    turns_from_map,
)
from penstock.transfer_queue.redis.requests import RequestLog
from penstock.transfer_queue.status import Status
from penstock.transfer_queue.turns import KEPT_TURN_REPORTS, TurnCall, TurnReport, Turns
from penstock.transfer_queue.types import (
    KEPT_FAILURES,
    KEPT_UPDATES,
    OTHER_FAILURES,
    Announcement,
    AnnouncementMark,
    Batch,
    DataCursor,
    DeadLetter,
    FieldValues,
    Head,
    JournalEntry,
    Lease,
    Limits,
    Outcome,
    RunIdentity,
    RunRecord,
    ServerInfo,
    Task,
    Trajectory,
    Waiting,
    WeightUpdate,
    count_sampled,
)
from penstock.transfer_queue.validation import check_tasks

if TYPE_CHECKING:
    from penstock.transfer_queue.archive.archive import Archive

FORGET_CHUNK = 500
"""Episodes that one script of a commit forgets, some milliseconds."""
SUBMIT_CHUNK = 1000
"""Tasks per script unless a cursor requires all at once: Redis blocks other clients meanwhile."""


class RedisTransferQueue:
    """`TransferQueue` in Redis 6.2 or newer. Safe for concurrent tasks of one event loop; see `connect`."""

    def __init__(self, connection: Connection, run: str, config: TransferQueueConfig, archive: Archive | None) -> None:
        self._connection = connection
        self._keys = Keys(run)
        self._run = run
        self._registry_ttl_ms = round(config.registry_ttl_s * 1000)
        self._repeat_ms = round(2 * config.deadline_s * 1000)
        """For how long the answer to a call is kept: longer than it is repeated."""
        self._payloads = Payloads(connection, self._keys)
        self._completions = Completions(connection, self._keys, self._payloads, config.compression)
        self._epoch = 0
        """The trainer's, which every script that needs ``fenced`` takes as its last argument."""
        self._reader = PayloadReader(self._payloads, self._locate, archive)

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        config: TransferQueueConfig,
        password: str | None = None,
        username: str | None = None,
        *,
        archive: Archive | None = None,
    ) -> RedisTransferQueue:
        """Connect to ``redis://``, ``rediss://`` or ``unix://``, one server or a cluster.

        `archive` has trained trajectories until their commit; only a trainer needs it. Raises
        `QueueUnavailable` after `config.deadline_s`, `QueueError` for a wrong login, a Redis older than 6.2 or one
        that evicts keys when full, or a compression that is not installed.
        """
        Keys(run)
        check_compression(config.compression)
        connection = await Connection.connect(
            url,
            deadline_s=config.deadline_s,
            password=password,
            username=username,
            loading_timeout_s=config.start_timeout_s,
        )
        return cls(connection, run, config, archive)

    @property
    def requests(self) -> RequestLog:
        """Requests of a training service's clients."""
        return RequestLog(self._connection, self._keys)

    async def _script(self, name: str, *args: Any) -> Any:
        return await self._connection.script(name, self._keys.index, *args)

    # the run -------------------------------------------------------------------------------------------------------
    async def create_run(self, limits: Limits, config: str, identity: RunIdentity | None = None) -> RunRecord | None:
        ours = identity or RunIdentity("", "", "")
        known = (ours.run_id, ours.config_hash, ours.model)
        answer = await self._script("create_run", config, *known, *limits_to_args(limits))
        if not answer:
            return None
        how, *rest = answer
        if how == b"limit":
            raise other_limit(self._run, *(part.decode() for part in rest))
        *names, age_ms = rest
        owner = RunIdentity(*(name.decode() for name in names))
        if how == b"taken":
            raise RunTaken(self._run, owner, ours)
        return RunRecord(owner, age_ms / 1000)

    async def claim_head(self, holder: str, ttl_s: float, dead: str = "") -> Head | None:
        reply = await self._script("claim_head", holder, round(ttl_s * 1000), dead)
        return Head(reply[0].decode(), reply[1] / 1000) if reply else None

    async def release_head(self, holder: str) -> None:
        await self._script("release_head", holder)

    async def config(self) -> str:
        config, layout = await self._connection.command("HMGET", self._keys.run, "config", "layout")
        if config is None:
            raise NoSuchRun(f"no run {self._run} in this queue")
        if (stored_layout := (layout or b"1").decode()) != LAYOUT:
            raise QueueError(layout_refused(stored_layout))
        return str(config.decode())

    # data ----------------------------------------------------------------------------------------------------------
    async def submit(
        self, tasks: Sequence[Task], cursor: DataCursor | None = None, after: DataCursor | None = None
    ) -> int:
        check_tasks(tasks)
        at = [item for place in (cursor, after) for item in (("", "") if place is None else (place.epoch, place.index))]
        rows = [_submitted(task) for task in tasks]
        # A cursor moves with all of its tasks or none, and also if there are none.
        whole = cursor is not None or not rows
        shares = [rows] if whole else [rows[i : i + SUBMIT_CHUNK] for i in range(0, len(rows), SUBMIT_CHUNK)]
        new = 0
        for share in shares:
            new += await self._script("submit", *at, *[item for row in share for item in row])
        return new

    async def cursor(self) -> DataCursor:
        epoch, index = await self._connection.command("HMGET", self._keys.counters, "epoch", "index")
        return DataCursor(int(epoch or 0), int(index or 0))

    # agent workers -------------------------------------------------------------------------------------------------
    async def lease_episodes(self, worker: str, count: int, version: int) -> list[Lease]:
        rows = await self._script("lease_episodes", worker, count, version, _nonce(), self._repeat_ms)
        return [lease_from_row(row) for row in rows]

    async def adopt(self, episode_id: str, fence: int) -> Lease:
        return lease_from_row(await self._script("adopt", episode_id, fence))

    async def renew(self, leases: Iterable[Lease]) -> list[str]:
        args = [item for lease in leases for item in (lease.episode_id, lease.fence)]
        lost = await self._script("renew", *args) if args else []
        return [episode.decode() for episode in lost]

    async def journal(self, lease: Lease, entry: JournalEntry, position: int) -> None:
        packed = encode_journal(entry)
        args = (lease.episode_id, lease.fence, position, packed, journal_cost(len(packed)), count_sampled([entry]))
        count = int(await self._connection.script("journal", self._keys.index, *args))
        if count >= 0:
            raise JournalMismatch(lease.episode_id, position, count)

    async def fork(self, lease: Lease, turn: int, prefix: Sequence[JournalEntry], count: int) -> list[str]:
        cost = sum(journal_cost(len(encode_journal(entry))) for entry in prefix)
        shared = (turn, len(prefix), cost, count_sampled(prefix))
        answer = await self._script("fork", lease.episode_id, lease.fence, *shared, count)
        if isinstance(answer, int):
            raise JournalMismatch(lease.episode_id, len(prefix), answer)
        return [episode.decode() for episode in answer]

    async def complete(self, lease: Lease, trajectory: Trajectory) -> None:
        await self._completions.complete(lease, trajectory)

    async def fail(self, lease: Lease, outcome: Outcome) -> bool:
        packed = pack_plain(outcome_to_plain(outcome), "outcome")
        counted = (outcome.failure, KEPT_FAILURES, OTHER_FAILURES)
        return bool(await self._script("fail", lease.episode_id, lease.fence, packed, *counted))

    async def release(self, lease: Lease) -> None:
        await self._script("release", lease.episode_id, lease.fence)

    async def prove_reward(self, reward: str) -> None:
        await self._script("prove_reward", reward)

    async def is_reward_proven(self, reward: str) -> bool:
        return bool(await self._connection.command("SISMEMBER", self._keys.proven, reward))

    # trainer -------------------------------------------------------------------------------------------------------
    async def claim_training(self, holder: str) -> int:
        self._epoch = int(await self._script("claim_training", holder, _nonce()))
        return self._epoch

    def join_training(self, epoch: int) -> None:
        self._epoch = epoch

    async def check_training(self) -> None:
        await self._fenced("check_training")

    async def _fenced(self, name: str, *args: Any) -> Any:
        return await self._script(name, *args, self._epoch)

    async def lease_batch(self, step: int) -> Batch | Waiting:
        fixed, answer = await self._fenced("lease_batch", step)
        return Batch(step, unpack_plain(answer, "batch")) if fixed else Waiting(answer.decode())

    async def read(self, episode_ids: Sequence[str]) -> list[Trajectory]:
        return await self._reader.read(episode_ids)

    async def get(self, episode_ids: Sequence[str], fields: Sequence[str]) -> list[FieldValues]:
        return await self._reader.get(episode_ids, fields)

    async def _locate(self, episode_ids: Sequence[str]) -> list[StoredPayload]:
        rows = await self._script("locate", *episode_ids) if episode_ids else []
        return [StoredPayload(name.decode(), size) for name, size in rows]

    async def spill(self, step: int, episode_ids: Sequence[str]) -> int:
        moved = int(await self._fenced("spill", step, *episode_ids))
        await self._sweep()
        return moved

    async def drop_lost(self, step: int, episode_ids: Sequence[str]) -> int:
        lost = int(await self._fenced("drop_lost", step, *episode_ids))
        await self._sweep()
        return lost

    async def pass_step(self, step: int) -> bool:
        return bool(await self._fenced("pass_step", step))

    async def publish_version(self, announcement: Announcement) -> bool:
        packed, mark = _marked(announcement)
        new = bool(await self._fenced("publish_version", announcement.version, packed, mark, _nonce()))
        await self._sweep()
        return new

    async def renew_manifest(self, announcement: Announcement) -> bool:
        return bool(await self._fenced("renew_manifest", announcement.version, *_marked(announcement)))

    async def commit(self, step: int, batches: Mapping[int, Sequence[Sequence[str]]] | None = None) -> None:
        known = {number: [list(group) for group in groups] for number, groups in (batches or {}).items()}
        await self._fenced("commit", step, "" if batches is None else pack_plain(known, "batches"))
        while await self._fenced("forget_committed", FORGET_CHUNK):
            await self._sweep()
        await self._sweep()

    async def _sweep(self) -> None:
        """Delete payloads that no group references. Their names are never reused, so a repeat is harmless."""
        garbage = self._keys.garbage
        if self._connection.spreads:
            await self._script("release_reserved", 1000 * UNACKNOWLEDGED_S)
        while rows := await self._connection.command("SRANDMEMBER", garbage, 500):
            pairs = [row.decode().rpartition(" ") for row in rows]
            gone = [StoredPayload(name, int(size)) for name, _, size in pairs]
            if self._connection.spreads:
                await self._payloads.delete(gone)
                await self._connection.command("SREM", garbage, *rows)
                continue
            keys = [self._payloads.keys(stored) for stored in gone]
            args = [item for row, mine in zip(rows, keys, strict=True) for item in (row, len(mine))]
            await self._connection.script("sweep", self._keys.index, *args, keys=[key for mine in keys for key in mine])

    async def rewind(self, step: int) -> int:
        return int(await self._script("rewind", step))

    # versions and servers ------------------------------------------------------------------------------------------
    async def latest_version(self) -> Announcement | None:
        blob = await self._connection.command("HGET", self._keys.steps, "announcement")
        return None if blob is None else unpack_announcement(blob)

    async def latest_mark(self) -> AnnouncementMark | None:
        packed = await self._connection.command("HGET", self._keys.steps, "announced")
        return None if packed is None else unpack_mark(packed)

    async def heartbeat(self, server: ServerInfo) -> None:
        await self._script("heartbeat", server.server_id, pack_record(server), self._registry_ttl_ms)

    async def deregister(self, server_id: str) -> None:
        await self._script("deregister", server_id)

    async def servers(self) -> list[ServerInfo]:
        rows = await self._script("servers")
        infos = [self._server(blob, left_ms) for blob, left_ms in zip(rows[::2], rows[1::2], strict=True)]
        return sorted(infos, key=lambda info: info.server_id)

    def _server(self, blob: bytes, left_ms: int) -> ServerInfo:
        age_s = max(0, self._registry_ttl_ms - left_ms) / 1000
        return ServerInfo(**{**unpack_plain(blob, "server"), "age_s": age_s})

    async def report_update(self, update: WeightUpdate) -> None:
        await self._script("report_update", pack_record(update), _nonce(), KEPT_UPDATES)

    async def updates(self) -> list[WeightUpdate]:
        blobs = await self._connection.command("LRANGE", self._keys.updates, 0, -1)
        return [WeightUpdate(**unpack_plain(blob, "update")) for blob in blobs]

    async def report_usage(self, usage: UsageReport) -> None:
        await self._script("report_usage", pack_record(usage), usage.report_id)

    async def ledger(self, after: int, limit: int = 1000) -> list[LedgerEntry]:
        bounds = (f"({after}", "+inf", "LIMIT", 0, limit)
        members = await self._connection.command("ZRANGEBYSCORE", self._keys.ledger, *bounds)
        return [ledger_entry(member) for member in members]

    async def trim_ledger(self, upto: int) -> None:
        await self._script("trim_ledger", upto)

    async def take_turn(self, call: TurnCall) -> Turns:
        args = (call.side, call.holder, call.number, int(call.holds), round(call.ttl_s * 1000))
        blob = await self._script("take_turn", *args, call.bytes, call.used, call.budget, KEPT_TURN_REPORTS)
        return turns_from_map(unpack_plain(blob, "turns"))

    async def turns(self) -> Turns:
        return turns_from_map(unpack_plain(await self._script("turns"), "turns"))

    async def turn_reports(self) -> list[TurnReport]:
        blobs = await self._connection.command("LRANGE", self._keys.turn_reports, 0, -1)
        return [turn_report_from_map(unpack_plain(blob, "turn report")) for blob in blobs]

    async def held(self) -> set[str]:
        return {name.decode() for name in await self._script("held")}

    # other splits ---------------------------------------------------------------------------------------------------
    async def results(self, split: str) -> tuple[list[Trajectory], int]:
        names, out = await self._script("results", split)
        return await self.read([name.decode() for name in names]), int(out)

    async def drop_split(self, split: str) -> None:
        if split == "train":
            raise QueueError("split train cannot be dropped by itself; drop the run")
        await self._script("drop_split", split)
        await self._sweep()

    # watching ------------------------------------------------------------------------------------------------------
    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        await self._script("add_wait", f"{role}:{cause}", seconds, _nonce())

    async def status(self) -> Status:
        return status_from_map(unpack_plain(await self._script("status"), "status"))

    async def dead_letters(self, limit: int = 100, start: int = 0) -> list[DeadLetter]:
        return [letter_from_row(row) for row in await self._script("dead_letters", start, limit)]

    async def dead_letter(self, episode_id: str) -> DeadLetter | None:
        rows = await self._script("dead_letters", episode_id)
        return letter_from_row(rows[0]) if rows else None

    async def requeue(self, episode_id: str) -> None:
        await self._script("requeue", episode_id, _nonce())

    async def drop_run(self) -> int:
        deleted = 0
        for pattern in self._keys.patterns():
            async for keys in self._connection.scan(pattern):
                deleted += sum(await self._connection.many([["UNLINK", key] for key in keys]))
        return deleted

    async def close(self) -> None:
        await self._connection.close()


def _marked(announcement: Announcement) -> tuple[bytes, bytes]:
    """(packed announcement, its packed mark); both are written at once, so that a mark is never of another one."""
    packed = pack_announcement(announcement)
    return packed, pack_mark(mark_of(announcement.version, packed))


def _nonce() -> str:
    """Identifies one call, so that its repeat after a lost reply is recognised."""
    return secrets.token_hex(8)


def _submitted(task: Task) -> tuple[Any, ...]:
    """Arguments of script ``submit`` for one task."""
    packed = encode_task(task)
    cost = task_cost(len(packed))
    return (
        *(task.task_id, task.split, task.min_version, task.priority, task.data_source),
        *("" if task.group_size is None else task.group_size, cost, MEMBER_COST, packed),
    )
