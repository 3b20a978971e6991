"""What a server has fetched, for other servers: the trainer's file server, in a thread with a loop of its own.

The sidecar's loop hands tokens on; gigabytes for others must not stand in their way.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from penstock.weight_sync.download import LOCAL_NAME
from penstock.weight_sync.file_server import STOP_S, FileServer

START_S = 10.0


class PeerServer:
    """`start`, then `stop`; whole, verified files of `directory` only."""

    def __init__(self, directory: Path, token: str, host: str) -> None:
        self._directory, self._token, self._host = directory, token, host
        # Not uvloop, whatever the process runs: this one leaves the copying to the kernel.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights for peers", daemon=True)
        self._files: FileServer | None = None

    def start(self) -> str:
        """The URL that others find it under. Blocks. Raises `OSError` where the address cannot be had."""
        self._files = FileServer(self._directory, self._token, self._host, pattern=LOCAL_NAME)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._files.start(), self._loop).result(START_S)
        return self._files.url

    def stop(self) -> None:
        """Cuts off who is being sent something, after `STOP_S`. Blocks."""
        if self._files is not None:
            asyncio.run_coroutine_threadsafe(self._files.stop(), self._loop).result(STOP_S + START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()
