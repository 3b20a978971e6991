"""Where published weights leave the trainer: their folder, its file server and its broadcasts. Rank 0 has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.weight_sync.broadcast import Broadcaster
from penstock.weight_sync.file_format import NamedTensors
from penstock.weight_sync.manifest import SERVED, ChainFile, Manifest, Transport, WeightsRefused
from penstock.weight_sync.publisher import WeightPublisher

if TYPE_CHECKING:
    from penstock.weight_sync.http_server import FileServer


class WeightFiles:
    """`open` first, `close` last. The files outlive it: a trainer that restarts continues with them."""

    def __init__(
        self,
        directory: Path,
        transport: Transport,
        *,
        token: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        full_every: int = 1,
        model: Path | None = None,
    ) -> None:
        """`token`, `host` and `port` are for transports that serve files; `model`, version 0, is for adapters."""
        self.directory = directory
        self._transport: Transport = transport
        self._full_every, self._model = full_every, model
        self._broadcaster = Broadcaster(host) if transport == "collective" else None
        served = transport in SERVED
        self._server: FileServer | None = None
        if served:
            from penstock.weight_sync.http_server import FileServer  # and with it a web framework

            self._server = FileServer(directory, token, host, port, broadcaster=self._broadcaster)
        self._publisher: WeightPublisher | None = None

    async def open(self, epoch: int = 0) -> None:
        """`epoch`: the trainer's, see `WeightPublisher`. Raises `OSError` where the address to serve on is taken."""
        if self._server is not None:
            await self._server.start()
        self._publisher = WeightPublisher(
            self.directory,
            self._transport,
            full_every=self._full_every,
            base_url=self._server.url if self._server else None,
            model=self._model,
            epoch=epoch,
        )

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def write(self, version: int, weights: NamedTensors) -> Manifest:
        """Write `version`. Blocks meanwhile. Raises `NoSpace`."""
        assert self._publisher is not None, "open comes first"
        return self._publisher.write(version, weights)

    def write_adapter(self, version: int, tensors: NamedTensors, settings: Mapping[str, Any]) -> Manifest:
        """Write `version`, a LoRA adapter of the model. Raises `NoSpace`, `BadAdapter`, `WeightsRefused`."""
        assert self._publisher is not None, "open comes first"
        return self._publisher.write_adapter(version, tensors, settings)

    @property
    def broadcasts(self) -> bool:
        return self._broadcaster is not None

    def with_broadcast(self, manifest: Manifest, expected: int) -> Manifest:
        """The manifest to announce: under ``collective`` with a broadcast to the servers that are expected to be ready.

        Call it from the event loop, right before the announcement. Without a broadcast where no server is expected and
        while the version before is still being broadcast: servers download the file then.
        """
        if self._broadcaster is None or self._server is None or not expected:
            return manifest
        name = self._broadcaster.offer(self._file(manifest.files[-1]), expected)
        return replace(manifest, broadcast=f"{self._server.url}/rounds/{name}") if name else manifest

    def offers(self, announced: Mapping[str, Any]) -> bool:
        """Whether a server that joins late could load the announced version: its files are there, where it says."""
        manifest = _parsed(announced)
        return manifest is not None and self._offers(manifest)

    def moved(self, announced: Mapping[str, Any]) -> Manifest | None:
        """The announced manifest with this process's addresses. None if they are right or its files are not here."""
        manifest = _parsed(announced)
        if self._server is None or manifest is None or manifest.transport not in SERVED or self._offers(manifest):
            return None
        if not all(self._file(file).is_file() for file in manifest.files):
            return None
        files = tuple(replace(file, place=self._place(file)) for file in manifest.files)
        return replace(manifest, transport=self._transport, files=files, broadcast="")

    def _offers(self, manifest: Manifest) -> bool:
        return all(self._file(file).is_file() and file.place == self._place(file) for file in manifest.files)

    def _file(self, file: ChainFile) -> Path:
        return self.directory / file.name

    def _place(self, file: ChainFile) -> str:
        return f"{self._server.url}/{file.name}" if self._server else str(self._file(file))


def _parsed(announced: Mapping[str, Any]) -> Manifest | None:
    """None for manifests of another release: nothing that this trainer could offer."""
    try:
        return Manifest.parse(announced)
    except WeightsRefused:
        return None
