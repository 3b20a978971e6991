"""A trainer that broadcasts this process's tensors to engines, each with the member that its sidecar would have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

TOKEN = "the-token-of-this-run"


class BroadcastingTrainer:
    """`published` has the manifests by version."""

    def __init__(
        self,
        folder: Path,
        token: str = TOKEN,
        full_every: int = 1,
        bucket_bytes: int = 10_000,
        silence_s: float = 10.0,
        from_gpus: bool = False,
    ) -> None:
        from penstock.weight_sync import WeightFiles, WeightSource

        self.files: Any = WeightFiles(folder, "broadcast", token=token, full_every=full_every, from_gpus=from_gpus)
        self.files.broadcaster.bucket_bytes = bucket_bytes
        self.files.broadcaster._silence_s = silence_s
        self.source = WeightSource()
        self.published: dict[int, Any] = {}

    async def take(self, version: int, tensors: Mapping[str, Any]) -> None:
        from penstock.weight_sync import Shard

        shards = [
            Shard(name, tuple(tensor.shape), tensor.dtype, (tensor.nbytes,), tensor) for name, tensor in tensors.items()
        ]
        await asyncio.to_thread(self.source.take, version, shards)

    async def publish(self, version: int, tensors: Mapping[str, Any], members: int, expected: int = 0) -> Any:
        """Once so many servers wait."""
        async with asyncio.timeout(60):
            while self.files.broadcaster.parked < members:
                await asyncio.sleep(0.01)
        await self.take(version, tensors)
        sending = self.files.begin_broadcast(version, self.source.tensors)
        assert sending.servers >= members
        manifest = await asyncio.to_thread(self.files.write_broadcast, version, self.source, sending, expected)
        self.published[version] = manifest
        return manifest

    @property
    def meeting(self) -> str:
        return f"{self.files._server.url}/broadcasts/none"

    def place_of_file(self, manifest: Any) -> Path:
        return Path(self.files.directory / manifest.files[-1].name)


@asynccontextmanager
async def broadcasting(folder: Path, **settings: Any) -> AsyncIterator[BroadcastingTrainer]:
    trainer = BroadcastingTrainer(folder, **settings)
    await trainer.files.open()
    try:
        yield trainer
    finally:
        await trainer.files.close()


class StagedServer:
    """A server without an engine: what it receives stays in this process."""

    weight_workers = 1
    weight_wires = ("gloo/1",)

    def __init__(self, folder: Path, staged: Any = None) -> None:
        """`staged`: a `StagedMemory`; None: a `StagedWeights`."""
        from penstock.weight_sync import BroadcastMember, Downloader, StagedFetch, StagedWeights, WeightReader

        self.staged: Any = staged or StagedWeights()
        self.reader = WeightReader()
        self.member = BroadcastMember(TOKEN)
        self.downloader = Downloader(folder, TOKEN, stall_s=20)
        self.fetch = StagedFetch(self.member, self)  # type: ignore[arg-type]
        self.by_file = 0
        """Versions that came as files."""

    async def __call__(self, manifest: Any, /) -> Any:
        self.by_file += 1
        return await asyncio.to_thread(self.downloader.localise, manifest)

    async def close(self) -> None:
        self.downloader.close()

    async def stage_weights(self, offer: Any) -> str:
        state: str = await asyncio.to_thread(self.staged.receive, offer)
        return state

    async def receive(self, manifest: Any) -> dict[str, Any]:
        """What this server holds after the version."""
        found = await self.fetch(manifest)
        read = self.staged.take if found.transport == "broadcast" else self.reader.read
        return dict(await asyncio.to_thread(read, found))
