"""Where the processes of a measurement leave each other words."""

from __future__ import annotations

import torch.distributed as dist


def open_board(role: int, roles: int, files: dist.Store) -> dist.Store:
    """Not `files`, by which they meet: its readers look every 10 ms only."""
    if role == 0:
        board = dist.TCPStore("127.0.0.1", 0, roles, is_master=True, wait_for_workers=False)
        files.set("port", str(board.port))
        return board
    return dist.TCPStore("127.0.0.1", int(files.get("port")), roles)
