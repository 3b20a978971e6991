"""A broadcast of a version beside a bare one: two trainer ranks and two workers, each a process, all on loopback.

    bare     one gloo broadcast of the same bytes in the same buckets, into memory that was used before
    ours     from the copies of the shards to the moment at which both workers have, and have checked, all tensors:
             places, group, fetch from the other rank, checksums, broadcast, checksums; of two ranks, and of one that
             has all and fetches nothing, as the bare one does
    stall    the copy of this rank's own shards, for which the training thread stands
    gather   the shards cast to bfloat16 and gathered by rank 0: what a training thread would stand for without copies

All are taken in turn, in one round. The peak is rank 0's resident memory during the first broadcast, above what it
has before it with the copies of its own shards.
"""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.board import open_board, run_roles
from penstock.weight_sync import (
    Broadcaster,
    Offer,
    RankWire,
    Shard,
    StagedWeights,
    StreamedVersion,
    WeightSource,
    state_of,
    stream_version,
)

TENSORS = 64
ROLES = 4
"""Ranks 0 and 1 train, 2 and 3 are workers of servers."""
WAIT = timedelta(seconds=300)
MOST_MB = 512
"""Of a version: the four processes hold about eleven times as much."""
Figures = dict[str, float]


def measure_broadcasts(rounds: int, size_mb: int) -> Figures:
    """Medians over the rounds: seconds, and the peak in buckets."""
    figures: dict[str, list[float]] = run_roles(_play, ROLES, rounds, size_mb)
    return {name: median(values) for name, values in figures.items()}


def broadcast_ratios(figures: Figures) -> Figures:
    return {
        "broadcast_over_raw_gloo": round(figures["bare_s"] / figures["one_rank_s"], 3),
        "broadcast_of_two_ranks_over_raw_gloo": round(figures["bare_s"] / figures["two_ranks_s"], 3),
        "trainer_stall_over_gather": round(figures["stall_s"] / figures["gather_s"], 3),
        "host_peak_over_bucket": round(figures["peak_buckets"], 2),
    }


def _play(role: int, store: str, found: str, rounds: int, size_mb: int) -> None:
    torch.set_num_threads(1)
    board = open_board(role, ROLES, dist.FileStore(store, ROLES))
    dist.init_process_group("gloo", store=board, rank=role, world_size=ROLES, timeout=WAIT)
    trainers, receivers = dist.new_group([0, 1], timeout=WAIT), dist.new_group([0, 2, 3], timeout=WAIT)
    stage = _Stage(role, board, trainers, receivers, size_mb)
    for number in range(rounds + 1):
        stage.round(number, counts=number > 0)  # the first one warms up
    if role == 0:
        Path(found).write_text(json.dumps(stage.figures))
    dist.barrier()
    dist.destroy_process_group()


class _Stage:
    """One process's part of every round."""

    def __init__(self, role: int, board: dist.Store, trainers: Any, receivers: Any, size_mb: int) -> None:
        self.figures: dict[str, list[float]] = {}
        self._role, self._board, self._trainers, self._receivers = role, board, trainers, receivers
        values = size_mb * (1 << 20) // 2 // TENSORS // 2 * 2
        generator = torch.Generator().manual_seed(role)
        self._halves = [torch.randn(values // 2, generator=generator) for _ in range(TENSORS)] if role < 2 else []
        self._wholes = [torch.cat([half, half]) for half in self._halves] if role == 0 else []
        self._bytes = values * 2 * TENSORS
        self._wire = torch.zeros(self._bytes, dtype=torch.uint8) if role != 1 else torch.empty(0, dtype=torch.uint8)
        self._broadcaster = Broadcaster()
        self._staged = StagedWeights()
        """As in the worker of a vLLM server that has one: a version comes into the memory of the one before."""
        # Over two ranks, and over one that has all: then there is nothing to fetch.
        self._sources = {2: WeightSource(role, 2, RankWire(role, 2, trainers)), 1: WeightSource()}
        self._versions = 0

    def round(self, number: int, *, counts: bool) -> None:
        for name, part in (
            ("bare", self._bare),
            ("gather", self._gather),
            ("stall", lambda: self._take(number, 2)),
            ("take_all", lambda: self._take(number, 1)),
            ("two_ranks", lambda: self._ours(number, 2)),
            ("one_rank", lambda: self._ours(number, 1)),
        ):
            dist.barrier()
            began = time.perf_counter()
            part()
            if counts and self._role == 0:
                self.figures.setdefault(f"{name}_s", []).append(time.perf_counter() - began)

    def _bare(self) -> None:
        if self._role == 1:
            return
        for bucket in self._wire.split(self._broadcaster.bucket_bytes):
            dist.broadcast(bucket, src=0, group=self._receivers)
        dist.barrier(self._receivers)

    def _gather(self) -> None:
        if self._role > 1:
            return
        for half in self._halves:
            mine = half.to(torch.bfloat16)
            parts = [torch.empty_like(mine) for _ in range(2)] if self._role == 0 else None
            dist.gather(mine, parts, dst=0, group=self._trainers)

    def _take(self, number: int, ranks: int) -> None:
        if self._role < ranks:
            self._sources[ranks].take(number, self._shards(ranks))

    def _shards(self, ranks: int) -> list[Shard]:
        sizes: list[tuple[int, ...]]
        if ranks == 1:
            sizes = [(half.numel() * 2 * 2,) for half in self._halves]
            locals_ = self._wholes
        else:
            sizes = [(half.numel() * 2, half.numel() * 2) for half in self._halves]
            locals_ = self._halves
        pairs = enumerate(zip(sizes, locals_, strict=True))
        whole = (self._bytes // 2 // TENSORS,)
        return [Shard(f"layer.{n}", whole, torch.bfloat16, each, local) for n, (each, local) in pairs]

    def _ours(self, number: int, ranks: int) -> None:
        key = f"{number}-{ranks}"
        if self._role == 0:
            self._send(key, number, ranks)
        elif self._role == 1 and ranks == 2:
            self._sources[2].answer_until_stopped()
        elif self._role > 1:
            self._receive(key)

    def _send(self, key: str, number: int, ranks: int) -> None:
        source = self._sources[ranks]
        sending, offers = asyncio.run(_places(self._broadcaster, number, source))
        for worker, offer in enumerate(offers, 2):
            self._board.set(f"offer {key} {worker}", json.dumps(offer.as_dict()))
        before = _reset_peak()
        path, bucket_bytes = Path("unwritten"), self._broadcaster.bucket_bytes
        found = stream_version(source, number, path, write=False, bucket_bytes=bucket_bytes, sending=sending)
        if ranks == 2:
            # Of the first one: its buckets stay for the others.
            self.figures.setdefault("peak_buckets", [(_peak() - before) / bucket_bytes])
            source.wire.stop_others()
        self._check(key, found)

    def _check(self, key: str, found: StreamedVersion) -> None:
        states = {self._board.get(f"state {key} {worker}").decode() for worker in (2, 3)}
        if found.done != 2 or states != {state_of(found.tensors)}:
            raise RuntimeError(f"{found.done} of 2 workers have it, as {states}")

    def _receive(self, key: str) -> None:
        offer = Offer.parse(json.loads(self._board.get(f"offer {key} {self._role}")))
        host = {"trainer": "127.0.0.1", "here": "127.0.0.1"}
        state = self._staged.receive(Offer.parse({**offer.as_dict(), **host}))
        self._board.set(f"state {key} {self._role}", state)


async def _places(broadcaster: Broadcaster, version: int, source: WeightSource) -> Any:
    """The trainer's side and each worker's."""
    waiting = [asyncio.create_task(broadcaster.park(1, "gloo/2")) for _ in range(2)]
    await asyncio.sleep(0)
    sending = broadcaster.open(version, source.tensors, source.sizes)
    return sending, await asyncio.gather(*waiting)


def _reset_peak() -> int:
    """Resident bytes now, from where the peak counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
