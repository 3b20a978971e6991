"""A trainer that broadcasts this process's tensors to engines, each with the member that its sidecar would have."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
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
        silence_s: float = 20.0,
        from_gpus: bool = False,
    ) -> None:
        from penstock.weight_sync import WeightFiles, WeightSource

        self.files: Any = WeightFiles(folder, "broadcast", token=token, full_every=full_every, from_gpus=from_gpus)
        self.files.broadcaster.bucket_bytes = bucket_bytes
        self.files.broadcaster._silence_s = silence_s
        self.source = WeightSource()
        self.published: dict[int, Any] = {}

    async def take(self, version: int, tensors: Mapping[str, Any]) -> None:
        await asyncio.to_thread(self.source.take, version, _shards_of(tensors))

    async def publish(self, version: int, tensors: Mapping[str, Any], members: int, expected: int = 0) -> Any:
        """Once so many servers wait."""
        return await self.publish_shards(version, _shards_of(tensors), members, expected)

    async def publish_shards(self, version: int, shards: Iterable[Any], members: int, expected: int = 0) -> Any:
        """The same of a trainer's engine: what `local_shards` gives."""
        await asyncio.to_thread(self.source.take, version, shards)
        async with asyncio.timeout(200):
            while self.files.broadcaster.parked < members:
                await asyncio.sleep(0.01)
        # Nothing is awaited from here on: one that waits now may ask again a moment later.
        sending = self.files.begin_broadcast(version, self.source.tensors, self.source.sizes)
        assert sending.servers >= members
        manifest = await asyncio.to_thread(self.files.write_broadcast, version, self.source, sending, expected)
        self.published[version] = manifest
        return manifest

    @property
    def meeting(self) -> str:
        return f"{self.files._server.url}/broadcasts/none"

    def place_of_file(self, manifest: Any) -> Path:
        return Path(self.files.directory / manifest.files[-1].name)


def _shards_of(tensors: Mapping[str, Any]) -> list[Any]:
    """All of every tensor as one rank has it."""
    from penstock.weight_sync import Shard

    return [Shard(name, tuple(one.shape), one.dtype, (one.nbytes,), one) for name, one in tensors.items()]


@asynccontextmanager
async def broadcasting(folder: Path, **settings: Any) -> AsyncIterator[BroadcastingTrainer]:
    trainer = BroadcastingTrainer(folder, **settings)
    await trainer.files.open()
    try:
        yield trainer
    finally:
        await trainer.files.close()


def give_up_soon(membership: Any) -> None:
    """Its groups, which stand, wait for a member that cannot come for a moment only."""
    for group in membership.groups.values():
        group._member = replace(group._member, silence_s=0.5)


class HeldTrainer:
    """`trainer`, whose next broadcast stops before a bucket until `go_on` is set."""

    def __init__(self, trainer: BroadcastingTrainer, bucket: int, *, dies: bool = False) -> None:
        self.in_the_middle, self.go_on = threading.Event(), threading.Event()
        self._buckets, self._bucket, self._dies = trainer.source.buckets, bucket, dies
        trainer.source.buckets = self._held  # type: ignore[method-assign]
        self._trainer = trainer

    def _held(self, version: int, bucket_bytes: int, members: Any = None) -> Iterator[Any]:
        self._trainer.source.buckets = self._buckets  # type: ignore[method-assign]
        buckets = self._buckets(version, bucket_bytes, members)
        for number in itertools.count():
            if number == self._bucket:
                self.in_the_middle.set()
                self.go_on.wait(60)
                if self._dies:
                    raise RuntimeError("the trainer is gone")
            if (bucket := next(buckets, None)) is None:
                return
            yield bucket

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.in_the_middle.wait, 60)


class StagedServer:
    """A server without an engine: what it receives stays in this process."""

    weight_workers = 1
    weight_wires = ("gloo/2",)

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


def receive_in_place(offer: Any, membership: Any, held: dict[str, Any], pause: Callable[[], None]) -> str:
    """As an engine's worker does: `held` [bytes] by tensor is overwritten as the stream comes. Blocks."""
    import torch

    from penstock.weight_sync import JoinedBroadcast, state_of, tensor_parts

    with closing(JoinedBroadcast(offer, membership)) as joined:
        pause()
        for part in tensor_parts(offer.tensors, joined.buckets()):
            part.write(held.setdefault(part.tensor.name, torch.zeros(part.tensor.nbytes, dtype=torch.uint8)))
    return state_of(joined.entries)


class InPlaceServer(StagedServer):
    """The same with an engine that receives in place: `held` is overwritten while it `stands_still`."""

    def __init__(self, folder: Path) -> None:
        from penstock.weight_sync import BroadcastMember, Membership, StagedFetch

        super().__init__(folder)
        self.member = BroadcastMember(TOKEN, in_place=True)
        self.fetch = StagedFetch(self.member, self)  # type: ignore[arg-type]
        self.membership = Membership()
        self.held: dict[str, Any] = {}
        self.stands_still = False

    def pause(self) -> None:
        self.stands_still = True

    async def receive_weights(self, offer: Any) -> str:
        from penstock.weight_sync import WeightsUnreachable

        try:
            return await asyncio.to_thread(receive_in_place, offer, self.membership, self.held, self.pause)
        except WeightsUnreachable:
            self.stands_still = False
            raise

    def holds(self, tensors: Mapping[str, Any]) -> bool:
        """Exactly these bytes."""
        from penstock.weight_sync import checksum

        wanted = {name: checksum(tensor) for name, tensor in tensors.items()}
        return {name: checksum(held) for name, held in self.held.items()} == wanted
