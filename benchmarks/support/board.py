"""Processes of a measurement that meet each other, and a store for their messages."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def run_roles(play: Callable[..., None], roles: int, *arguments: Any) -> Any:
    """Run ``play(role, store, output, *arguments)`` in a process per role, and return the JSON of the file `output`.

    `store`: the file of a `dist.FileStore` by which they meet. Raises `RuntimeError` if a process fails.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        store, output = Path(folder) / "store", Path(folder) / "output.json"
        processes = [
            context.Process(target=play, args=(role, str(store), str(output), *arguments)) for role in range(roles)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"processes ended with {[process.exitcode for process in processes]}")
        return json.loads(output.read_text())


def open_board(role: int, roles: int, files: dist.Store) -> dist.Store:
    """Return a TCP store of all roles, which meet by `files`: readers of files look every 10 ms only."""
    if role == 0:
        board = dist.TCPStore("127.0.0.1", 0, roles, is_master=True, wait_for_workers=False)
        files.set("port", str(board.port))
        return board
    return dist.TCPStore("127.0.0.1", int(files.get("port")), roles)
