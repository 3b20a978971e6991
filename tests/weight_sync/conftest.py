"""Published versions of small weights, whatever they travel by."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import TOKEN, BroadcastingTrainer, StagedServer, broadcasting
from tests.rollout_server.conftest import tiny_model  # noqa: F401 (a fixture)

from penstock.common import cancel_and_wait

OpenRoute = Callable[..., Awaitable[Any]]


@pytest.fixture(autouse=True)
def own_records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of verified versions are of one test: those of the machine know the same weights from other tests."""
    folder = tmp_path_factory.mktemp("records")
    monkeypatch.setattr("penstock.weight_sync.files.reader.SHARED_MEMORY", folder)
    return folder


def open_files(*folders: Path) -> list[str]:
    """Files below `folders`, and versions in memory, that this process has open: threads of other tests open others."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(descriptor.readlink()))
    return sorted(one for one in links if one.startswith(("/memfd:weights-", *map(str, folders))))


class Route:
    """A publisher and any number of servers that read what it publishes, over one transport."""

    def __init__(self, folder: Path, transport: str, full_every: int, server: Any = None) -> None:
        from penstock.weight_sync import WeightPublisher

        self.folder, self.transport = folder, transport
        self.published = folder / "published"
        self.publisher = WeightPublisher(
            self.published, transport, keep=4, full_every=full_every,  # type: ignore[arg-type]
            base_url=server and server.url,
        )  # fmt: skip
        self.server = server
        self.downloaders: dict[str, Any] = {}
        self.readers: dict[str, Any] = {}

    def publish(self, version: int, tensors: dict[str, Any]) -> Any:
        return self.publisher.write(version, tensors.items())

    async def announce(self, version: int, tensors: dict[str, Any]) -> Any:
        """As `publish`, under any transport."""
        return self.publish(version, tensors)

    async def holds(self, manifest: Any, server: str = "s0") -> dict[str, Any]:
        """What that server holds after this version."""
        return await asyncio.to_thread(self.receive, manifest, server)

    def receive(self, manifest: Any, server: str = "s0") -> dict[str, Any]:
        """As `holds`; blocks. The trainer's server runs in the event loop."""
        from penstock.weight_sync import Downloader, WeightReader

        if server not in self.readers:
            self.downloaders[server] = Downloader(self.folder / server, TOKEN, stall_s=20)
            self.readers[server] = WeightReader()
        received: dict[str, Any] = self.readers[server].read(self.downloaders[server].localise(manifest))
        return received

    async def leave(self, server: str) -> None:
        """It takes files already."""

    def file(self, manifest: Any) -> Path:
        """The version's own, at the publisher."""
        return self.published / manifest.files[-1].name


class BroadcastRoute:
    """The same over broadcasts: a server is a member from its first version on, which it takes as a file."""

    transport = "broadcast"

    def __init__(self, folder: Path, trainer: BroadcastingTrainer) -> None:
        self.folder, self.trainer = folder, trainer
        self.members: dict[str, tuple[StagedServer, asyncio.Task[None]]] = {}

    async def announce(self, version: int, tensors: dict[str, Any]) -> Any:
        return await self.trainer.publish(version, tensors, members=len(self.members))

    async def holds(self, manifest: Any, server: str = "s0") -> dict[str, Any]:
        if server not in self.members:
            staged = StagedServer(self.folder / server)
            running = asyncio.create_task(staged.member.run(staged, lambda: self.trainer.meeting))
            self.members[server] = staged, running
        return await self.members[server][0].receive(manifest)

    def file(self, manifest: Any) -> Path:
        """The version's own, at the publisher; written now where no server has asked for it."""
        path = self.trainer.place_of_file(manifest)
        if not path.exists():
            assert self.trainer.files._write_on_demand(path.name)
            self.trainer.files._writing.join(200)
        return path

    async def leave(self, server: str) -> None:
        """It takes files until it comes back."""
        await cancel_and_wait([self.members.pop(server)[1]])
        while self.trainer.files.broadcaster.parked > len(self.members):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await cancel_and_wait([running for _, running in self.members.values()])


@pytest.fixture
async def open_route(tmp_path: Path) -> AsyncIterator[OpenRoute]:
    """`await open_route("http", full_every=4)`; closed at the end."""
    pytest.importorskip("torch")
    from penstock.weight_sync import FileServer

    async with AsyncExitStack() as stack:

        async def open_one(transport: str, full_every: int = 1) -> Route | BroadcastRoute:
            if transport in ("shm", "disk"):
                return Route(tmp_path, transport, full_every)
            if transport == "broadcast":
                trainer = await stack.enter_async_context(broadcasting(tmp_path / "published", full_every=full_every))
                broadcast = BroadcastRoute(tmp_path, trainer)
                stack.push_async_callback(broadcast.close)
                return broadcast
            server = FileServer(tmp_path / "published", TOKEN, share_from_bytes=0)
            await server.start()
            stack.push_async_callback(server.stop)
            return Route(tmp_path, transport, full_every, server)

        yield open_one


def altered(manifest: Any, change: Callable[[dict[str, Any]], object]) -> Any:
    """The manifest after `change` of its plain form."""
    from penstock.weight_sync import Manifest

    plain = manifest.as_dict()
    change(plain)
    return Manifest.parse(plain)


def other_checksum(plain: dict[str, Any]) -> None:
    """Of the first tensor."""
    plain["tensors"][0]["xxh3"] = "0" * 16


def reordered(raw: bytes) -> bytes:
    """A published file in which two fields of the first tensor change places: other bytes, the same meaning."""
    after = re.sub(rb'("dtype":"\w+"),("shape":\[[\d,]*\])', rb"\2,\1", raw, count=1)
    assert after != raw
    return after


def reorder_header(path: Path) -> None:
    path.write_bytes(reordered(path.read_bytes()))


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def file_of(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def small_tensors(seed: int = 0) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(200, 300, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(20, 30, generator=generator).t(),
        "scalar": torch.tensor(2.5),
        "flags": torch.rand(33, generator=generator) > 0.5,
        "last": torch.arange(100),
    }


def next_version(before: dict[str, Any], version: int) -> dict[str, Any]:
    """Some values of two tensors are others."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["embed"].view(-1)[version::1009] += 1
    after["last"][version] += version
    return after
