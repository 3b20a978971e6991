"""New weights on their way to rollout servers, while the trainer continues.

    announce(v) ──► the version before is out? ──► copy weights (torch thread) ──► task: write ─► queue.publish_version

The copy is taken before the next step may change the weights; at most one copy exists, because a version is announced
only when the one before is out. Each rank copies its own share: its shards, or a part of every tensor where its shards
are no ranges of the tensors' bytes (`spread_shards`). The task fetches them from the ranks bucket by bucket
(`WeightSource`); where deltas are written, each rank has found by then what changed in its share. A lone rank that
writes files hands its copy over as it is; adapters, which are small, are gathered on rank 0.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from penstock.rollout_server import find_model
from penstock.trainer.background import BackgroundWork
from penstock.trainer.engine import Engine
from penstock.trainer.job import TrainJob
from penstock.trainer.ranks.distributed import Ranks, TorchThread
from penstock.trainer.timeline import Timeline, Track
from penstock.transfer_queue import Announcement, TrainerFenced
from penstock.weight_sync import Manifest, Shard, WeightFiles, WeightSource, spread_shards

T = TypeVar("T")
POLL_S = 0.1
"""Between two looks of the other ranks whether rank 0 has published."""

logger = logging.getLogger(__name__)


class Publisher(BackgroundWork):
    """Every rank has one (gathering the weights is a collective); rank 0's writes. `published` is equal on all."""

    def __init__(
        self, job: TrainJob, engine: Engine, ranks: Ranks, in_torch: TorchThread, timeline: Timeline | None = None
    ) -> None:
        super().__init__(job.run.queue, "publish")
        self._timeline = timeline or Timeline()
        self._dtype = getattr(torch, job.rollout.dtype)
        self._write_timeout_s = job.config.publish_timeout_s
        self._engine = engine
        self._ranks = ranks
        self._in_torch = in_torch
        rollout = job.rollout
        self._files: WeightFiles | None = None
        if ranks.is_rank0:
            if mismatch := job.config.dtype_mismatch(rollout.dtype, on_gpu=ranks.device.type == "cuda"):
                logger.warning("%s; %s", *mismatch)
            self._files = WeightFiles(
                job.weights_dir,
                rollout.manifest_transport,
                token=job.run.token,
                host=rollout.weights_host,
                port=rollout.weights_port,
                full_every=rollout.weights_full_every,
                from_gpus=rollout.weight_transport == "nccl",
                model=find_model(job.run.model) if job.config.lora.rank else None,
            )
        self._broadcasts = rollout.manifest_transport == "broadcast"
        self._finds_changes = rollout.weights_full_every > 1 and not self._broadcasts
        """True if versions are compared: a broadcast is always full."""
        self._is_spread = self._broadcasts or ranks.world > 1
        """True if each rank keeps a copy of its share."""
        self._source: WeightSource | None = None
        """This rank's copies, if it keeps some."""
        self.published = 0
        """Newest version that the queue has, or will have when `settle` returns."""
        self._passed = -1
        """On rank 0, the newest step that has no groups because the weights of its version were gone."""
        self.last_s = 0.0
        """Seconds that the last version took from copy to announcement."""
        self._newest: Announcement | None = None
        """The version that this process announced last."""
        self._out = 0
        self._changed = asyncio.Condition()

    async def start(self, version: int, epoch: int = 0) -> None:
        """`version` is that of the restored weights: publish it where the queue has not seen it yet.

        `epoch`: this trainer's, of `TransferQueue.claim_training`.
        """
        newest = (await self._queue.status()).version if self._ranks.is_rank0 else None
        self.published = int(await self._in_torch(self._ranks.from_rank0, newest))
        self._out = self.published
        if version > self.published + 1:
            raise RuntimeError(
                f"the checkpoint is of version {version}, the queue is at {self.published}: they are not of one run. "
                "Start a run with a new name, or bring back the queue's data"
            )
        if self._is_spread and self._engine.adapter_settings is None:
            place = (self._ranks.rank, self._ranks.world, self._ranks.timeout)
            self._source = await self._in_torch(WeightSource.open, *place, finds_changes=self._finds_changes)
        if self._files is not None:
            await self._files.open(epoch)
            # Servers may be waiting for the announced files, which this trainer serves at another place.
            current = await self._queue.latest_version()
            if current is not None and (moved := self._files.moved(current.manifest)) is not None:
                await self._queue.renew_manifest(Announcement(current.version, moved.as_dict()))
        await self.announce(version)
        await self.settle()

    async def announce(self, version: int) -> None:
        """Publish the engine's present weights as `version`, in the background.

        A version that the queue already has is not published again (a replay after a restart); only if its file is
        gone, or the queue has forgotten its place, is the current one written anew, if its weights are the same. If
        they are others, its step is passed and they are published as the next version.
        """
        await self.settle()
        renew = version == self.published and await self._in_torch(self._ranks.from_rank0, await self._is_gone())
        if version <= self.published and not renew:
            return
        write = await self._in_torch(self._copied, version)
        self.published = max(version, self.published)
        if self._files is not None:
            work = self._write(version, partial(write, self._files), renew)
            self._task = asyncio.create_task(work, name=f"publish version {version}")
        if renew:
            await self.settle()
            if await self._in_torch(self._ranks.from_rank0, self._passed == version):
                await self.announce(version + 1)

    async def until_published(self, version: int) -> None:
        """Wait until the queue has `version`, without taking part in the writing. The caller sets the deadline."""
        if self._ranks.is_rank0:
            async with self._changed:
                await self._changed.wait_for(lambda: self._out >= version)
            return
        while self._out < version:
            current = await self._queue.latest_mark()
            self._out = max(self._out, current.version if current else 0)
            if self._out < version:
                await asyncio.sleep(POLL_S)

    async def remind(self) -> None:
        """Publish the newest version again where the queue has forgotten it with its machine.

        Else a batch that needs episodes of that version would be waited for in vain. The weights are the same, so the
        number still names one set of them.
        """
        writing = self._task is not None and not self._task.done()
        if self._newest is None or writing:
            return
        current = await self._queue.latest_mark()
        if current is None or current.version < self._newest.version:
            published = await self._queue.publish_version(self._newest)
            if not published:
                await self._queue.renew_manifest(self._newest)

    async def close(self) -> None:
        await super().close()
        if self._files is not None:
            await self._files.close()
        if self._source is not None:
            await asyncio.to_thread(self._source.close)

    async def _write(self, version: int, write: Callable[[], Awaitable[Manifest]], renew: bool) -> None:
        assert self._files is not None
        with self._timeline.during(Track.PUBLISH, "publish", version):
            began = time.monotonic()
            # A trainer that was replaced ends here; one that is replaced meanwhile writes under another name.
            await self._queue.check_training()
            announcement = Announcement(version, (await write()).as_dict())
            if renew and await self._has_other_weights(announcement):
                await self._pass_on(version)
                return
            if renew:
                place = self._files.directory
                logger.warning("the weights of version %d were gone; written again to %s", version, place)
                await self._queue.renew_manifest(announcement)
            elif not await self._queue.publish_version(announcement):
                raise TrainerFenced(
                    f"version {version} was published by another trainer of this run: the number names its weights, "
                    "and this trainer's are another set"
                )
            self._newest = announcement
            self.last_s = time.monotonic() - began
            async with self._changed:
                self._out = max(self._out, version)
                self._changed.notify_all()

    async def _has_other_weights(self, renewed: Announcement) -> bool:
        """Return True if the number of `renewed` names other weights than these, which servers may hold."""
        current = await self._queue.latest_version()
        if current is None or current.version != renewed.version:
            return False
        return WeightFiles.state_in(current.manifest) not in ("", WeightFiles.state_in(renewed.manifest))

    async def _pass_on(self, version: int) -> None:
        """Leave the current `version` as it is announced, for good: the weights here get the next number."""
        passed = await self._queue.pass_step(version)
        if passed:
            self._passed = version
        logger.error(
            "the weights of version %d are gone, and those here differ from what was announced: its steps were trained "
            "again with other settings or other rounding, or a damaged checkpoint lost their updates. Rollout servers "
            "get version %d%s",
            version,
            version + 1,
            f", with the weights here: step {version} is passed" if passed else "",
        )

    async def _broadcast(self, version: int, source: WeightSource, files: WeightFiles) -> Manifest:
        """To the servers that wait. Raises `PublishTimeout`; the version is not announced then."""
        expected = sum(server.accepting and not server.evaluates for server in await self._queue.servers())
        sending = files.begin_broadcast(version, source.tensors, source.sizes, source.orders)
        return await self._in_time(
            version, lambda files: files.write_broadcast(version, source, sending, expected), files
        )

    async def _in_time(self, version: int, write: Callable[[WeightFiles], Manifest], files: WeightFiles) -> Manifest:
        """Raises `PublishTimeout`; the version is not announced then."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                return await _in_daemon_thread(partial(write, files), f"write version {version}")
        except TimeoutError:
            raise PublishTimeout(
                f"version {version} was not written to {files.directory} within {self._write_timeout_s:g} s: the disk "
                "hangs or is too slow; choose another rollout.weights_dir or rollout.weight_transport, or raise "
                "trainer.publish_timeout_s"
            ) from None

    def _copied(self, version: int) -> Callable[[WeightFiles], Awaitable[Manifest]]:
        """Copies the weights as they are now, and returns how rank 0 publishes the copy.

        Under LoRA the adapter's alone, in float32: servers round once, when they add it to the model's own.
        """
        settings, source = self._engine.adapter_settings, self._source
        if settings is not None:
            adapter = list(self._engine.adapter_weights())
            return partial(self._in_time, version, lambda files: files.write_adapter(version, adapter, settings))
        if source is None:
            weights = _released(list(self._engine.weights(self._dtype)))
            return partial(self._in_time, version, lambda files: files.write(version, weights))
        # Rank 0 comes here once the version before is out: before that no rank may release its copies of it.
        self._ranks.meet()
        source.take(version, self._shards())
        if self._broadcasts:
            return partial(self._broadcast, version, source)
        return partial(self._in_time, version, lambda files: files.write_from_ranks(version, source))

    def _shards(self) -> Iterable[Shard]:
        """Yield the shards of this rank."""
        own = self._engine.local_shards(self._dtype)
        if own is not None:
            return own
        return spread_shards(self._engine.gathered_weights(), self._dtype, self._ranks.rank, self._ranks.world)

    async def _is_gone(self) -> bool | None:
        """Return True if no server could load the current version; version 0 is the model itself and is never
        announced.
        """
        if self._files is None:
            return None
        current = await self._queue.latest_version()
        if current is None or current.version < self.published:
            return self.published > 0
        return not self._files.offers(current.manifest)


class PublishTimeout(RuntimeError):
    """A version could not be written in time; the text names the folder and the keys."""


async def _in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` as `asyncio.to_thread` does, but the process can end while it hangs in the kernel."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a caller that stops waiting leaves `work` a future that it can still settle

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised from the await
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)


def _released(weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """All of them, in order; the list is empty afterwards, so that who writes them may free them."""
    weights.reverse()
    while weights:
        yield weights.pop()
