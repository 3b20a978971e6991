"""Published versions of small weights, whatever they travel by."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import tiny_model  # noqa: F401 (a fixture)

TOKEN = "the-token-of-this-run"
OpenRoute = Callable[..., Awaitable[Any]]


class Route:
    """A publisher and any number of servers that read what it publishes, over one transport."""

    def __init__(self, folder: Path, transport: str, full_every: int, server: Any = None, rounds: Any = None) -> None:
        from penstock.weight_sync import WeightPublisher

        self.folder, self.transport = folder, transport
        self.published = folder / "published"
        self.publisher = WeightPublisher(
            self.published, transport, keep=4, full_every=full_every,  # type: ignore[arg-type]
            base_url=server and server.url,
        )  # fmt: skip
        self.server, self.rounds = server, rounds
        self.downloaders: dict[str, Any] = {}
        self.readers: dict[str, Any] = {}

    def publish(self, version: int, tensors: dict[str, Any], expected: int = 1) -> Any:
        """Under ``collective`` from the event loop, and with a round."""
        manifest = self.publisher.write(version, tensors.items())
        if self.rounds and (name := self.rounds.offer(self.file(manifest), expected)):
            manifest = replace(manifest, broadcast=f"{self.server.url}/rounds/{name}")
        return manifest

    def receive(self, manifest: Any, server: str = "s0") -> dict[str, Any]:
        """What that server holds after this version. Blocks; the trainer's server runs in the event loop."""
        from penstock.weight_sync import Downloader, WeightReader

        if server not in self.readers:
            self.downloaders[server] = Downloader(self.folder / server, TOKEN, stall_s=20)
            self.readers[server] = WeightReader()
        received: dict[str, Any] = self.readers[server].read(self.downloaders[server].localise(manifest))
        return received

    def file(self, manifest: Any) -> Path:
        """The version's own, at the publisher."""
        return self.published / manifest.files[-1].name


@pytest.fixture
async def open_route(tmp_path: Path) -> AsyncIterator[OpenRoute]:
    """`await open_route("http", full_every=4)`; closed at the end."""
    pytest.importorskip("torch")
    from penstock.weight_sync import Broadcaster, FileServer

    async with AsyncExitStack() as stack:

        async def open_one(transport: str, full_every: int = 1) -> Route:
            if transport in ("shm", "disk"):
                return Route(tmp_path, transport, full_every)
            rounds = Broadcaster(bucket_bytes=10_000) if transport == "collective" else None
            server = FileServer(tmp_path / "published", TOKEN, broadcaster=rounds, share_from_bytes=0)
            await server.start()
            stack.push_async_callback(server.stop)
            return Route(tmp_path, transport, full_every, server, rounds)

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


def reorder_header(path: Path) -> None:
    """Two fields of the first tensor in a published file change places: other bytes, the same meaning."""
    before = path.read_bytes()
    after = re.sub(rb'("dtype":"\w+"),("shape":\[[\d,]*\])', rb"\2,\1", before, count=1)
    assert after != before
    path.write_bytes(after)


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
