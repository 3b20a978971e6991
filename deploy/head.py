"""Which run this is, and that one process heads it.

    run.id in the run's folder ─► RunIdentity ─► create_run: another run of this name in the queue is refused
    claim ─► renew every RENEW_S ─► release      a second head waits for the first one's lease, or is refused

The lock on the run's folder (`run_dir.RunLock`) keeps a second head away on one file system. The lease in the queue
does so for heads that share only the queue, and where a lock on a network file system has lapsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

from penstock.common import process_has_ended, process_identity, write_atomically
from penstock.deploy.config import RunConfig, dump_config
from penstock.deploy.run_dir import RunDir
from penstock.transfer_queue import (
    Head,
    QueueError,
    QueueUnavailable,
    RunIdentity,
    RunRecord,
    Status,
    TransferQueue,
)

HEAD_TTL_S = 30.0
"""A head that has not renewed its lease for this long has lost the run."""
RENEW_S = 5.0
POLL_S = 1.0
logger = logging.getLogger("penstock.run")


class HeadTaken(QueueError):
    """Another `penstock run` owns the run; the message names it."""


def identity_of(config: RunConfig, run: RunDir) -> RunIdentity:
    """The id is made with the run's folder. Of the model only its name counts: folders differ between machines."""
    if not run.identity.exists():
        write_atomically(run.identity, secrets.token_hex(8) + "\n", mode=0o600, durable=True)
    digest = hashlib.sha256(dump_config(config).encode()).hexdigest()
    return RunIdentity(run.identity.read_text().strip(), digest[:16], Path(config.model).name)


def describe_found(found: RunRecord | None, status: Status, identity: RunIdentity) -> str:
    """What `--resume` found in the queue, in one line."""
    if found is None:
        return f"run {identity.run_id}: it is new in this queue; it continues from a checkpoint where there is one"
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() - found.age_s))
    line = (
        f"run {identity.run_id}, begun {since}: version {status.version}, {status.committed_step} steps in checkpoints,"
        f" {status.step} leased by its trainer"
    )
    if found.identity.config_hash == identity.config_hash:
        return line
    return (
        f"{line}; its settings have changed (configuration {found.identity.config_hash} is now {identity.config_hash})"
    )


def _head_name() -> str:
    """This process, for people and as `process_identity`."""
    return f"{socket.gethostname()}, process {os.getpid()} ({process_identity()})"


def _process_of(holder: str) -> str:
    return holder.rpartition("(")[2].rstrip(")")


class HeadLease:
    """The right to head a run, kept in its queue. Every call is one script there."""

    def __init__(
        self, queue: TransferQueue, *, ttl_s: float = HEAD_TTL_S, renew_s: float = RENEW_S, poll_s: float = POLL_S
    ) -> None:
        self._queue = queue
        self._ttl_s, self._renew_s, self._poll_s = ttl_s, renew_s, poll_s
        self.holder = _head_name()

    async def claim(self) -> None:
        """Waits for the lease of a head that has died. Raises `HeadTaken` as soon as the other one renews its lease."""
        head = await self._claim()
        if head is not None and process_has_ended(_process_of(head.holder)):
            head = await self._claim(dead=head.holder)
        if head is not None:
            logger.warning("the run's head was %s; its lease ends in %.0f s, unless it lives", head.holder, head.left_s)
        while head is not None:
            await asyncio.sleep(self._poll_s)
            before, head = head, await self._claim()
            if head is not None and (head.holder != before.holder or head.left_s > before.left_s):
                raise HeadTaken(
                    f"{head.holder} heads this run and is alive: a run has one `penstock run`. "
                    "Stop that one, or choose another name=…"
                )

    async def keep(self) -> None:
        """Renews until cancelled. Raises `HeadTaken` where another head has taken the run over."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                head = await self._claim()
            except QueueUnavailable as error:
                # No other head can take the lease over meanwhile; whether the run can wait, its roles decide.
                logger.warning("the head's lease is not renewed: %s", error)
                continue
            if head is not None:
                raise HeadTaken(
                    f"{head.holder} has taken this run over: this head was silent for more than {self._ttl_s:.0f} s"
                )

    async def release(self) -> None:
        await self._queue.release_head(self.holder)

    async def _claim(self, dead: str = "") -> Head | None:
        return await self._queue.claim_head(self.holder, self._ttl_s, dead)


@contextlib.asynccontextmanager
async def run_headed(queue: TransferQueue) -> AsyncIterator[asyncio.Task[None]]:
    """Entered when this process owns the run; the task keeps the lease, and ends by raising `HeadTaken`."""
    lease = HeadLease(queue)
    await lease.claim()
    keeping = asyncio.create_task(lease.keep(), name="head lease")
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        with contextlib.suppress(QueueError):  # it ends by itself
            await lease.release()
