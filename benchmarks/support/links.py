"""The bytes that each link of a broadcast carries: four trainer ranks, two servers of two workers, each a process.

    received   by a worker over all of its TCP connections, over the bytes of the model
    sent       by a trainer rank, over the mean of the ranks

The kernel counts, per connection. They are read once all bytes have arrived, before a member leaves its groups.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.board import open_board, run_roles
from penstock.weight_sync import Broadcaster, JoinedBroadcast, Members, Membership, Offer, RankWire, Shard, WeightSource

SENDERS, SERVERS, WORKERS = 4, 2, 4
ROLES = SENDERS + WORKERS
TENSORS = 16
WAIT = timedelta(seconds=300)
HERE = {"trainer": "127.0.0.1", "here": "127.0.0.1"}
_TCP_INFO_BYTES, _BYTES_AT = 232, 120
"""Size of ``struct tcp_info``, and the offset of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in it."""


def measure_links(size_mb: int) -> dict[str, float]:
    """Return ``bytes_over_model``, of the worker that received most, and ``sender_share_max_over_mean``."""
    links: list[tuple[int, int]] = run_roles(_play, ROLES, size_mb)
    sent = [sent for sent, _ in links[:SENDERS]]
    return {
        "bytes_over_model": round(max(received for _, received in links[SENDERS:]) / (size_mb << 20), 3),
        "sender_share_max_over_mean": round(max(sent) / (sum(sent) / SENDERS), 3),
    }


def _play(role: int, store: str, found: str, size_mb: int) -> None:
    torch.set_num_threads(1)
    files = dist.FileStore(store, ROLES)
    board = open_board(role, ROLES, files)
    place = _Place(role, board, size_mb << 20)
    if role < SENDERS:
        place.send()
    else:
        place.receive()
    if role == 0:
        links = [json.loads(board.get(f"links {one}")) for one in range(ROLES)]
        Path(found).write_text(json.dumps(links))
    place.meet("end")
    if role:
        files.set(f"left {role}", "1")
    else:  # the board ends with this process, and another may still wait for its answer
        files.wait([f"left {one}" for one in range(1, ROLES)], WAIT)


class _Place:
    """One process's part."""

    def __init__(self, role: int, board: dist.Store, nbytes: int) -> None:
        self._role, self._board, self._nbytes = role, board, nbytes
        self._before: dict[str, tuple[int, int]] = {}

    def meet(self, name: str) -> None:
        if self._board.add(name, 1) == ROLES:
            self._board.set(f"all at {name}", "1")
        self._board.wait([f"all at {name}"], WAIT)

    def send(self) -> None:
        trainers = dist.PrefixStore("trainers", self._board)
        dist.init_process_group("gloo", store=trainers, rank=self._role, world_size=SENDERS, timeout=WAIT)
        wire = RankWire(self._role, SENDERS, None)
        source = WeightSource(self._role, SENDERS, wire)
        source.take(1, self._shards())
        wire.start(source.answer_until_stopped)
        self._begin()
        if self._role == 0:
            self._stream(source)
        else:
            self._count()
        source.close()
        dist.destroy_process_group()

    def _stream(self, source: WeightSource) -> None:
        broadcaster = Broadcaster()
        sending, offers = asyncio.run(_places(broadcaster, source))
        for server, offer in enumerate(offers):
            self._board.set(f"offer {server}", json.dumps(offer.as_dict()))
        with closing(Members(sending, source.wire)) as members:
            members.meet(None)
            for _ in source.buckets(1, broadcaster.bucket_bytes, members):
                pass
            self._count()

    def receive(self) -> None:
        self._begin()
        server, worker = divmod(self._role - SENDERS, WORKERS // SERVERS)
        offer = Offer.parse(json.loads(self._board.get(f"offer {server}")))
        came = 0
        with closing(JoinedBroadcast(replace(offer, **HERE), Membership(), worker)) as joined:
            for piece in joined.buckets():
                came += len(piece)
                if came == self._nbytes:
                    self._count()

    def _shards(self) -> list[Shard]:
        values = self._nbytes // TENSORS // 2
        each, local = (2 * values // SENDERS,) * SENDERS, torch.randn(values // SENDERS)
        return [Shard(f"layer.{n}", (values,), torch.bfloat16, each, local) for n in range(TENSORS)]

    def _begin(self) -> None:
        self.meet("begin")
        self._before = _carried()

    def _count(self) -> None:
        self.meet("arrived")
        none = (0, 0)
        links = [
            [now - then for now, then in zip(carried, self._before.get(link, none), strict=True)]
            for link, carried in _carried().items()
        ]
        self._board.set(f"links {self._role}", json.dumps([sum(column) for column in zip(*links, strict=True)]))
        self.meet("counted")


async def _places(broadcaster: Broadcaster, source: WeightSource) -> Any:
    waiting = [asyncio.create_task(broadcaster.park(WORKERS // SERVERS, "gloo/2")) for _ in range(SERVERS)]
    await asyncio.sleep(0)
    return broadcaster.open(1, source.tensors, source.sizes), await asyncio.gather(*waiting)


def _carried() -> dict[str, tuple[int, int]]:
    """Return the bytes sent and received by each TCP connection of this process."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or no TCP connection
            name = os.readlink(link)
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                found[name] = struct.unpack_from("QQ", info, _BYTES_AT)
    return found
