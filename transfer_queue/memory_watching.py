"""The in-memory queue's servers, other splits, dead letters and numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from penstock.transfer_queue.codec import decode_trajectory
from penstock.transfer_queue.lengths import deciles
from penstock.transfer_queue.memory_run import MemoryRun
from penstock.transfer_queue.memory_state import TRAIN, split_episode
from penstock.transfer_queue.queue import DeadLetter, QueueError, ServerInfo, Status, WeightUpdate
from penstock.transfer_queue.rows import EVER
from penstock.transfer_queue.trajectory import Trajectory


class MemoryWatching(MemoryRun):
    """`TransferQueue` for rollout servers, evaluations and people."""

    async def heartbeat(self, server: ServerInfo) -> None:
        self._servers[server.server_id] = (server, self._clock() + self._registry_ttl_s)

    async def deregister(self, server_id: str) -> None:
        self._servers.pop(server_id, None)

    async def servers(self) -> list[ServerInfo]:
        now = self._clock()
        live = [
            replace(info, age_s=self._registry_ttl_s - (expires_at - now))
            for info, expires_at in self._servers.values()
            if expires_at > now
        ]
        return sorted(live, key=lambda info: info.server_id)

    async def report_update(self, update: WeightUpdate) -> None:
        self._updates.append(update)

    async def updates(self) -> list[WeightUpdate]:
        return list(self._updates)

    async def results(self, split: str) -> tuple[list[Trajectory], int]:
        groups = [group for group in self._state.groups.values() if group.task.split == split]
        done = [member.payload for group in groups for member in group.members if member.payload is not None]
        return [decode_trajectory(blob) for blob in done], sum(not group.ended for group in groups)

    async def drop_split(self, split: str) -> None:
        _refuse_train(split)
        for name in [name for name, group in self._state.groups.items() if group.task.split == split]:
            del self._state.groups[name]
            self._state.drop_letter(f"{name}#0")

    async def add_wait(self, role: str, cause: str, seconds: float) -> None:
        self._waits[f"{role}:{cause}"] += seconds  # type: ignore[assignment]

    async def status(self) -> Status:
        state = self._state
        workers = Counter(member.worker for _, _, member in state.leased())
        ages = {name: state.age_s(name) for name in ("queued", "admitted", "ready")}
        return Status(
            version=state.version,
            step=state.next_step,
            committed_step=state.committed_step,
            groups=self._count_groups(),
            episodes=self._count_episodes(),
            bytes=state.held_bytes(),
            parked=state.parked(),
            unconsumed_bytes=state.waiting_bytes(),
            waits_s=dict(self._waits),
            workers=dict(workers),
            other_splits=self._count_splits(),
            ages_s={name: age for name, age in ages.items() if age is not None},
            over_age=deciles(state.lengths, state.over_age_lengths),
        )

    def _count_groups(self) -> dict[str, int]:
        state = self._state
        found = {name: len(state.in_state(name)) for name in ("queued", "admitted", "ready", "dead")}
        shipped = state.in_state("shipped")
        return found | {
            "shipped": sum(group.step >= state.version for group in shipped),
            "trained": sum(group.step < state.version for group in shipped),
            "committed": state.counts["committed_groups"],
            "dropped_over_age": state.counts["dropped_over_age"],
            "filtered": state.counts["filtered_groups"],
            "submitted": state.counts["submitted"],
        }

    def _count_episodes(self) -> dict[str, int]:
        state = self._state
        unended = state.in_state("queued", "admitted")
        queued = sum(member.state == "queued" for group in unended for member in group.members)
        leased = sum(group.is_train for group, _, _ in state.leased())
        return {"queued": queued, "leased": leased} | {name: state.counts[name] for name in EVER}

    def _count_splits(self) -> dict[str, dict[str, int]]:
        splits: dict[str, Counter[str]] = {}
        for group in self._state.groups.values():
            if not group.is_train:
                name = {"failed": "done"}.get(group.members[0].state, group.members[0].state)
                splits.setdefault(group.task.split, Counter(queued=0, leased=0, done=0))[name] += 1
        return {split: dict(counts) for split, counts in splits.items()}

    async def dead_letters(self, limit: int = 100, start: int = 0) -> list[DeadLetter]:
        return list(self._state.letters.values())[start : start + limit]

    async def dead_letter(self, episode_id: str) -> DeadLetter | None:
        return self._state.letters.get(episode_id)

    async def requeue(self, episode_id: str) -> None:
        if episode_id not in self._state.letters:
            raise QueueError(f"{episode_id}: no such dead letter")
        task_id, _ = split_episode(episode_id)
        group = self._state.groups.get(task_id)
        if group is None or group.state not in ("dead", "done"):
            raise QueueError(f"{episode_id}: its group went on without it; there is nothing to queue again")
        for index in range(len(group.members)):
            self._state.drop_letter(group.episode(index))
        self._state.revive(group)


def _refuse_train(split: str) -> None:
    if split == TRAIN:
        raise QueueError("split train cannot be dropped by itself; drop the run")
