"""Ranks of a trainer that publish deltas, as processes: delta_ranks FOLDER WORLD DIES RANK.

Versions 1 to 4 go to FOLDER/published, one of three whole. Rank 0 writes one line of JSON in the end: the bases and
files of what it wrote, the `error` that ended it, the bytes of its `share`, and its resident memory `before` it wrote
version 2 and at the `peak` meanwhile. DIES: at this of its answers for version 3 the last rank kills itself; 0: it does
not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.weight_sync import Shard, WeightFiles, WeightSource

TENSORS, VALUES = 6, 16 << 20
BUCKET_BYTES = 4 << 20


def version_of(version: int) -> dict[str, Any]:
    """[VALUES] bfloat16 each. A sixteenth of the values differs from version to version, in one tensor nearly all."""
    tensors = {}
    for number in range(TENSORS):
        values = (torch.arange(VALUES, dtype=torch.int32) + number).remainder_(251).to(torch.bfloat16)
        values[number :: 16 if number else 1] += version
        tensors[f"t{number}"] = values
    return tensors


def shards(version: int, rank: int, world: int) -> list[Shard]:
    """This rank's part, of which each tensor's ranges differ."""
    found = []
    for number, (name, tensor) in enumerate(version_of(version).items()):
        bounds = [0, *(VALUES * (i + 1) // world - 5 * number - 1 for i in range(world - 1)), VALUES]
        sizes = tuple(2 * (end - begin) for begin, end in itertools.pairwise(bounds))
        own = tensor[bounds[rank] : bounds[rank + 1]].clone()
        found.append(Shard(name, (VALUES,), torch.bfloat16, sizes, own))
    return found


def die_at(answer: int) -> None:
    seen = 0
    reply = WeightSource._answer

    def count_and_die(source: WeightSource, kind: int, version: int, begin: int, end: int) -> None:
        nonlocal seen
        seen += version == 3
        if seen == answer:
            os.kill(os.getpid(), signal.SIGKILL)
        reply(source, kind, version, begin, end)

    WeightSource._answer = count_and_die  # type: ignore[method-assign]


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main(folder: Path, world: int, dies: int, rank: int) -> None:
    import penstock.weight_sync.publisher as publisher

    torch.set_num_threads(1)
    publisher.BUCKET_BYTES = BUCKET_BYTES  # type: ignore[attr-defined]
    if dies and rank == world - 1:
        die_at(dies)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    silence = timedelta(seconds=60)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=silence)
    source = WeightSource.open(rank, world, silence, finds_changes=True)
    files = WeightFiles(folder / "published", "shm", full_every=3)
    said: dict[str, Any] = {"bases": [], "files": [], "error": ""}
    if rank == 0:
        asyncio.run(files.open())
    for version in range(1, 5):
        source.take(version, shards(version, rank, world))
        if rank == 0:
            if version == 2:
                Path("/proc/self/clear_refs").write_text("5")
                said["before"] = resident("VmRSS")
            try:
                manifest = files.write_from_ranks(version, source)
            except RuntimeError as error:
                said["error"] = str(error)
                break
            said["bases"].append(manifest.base_version)
            said["files"].append(manifest.place)
            if version == 2:
                said["peak"] = resident("VmHWM")
        dist.barrier()
    said["share"] = len(source._bytes)
    if rank == 0:
        print(json.dumps(said), flush=True)
    if said["error"]:
        os._exit(0)  # without its peer the group cannot be left in order
    source.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
