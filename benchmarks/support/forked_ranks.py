"""Ranks of a program that has imported everything it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.trainer import RANKS_FILE_VARIABLE, Ranks

TIMEOUT_S = 300.0


@contextmanager
def forked_ranks(count: int, folder: Path) -> Iterator[Ranks]:
    """Fork `count` ranks of one torch thread, which meet in `folder`; each of them enters the block. This process
    leaves with the number of those that failed."""
    torch.set_num_threads(1)
    os.environ |= {RANKS_FILE_VARIABLE: str(folder / "meeting"), "WORLD_SIZE": str(count)}
    children = []
    for rank in range(count):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            break
        children.append(pid)
    else:
        failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
        raise SystemExit(len(failed))
    ranks = Ranks.open(TIMEOUT_S)
    try:
        yield ranks
    finally:
        ranks.close()
