"""Weights that come over HTTP, brought to this machine off the event loop; engines see files only."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.rollout_server.weights import Downloader


class Fetcher:
    """A `Fetch` of one rollout server. Nothing is imported, and no folder made, before the first ``http`` manifest."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, self._token = folder, token
        self._downloader: Downloader | None = None

    async def __call__(self, manifest: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Bounded by the downloader's own deadline. Raises `WeightsUnreachable`, `WeightsRefused`."""
        if manifest.get("transport") != "http":
            return manifest
        if self._downloader is None:
            self._downloader = await asyncio.to_thread(self._make)
        return await asyncio.to_thread(self._downloader.localise, manifest)

    def _make(self) -> Downloader:
        from penstock.rollout_server.weights import Downloader

        return Downloader(self._folder, self._token)

    async def close(self) -> None:
        """The last call: breaks off what is under way, and deletes the files."""
        if self._downloader is not None:
            self._downloader.close()
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
