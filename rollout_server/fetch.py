"""Weights that come over the network, brought to this machine off the event loop; engines see files only."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.weight_sync import Downloader, PeerServer

SERVED = ("http", "collective")
"""Transports that bring files; under others they are where engines reach them."""


class Fetcher:
    """A `Fetch` of one rollout server. Nothing is imported, and no folder made, before the first manifest with URLs.

    What was fetched is handed on to other servers, on a free port of `host`.
    """

    def __init__(self, folder: Path, token: str, host: str = "127.0.0.1") -> None:
        self._folder, self._token, self._host = folder, token, host
        self._downloader: Downloader | None = None
        self._peers: PeerServer | None = None

    async def __call__(self, manifest: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Bounded by the downloader's own deadline. Raises `WeightsUnreachable`, `WeightsRefused`."""
        if manifest.get("transport") not in SERVED:
            return manifest
        if self._downloader is None:
            self._downloader = await asyncio.to_thread(self._make)
        return await asyncio.to_thread(self._downloader.localise, manifest)

    def _make(self) -> Downloader:
        from penstock.weight_sync import Downloader, PeerServer

        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._peers = PeerServer(self._folder, self._token, self._host)
        return Downloader(self._folder, self._token, serves=self._peers.start())

    async def close(self) -> None:
        """The last call: breaks off what is under way, and deletes the files."""
        if self._downloader is not None:
            self._downloader.close()
        if self._peers is not None:
            await asyncio.to_thread(self._peers.stop)
        if self._downloader is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
