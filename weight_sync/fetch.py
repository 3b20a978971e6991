"""A server's side before the engine: announced files brought to this machine, adapters merged. Engines see paths only.

manifest ── Fetcher ──► files on this machine ── MergingFetcher ──► a full version, if it was an adapter
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.common import NotPrivate, private_folder
from penstock.weight_sync.manifest import SERVED, Manifest, WeightsUnreachable

if TYPE_CHECKING:
    from penstock.weight_sync.broadcast.member import BroadcastMember
    from penstock.weight_sync.http.client import Downloader
    from penstock.weight_sync.http.server import PeerServer
    from penstock.weight_sync.lora.merger import Merger


class Fetch(Protocol):
    """Returns the manifest with paths on this machine.

    Raises `WeightsUnreachable` (tried again) or `WeightsRefused` (not tried again).
    """

    async def __call__(self, manifest: Manifest, /) -> Manifest: ...


class ClosableFetch(Fetch, Protocol):
    async def close(self) -> None:
        """The last call: cancels a fetch in progress and deletes the files."""


async def no_fetch(manifest: Manifest, /) -> Manifest:
    """Fetch nothing, for files that engines reach already."""
    return manifest


class Fetcher:
    """Downloads what the trainer serves, in a thread. Imports torch and creates the folder at the first such manifest.

    Serves the downloaded files to other servers on a free port of `host`.
    """

    def __init__(self, folder: Path, token: str, host: str = "127.0.0.1") -> None:
        self._folder, self._token, self._host = folder, token, host
        self._downloader: Downloader | None = None
        self._peers: PeerServer | None = None

    async def __call__(self, manifest: Manifest, /) -> Manifest:
        """Bounded by the downloader's own deadline. Raises `WeightsUnreachable`, `WeightsRefused`."""
        if manifest.transport not in SERVED:
            # A run that was killed leaves its weights announced, without files. Its trainer writes them again when it
            # has started, perhaps long after a server has, under an equal announcement: refused, they would not be
            # tried again.
            own = Path(manifest.files[-1].place)
            if not await asyncio.to_thread(own.exists):
                raise WeightsUnreachable(f"{own} is not there yet")
            return manifest
        if self._downloader is None:
            self._downloader = await asyncio.to_thread(self._make)
        return await asyncio.to_thread(self._downloader.localise, manifest)

    def _make(self) -> Downloader:
        from penstock.weight_sync.http.client import Downloader
        from penstock.weight_sync.http.server import PeerServer

        try:
            private_folder(self._folder)
        except NotPrivate as error:
            raise WeightsUnreachable(str(error.strerror)) from error
        self._peers = PeerServer(self._folder, self._token, self._host)
        return Downloader(self._folder, self._token, serves=self._peers.start())

    async def close(self) -> None:
        """See `ClosableFetch`."""
        if self._downloader is not None:
            self._downloader.close()
        if self._peers is not None:
            await asyncio.to_thread(self._peers.stop)
        if self._downloader is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


class StagedFetch:
    """See `Fetch`: what the workers hold needs no fetch."""

    def __init__(self, member: BroadcastMember, fetch: ClosableFetch) -> None:
        self._member, self._fetch = member, fetch

    async def __call__(self, manifest: Manifest, /) -> Manifest:
        if manifest.broadcast and await self._member.holds(manifest):
            return manifest
        return await self._fetch(manifest)

    async def close(self) -> None:
        await self._fetch.close()


class MergingFetcher:
    """Merges adapters, in a thread, into full versions of `dtype`. Imports torch at the first adapter.

    `find_model` returns the folder of version 0 or raises `WeightsRefused`. `threads`: torch's, for the whole process.
    """

    def __init__(
        self, fetch: ClosableFetch, folder: Path, find_model: Callable[[], Path], dtype: str, threads: int
    ) -> None:
        self._fetch, self._folder, self._find_model = fetch, folder, find_model
        self._dtype, self._threads = dtype, threads
        self._merger: Merger | None = None

    async def __call__(self, manifest: Manifest, /) -> Manifest:
        """Bounded by the deadlines of fetch and merger. Raises `WeightsUnreachable`, `WeightsRefused`."""
        local = await self._fetch(manifest)
        if local.adapter is None:
            return local
        if self._merger is None:
            self._merger = await asyncio.to_thread(self._make)
        return await asyncio.to_thread(self._merger.merge, local)

    def _make(self) -> Merger:
        import torch

        from penstock.weight_sync.lora.merger import Merger

        model = self._find_model()
        torch.set_num_threads(self._threads)
        return Merger(model, self._folder, self._dtype)

    async def close(self) -> None:
        """See `ClosableFetch`."""
        if self._merger is not None:
            await asyncio.to_thread(self._merger.close)
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        await self._fetch.close()
