"""Published versions of small weights, whatever they travel by."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

TOKEN = "the-token-of-this-run"
OpenRoute = Callable[..., Awaitable[Any]]


class Route:
    """A publisher and any number of servers that read what it publishes, over one transport."""

    def __init__(self, folder: Path, transport: str, full_every: int, url: str | None) -> None:
        from penstock.rollout_server.weights import WeightPublisher

        self.folder, self.transport = folder, transport
        self.published = folder / "published"
        self.publisher = WeightPublisher(
            self.published, transport, keep=4, full_every=full_every, base_url=url  # type: ignore[arg-type]
        )  # fmt: skip
        self._servers: dict[str, tuple[Any, Any]] = {}

    def publish(self, version: int, tensors: dict[str, Any]) -> dict[str, Any]:
        return self.publisher.write(version, tensors.items())

    def receive(self, manifest: dict[str, Any], server: str = "s0") -> dict[str, Any]:
        """What that server holds after this version. Blocks; an ``http`` server runs in the event loop."""
        from penstock.rollout_server.weights import Downloader, WeightReader

        if server not in self._servers:
            self._servers[server] = (Downloader(self.folder / server, TOKEN, deadline_s=20), WeightReader())
        downloader, reader = self._servers[server]
        received: dict[str, Any] = reader.read(downloader.localise(manifest))
        return received

    def file(self, manifest: dict[str, Any]) -> Path:
        """The version's own, at the publisher."""
        return self.published / str(manifest.get("path") or manifest["url"]).rpartition("/")[2]


@pytest.fixture
async def open_route(tmp_path: Path) -> AsyncIterator[OpenRoute]:
    """`await open_route("http", full_every=4)`; closed at the end."""
    pytest.importorskip("torch")
    from penstock.rollout_server.weights import FileServer

    async with AsyncExitStack() as stack:

        async def open_one(transport: str, full_every: int = 1) -> Route:
            if transport != "http":
                return Route(tmp_path, transport, full_every, None)
            server = FileServer(tmp_path / "published", TOKEN)
            await server.start()
            stack.push_async_callback(server.stop)
            return Route(tmp_path, transport, full_every, server.url)

        yield open_one


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
