"""LoRA adapters on a rollout server: merged into a full version off the event loop, before its engine hears of them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.weight_sync import Merger


class OwnedFetch(Protocol):
    """A `sidecar.Fetch` with an end; `fetch.Fetcher` is one."""

    async def __call__(self, manifest: Mapping[str, Any], /) -> Mapping[str, Any]: ...

    async def close(self) -> None: ...


class MergingFetch:
    """A `sidecar.Fetch` around another one. Nothing is imported, and no folder made, before the first adapter."""

    def __init__(self, fetch: OwnedFetch, folder: Path, model: str, dtype: str, threads: int) -> None:
        self._fetch, self._folder = fetch, folder
        self._model, self._dtype, self._threads = model, dtype, threads
        self._merger: Merger | None = None

    async def __call__(self, manifest: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Bounded by the deadlines of fetch and merger. Raises `WeightsUnreachable`, `WeightsRefused`."""
        here = await self._fetch(manifest)
        if "adapter" not in here:
            return here
        if self._merger is None:
            self._merger = await asyncio.to_thread(self._make)
        return await asyncio.to_thread(self._merger.merge, here)

    def _make(self) -> Merger:
        """Raises `WeightsRefused` where there is no model folder on this machine."""
        import torch

        from penstock.rollout_server.engines.checkpoint import find_model
        from penstock.rollout_server.protocol import EngineError
        from penstock.weight_sync import Merger, WeightsRefused

        torch.set_num_threads(self._threads)
        try:
            return Merger(find_model(self._model), self._folder, self._dtype)
        except EngineError as error:
            raise WeightsRefused(str(error)) from error

    async def close(self) -> None:
        """The last call: breaks off what is under way, and deletes the files."""
        if self._merger is not None:
            await asyncio.to_thread(self._merger.close)
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        await self._fetch.close()
