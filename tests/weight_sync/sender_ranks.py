"""The trainer's ranks as processes, so that one can be killed while it sends.

python -m tests.weight_sync.sender_ranks RANK WORLD STORE STOP_AT [SILENCE_S]

Rank 0 says the places of a server of two workers, then what `stream_version` finds or raises. A rank whose number is
`STOP_AT`'s first says "in the middle" before it sends for the time that is `STOP_AT`'s second, and sends no more;
where that is -1 it does not join its group.
With `SILENCE_S` rank 0 names each group whose members it waits for, and stops as a trainer does at the end of its
input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.weight_sync import Broadcaster, Shard, WeightSource, stream_version
from penstock.weight_sync.broadcast.group import BroadcastGroup
from penstock.weight_sync.broadcast.senders import OwnGroup
from penstock.weight_sync.broadcast.shards import Superseded

WAIT = timedelta(seconds=15)
TENSORS, VALUES = 32, 1 << 18
BUCKET_BYTES = 1 << 20
IN_THE_MIDDLE = "in the middle"


def values_of(tensor: int, rank: int) -> torch.Tensor:
    return torch.arange(VALUES, dtype=torch.int32) + 7 * tensor + 1000 * rank


def shards(rank: int, world: int) -> list[Shard]:
    each = (4 * VALUES,) * world
    names = range(TENSORS)
    return [Shard(f"t{n}", (world * VALUES,), torch.int32, each, values_of(n, rank)) for n in names]


async def _places(source: WeightSource, broadcaster: Broadcaster) -> tuple[Any, Any]:
    waiting = asyncio.create_task(broadcaster.park(2, "gloo/2"))
    await asyncio.sleep(0)
    return broadcaster.open(1, source.tensors, source.sizes), await waiting


def _stop_at(number: int) -> None:
    if number < 0:
        OwnGroup.join = lambda *_: None  # type: ignore[method-assign]
        return
    count = 0

    def send(group: OwnGroup, memory: Any, send: Any = OwnGroup.send) -> None:
        nonlocal count
        if count == number:
            _say(IN_THE_MIDDLE)
            time.sleep(600)
        count += 1
        send(group, memory)

    OwnGroup.send = send  # type: ignore[method-assign]


def _stop_at_end_of_input(broadcaster: Broadcaster, source: WeightSource) -> None:
    def meet(group: BroadcastGroup, broadcast: str, meet: Any = BroadcastGroup.meet) -> None:
        _say(group._member.group.rpartition("/")[2])
        meet(group, broadcast)

    def stop() -> None:
        sys.stdin.read()
        broadcaster.close()
        source.close()

    BroadcastGroup.meet = meet  # type: ignore[method-assign]
    threading.Thread(target=stop, daemon=True).start()


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    victim, _, number = sys.argv[4].partition(",")
    if rank == int(victim):
        _stop_at(int(number))
    torch.set_num_threads(1)
    patient = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=patient)
    source = WeightSource.open(rank, world, WAIT)
    source.take(1, shards(rank, world))
    if rank:
        _say("ready")
        sys.stdin.read()
        return
    silence_s = float(sys.argv[5]) if len(sys.argv) > 5 else 10.0
    broadcaster = Broadcaster(bucket_bytes=BUCKET_BYTES, silence_s=silence_s)
    sending, offer = asyncio.run(_places(source, broadcaster))
    _say(offer.as_dict())
    if len(sys.argv) > 5:
        _stop_at_end_of_input(broadcaster, source)
    try:
        found = stream_version(source, 1, Path("none"), write=False, bucket_bytes=BUCKET_BYTES, sending=sending)
        _say({"done": found.done, "xxh3": {tensor.name: tensor.xxh3 for tensor in found.tensors}})
    except (RuntimeError, Superseded) as error:
        _say({"error": str(error)})


if __name__ == "__main__":
    main()
