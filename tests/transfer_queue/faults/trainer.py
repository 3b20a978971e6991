"""A trainer process: ``python -m faults.trainer PLAN LIFE [--gap NAME --passes N] [--url URL]``.

The order of trainer/loop.py: take(s), prefetch(s + 1), train, publish(s + 1), spill; every few steps a checkpoint and
its commit beside the next steps. Its model is the list of what it was trained on, its weights a digest of that.
Exit 0: everything fed is trained. Exit 75: the queue has lost steps, or a payload of one; started again, it continues
from its newest checkpoint. Exit 76: a later trainer has claimed the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from faults.episodes import Records, cursor_at, position_of, task_at, trajectory_print
from faults.plan import FaultPlan, Gaps, check_parent, load_plan
from faults.redis_clock import movable_redis_clock
from penstock.transfer_queue import (
    Announcement,
    Archive,
    BadPayload,
    Batch,
    DataCursor,
    Limits,
    RedisTransferQueue,
    Status,
    StepError,
    Task,
    TrainerFenced,
    Trajectory,
    TransferQueue,
)

START_AGAIN, FENCED = 75, 76
BATCH_TIMEOUT_S = 300.0
"""Longer than any fault of ours lasts; the stage's own watch is quicker."""
POLL_S = 0.01


class Trainer:
    """One life, from the newest checkpoint to the end or to a gap."""

    def __init__(self, plan: FaultPlan, life: str, queue: RedisTransferQueue, archive: Archive, gaps: Gaps) -> None:
        self._plan = plan
        self._life = life
        self._queue = queue
        self._archive = archive
        self._gaps = gaps
        self._feeder = Feeder(queue, plan.limits)
        self._checkpoints = Checkpoints(plan.folder / "checkpoints")
        self._log = Records(plan.folder / "trainer.jsonl", durable=False)
        self._saved = 0
        self._since_saved: list[Trained] = []
        self._saving: asyncio.Task[None] | None = None
        self._next: asyncio.Task[Batch | None] | None = None
        self._weights = ""
        self._newest: Announcement | None = None
        """What the queue announced last, as far as this life knows."""
        self._parent = os.getppid()

    async def run(self) -> None:
        step, published = await self._resume()
        (self._plan.folder / f"{self._life}.began").touch()
        while batch := await self._take(step):
            self._gaps.at("after_lease")
            self._next = asyncio.create_task(self._lease(step + 1))
            batch = await self._train(batch)
            self._gaps.at("after_step")
            if step + 1 > published and await self._queue.publish_version(announced := self._announcement(step + 1)):
                self._is_announced(announced)
            self._gaps.at("after_publish")
            await self._spill(batch)
            step += 1
            if step % self._plan.checkpoint_every == 0:
                await self._save(step)
        await self._save(step)
        await self._settle()

    async def _resume(self) -> tuple[int, int]:
        """(step to go on with, newest version that is out)"""
        await self._queue.claim_training(f"life {self._life}")
        step, status = self._checkpoints.newest().step, await self._queue.status()
        if status.committed_step > step:
            raise AssertionError(f"step {status.committed_step} is committed and no checkpoint beyond {step} is whole")
        await self._queue.commit(step, groups_by_step(self._checkpoints.lineage(status.committed_step)))
        again = await self._queue.rewind(step)
        version = (await self._queue.status()).version
        self._log.write("life", life=self._life, step=step, version=version, again=again)
        self._weights = weights_of(self._checkpoints.lineage())
        current, own = await self._queue.latest_version(), self._announcement(step)
        if current is not None:
            self._is_announced(current)
        # As trainer/publish.py: a number that was announced keeps its weights, whose file is never gone here.
        if step >= version and (current is None or current.version < step or current == own):
            if step > version:
                await self._queue.publish_version(own)
            else:
                await self._queue.renew_manifest(own)
            self._is_announced(own)
        self._saved = step
        return step, max(step, version)

    def _announcement(self, version: int) -> Announcement:
        return Announcement(version, {"path": f"weights-{version}", "contents": self._weights})

    def _is_announced(self, announced: Announcement) -> None:
        self._newest = announced
        self._log.write("version", version=announced.version, contents=announced.manifest["contents"])

    async def _remind(self) -> None:
        """As trainer/publish.py: the queue may have forgotten what the newest version is."""
        if (newest := self._newest) is None:
            return
        current = await self._queue.latest_version()
        if (current.version if current else 0) < newest.version and not await self._queue.publish_version(newest):
            await self._queue.renew_manifest(newest)

    async def _take(self, step: int) -> Batch | None:
        self._gaps.at("before_step")
        task, self._next = self._next, None
        return await (task or self._lease(step))

    async def _lease(self, step: int) -> Batch | None:
        """None where everything that was fed is trained."""
        deadline = asyncio.get_running_loop().time() + BATCH_TIMEOUT_S
        while True:
            check_parent(self._parent)
            finishing = self._plan.finishing
            if not finishing:
                await self._feeder.fill()
            answer = await self._queue.lease_batch(step)
            if isinstance(answer, Batch):
                return answer
            if finishing and drained(await self._queue.status(), self._plan.limits):
                return None
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"no batch for step {step}: {answer.cause}; {await self._queue.status()}")
            await self._remind()
            await asyncio.sleep(POLL_S)

    async def _train(self, batch: Batch) -> Batch:
        """Returns what it was trained on: `batch` without what could not be read."""
        while (trajectories := await self._read(batch)) is None:
            lost = [episode for episode in _episodes(batch) if not await self._readable(episode)]
            await self._queue.drop_lost(batch.step, lost)
            left = await self._queue.lease_batch(batch.step)
            assert isinstance(left, Batch), left
            batch = left
        groups = [list(group) for group in batch.groups]
        prints = {trajectory.episode_id: trajectory_print(trajectory) for trajectory in trajectories}
        trained = Trained(batch.step, groups, prints)
        self._since_saved.append(trained)
        self._weights = weights_of([trained], self._weights)
        self._log.write("trained", life=self._life, step=batch.step, groups=groups, prints=prints)
        return batch

    async def _read(self, batch: Batch) -> list[Trajectory] | None:
        try:
            return await self._queue.read(_episodes(batch))
        except BadPayload:
            await self._queue.lease_batch(batch.step)  # fences a life whose step the next one has committed and pruned
            if not self._plan.loses_payloads:
                raise
            return None

    async def _readable(self, episode_id: str) -> bool:
        try:
            await self._queue.read([episode_id])
        except BadPayload:
            return False
        return True

    async def _spill(self, batch: Batch) -> None:
        self._gaps.during("in_spill")
        await asyncio.to_thread(self._archive.append, batch.step, await self._queue.read(_episodes(batch)))
        await self._queue.spill(batch.step, _episodes(batch))

    async def _save(self, step: int) -> None:
        if step == self._saved:
            return
        await self._settle()
        checkpoint = Checkpoint(step, self._saved, tuple(self._since_saved))
        self._saved, self._since_saved = step, []
        self._saving = asyncio.create_task(self._seal_and_commit(checkpoint))

    async def _seal_and_commit(self, checkpoint: Checkpoint) -> None:
        await self._queue.check_training()
        self._checkpoints.write(checkpoint, self._gaps)
        self._gaps.at("after_checkpoint")
        self._gaps.during("in_commit")
        await self._queue.commit(checkpoint.step, groups_by_step(checkpoint.trained))
        await asyncio.to_thread(self._archive.commit, checkpoint.step, {})
        self._gaps.at("after_commit")

    async def _settle(self) -> None:
        if self._saving is not None:
            await self._saving


def _episodes(batch: Batch) -> list[str]:
    return [episode for group in batch.groups for episode in group]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("life")
    parser.add_argument("--gap", default="")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--url")
    given = parser.parse_args()
    plan = load_plan(given.plan)
    gaps = Gaps(given.gap, given.passes, random.Random(f"{plan.seed}/{given.life}"))
    with movable_redis_clock(enabled=plan.movable_clock):
        await _play(plan, given.life, gaps, given.url or plan.url)


async def _play(plan: FaultPlan, life: str, gaps: Gaps, url: str) -> None:
    archive = Archive(plan.folder / "archive")
    queue = await RedisTransferQueue.connect(url, plan.run, plan.config, plan.password, archive=archive)
    try:
        await queue.create_run(plan.limits, "faults: 1")
        await Trainer(plan, life, queue, archive, gaps).run()
    except TrainerFenced as error:
        print(error, file=sys.stderr)
        sys.exit(FENCED)
    except (StepError, BadPayload) as error:
        # A payload may be gone between training on it and spilling it: the next life drops it.
        if not (plan.may_lose_tail or (plan.loses_payloads and isinstance(error, BadPayload))):
            raise
        print(error, file=sys.stderr)
        sys.exit(START_AGAIN)
    finally:
        await queue.close()


@dataclass(frozen=True)
class Trained:
    """One step of training."""

    step: int
    groups: list[list[str]]
    prints: dict[str, str]
    """episode id → print of the trajectory that was read."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` steps: that of the checkpoint at step `parent`, then `trained`."""

    step: int = 0
    parent: int = 0
    trained: tuple[Trained, ...] = ()


class Checkpoints:
    """``STEP.json`` in a folder; a file under another name was cut off by a crash."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def newest(self) -> Checkpoint:
        steps = [int(path.stem) for path in self._folder.glob("*.json")]
        return self._load(max(steps)) if steps else Checkpoint()

    def write(self, checkpoint: Checkpoint, gaps: Gaps) -> None:
        """Durable when it returns. `gaps` may end the process in the middle of the file."""
        text = json.dumps(asdict(checkpoint))
        # Two trainers may be alive.
        unfinished = self._folder / f"{checkpoint.step:08d}-{os.getpid()}.unfinished"
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            gaps.at("in_checkpoint")
            file.write(text[len(text) // 2 :])
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self._path(checkpoint.step))
        _sync_folder(self._folder)

    def lineage(self, since: int = 0) -> list[Trained]:
        """The steps from `since` on that the newest checkpoint's model has seen, in order."""
        steps: list[Trained] = []
        checkpoint = self.newest()
        while checkpoint.step > since:
            steps = [*checkpoint.trained, *steps]
            checkpoint = self._load(checkpoint.parent) if checkpoint.parent else Checkpoint()
        return [trained for trained in steps if trained.step >= since]

    def _load(self, step: int) -> Checkpoint:
        plain = json.loads(self._path(step).read_text(encoding="utf-8"))
        return Checkpoint(plain["step"], plain["parent"], tuple(Trained(**trained) for trained in plain["trained"]))

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:08d}.json"


def weights_of(steps: Sequence[Trained], before: str = "") -> str:
    """A digest of all that the model has seen: `before`, then `steps`."""
    for trained in steps:
        text = json.dumps([before, trained.step, trained.groups, trained.prints], sort_keys=True)
        before = blake2b(text.encode(), digest_size=8).hexdigest()
    return before


def groups_by_step(steps: Sequence[Trained]) -> dict[int, list[list[str]]]:
    return {trained.step: trained.groups for trained in steps}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Feeder:
    """Goes on at the queue's own cursor, which a queue that lost its tail turns back."""

    def __init__(self, queue: TransferQueue, limits: Limits) -> None:
        self._queue = queue
        self._limits = limits

    async def fill(self) -> None:
        start, status = await self._queue.cursor(), await self._queue.status()
        position = position_of(start)
        waiting = sum(status.groups.get(state, 0) for state in ("queued", "admitted", "ready")) - status.parked
        end = position + (self._limits.max_staleness + 2) * self._limits.groups_per_step - waiting
        if end > position:
            await self._submit([task_at(number) for number in range(position, end)], cursor_at(end), start)

    async def _submit(self, tasks: Sequence[Task], end: DataCursor, start: DataCursor) -> None:
        try:
            await self._queue.submit(tasks, cursor=end, after=start)
        except StepError:
            return  # the cursor was turned back meanwhile; the next call sees it


def drained(status: Status, limits: Limits) -> bool:
    """Nothing can become a step any more: groups that are left over are fewer than one needs."""
    groups = status.groups
    return groups["queued"] + groups["admitted"] == 0 and groups["ready"] < limits.groups_per_step


if __name__ == "__main__":
    asyncio.run(main())
