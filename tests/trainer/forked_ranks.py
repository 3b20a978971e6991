"""Forked ranks, each of which may end in its own way. They are forked once everything is imported: importing takes
longer than most of what they do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tests.ports import free_port


def fork_ranks(world: int, log: Path, work: Callable[[], None]) -> dict[int, int]:
    """Process number → rank. Each has the environment that torchrun gives, writes what it says into `log`, and ends
    with 1 where `work` raised."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    ranks = {}
    for rank in range(world):
        pid = os.fork()
        if pid:
            ranks[pid] = rank
            continue
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = 1
        try:
            work()
            code = 0
        except Exception as error:  # noqa: BLE001 - told by the log and the exit code
            print(f"rank {rank} raised {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return ranks
