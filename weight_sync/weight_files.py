"""The way of published weights out of the trainer: their folder, its file server and its broadcasts. Rank 0 has one."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.weight_sync.broadcast.nccl import Nccl, NcclError
from penstock.weight_sync.broadcast.offer import GLOO, NCCL, StreamTensor
from penstock.weight_sync.broadcast.seats import Broadcaster, Sending
from penstock.weight_sync.broadcast.sender import stream_version
from penstock.weight_sync.broadcast.shards import Superseded
from penstock.weight_sync.broadcast.source import WeightSource
from penstock.weight_sync.files.file_format import NamedTensors
from penstock.weight_sync.manifest import SERVED, ChainFile, Manifest, Transport, WeightsRefused
from penstock.weight_sync.publisher import WeightPublisher

if TYPE_CHECKING:
    from penstock.weight_sync.http.server import FileServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnwrittenVersion:
    """A version that was broadcast, and that no server has asked for as a file yet."""

    version: int
    path: Path
    source: WeightSource


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
        from_gpus: bool = False,
    ) -> None:
        """`token`, `host` and `port` are for transports that serve files; `model`, version 0, is for adapters.

        `full_every`: of what is broadcast, the files of one in `full_every` versions are written at once, those of the
        others when a server asks for one; under other transports see `WeightPublisher`. `from_gpus`: broadcasts go from
        GPU to GPU if this process and the servers' workers have one.
        """
        self.directory = directory
        self._transport: Transport = transport
        self._full_every, self._model = full_every, model
        self.broadcaster = Broadcaster(host, wires=_wires(from_gpus)) if transport == "broadcast" else None
        self._streamed = 0
        """Versions so far that were broadcast."""
        self._unwritten: _UnwrittenVersion | None = None
        self._writing: threading.Thread | None = None
        self._server: FileServer | None = None
        if transport in SERVED:
            from penstock.weight_sync.http.server import FileServer  # and with it a web framework

            self._server = FileServer(
                directory, token, host, port, broadcaster=self.broadcaster, will_be_there=self._write_on_demand
            )
        self._publisher: WeightPublisher | None = None

    async def open(self, epoch: int = 0) -> None:
        """`epoch`: the trainer's, see `WeightPublisher`. Raises `OSError` where the address to serve on is taken."""
        if self._server is not None:
            await self._server.start()
        self._publisher = WeightPublisher(
            self.directory,
            self._transport,
            full_every=1 if self.broadcaster else self._full_every,
            base_url=self._server.url if self._server else None,
            model=self._model,
            epoch=epoch,
        )

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()
        if self.broadcaster is not None:
            await asyncio.to_thread(self.broadcaster.membership.leave)

    def write(self, version: int, weights: NamedTensors) -> Manifest:
        """Write `version`. Blocks meanwhile. Raises `NoSpace`."""
        assert self._publisher is not None, "open comes first"
        return self._publisher.write(version, weights)

    def write_from_ranks(self, version: int, source: WeightSource) -> Manifest:
        """Write `version` from the copies of the trainer's ranks, bucket by bucket. Blocks meanwhile.

        Raises `NoSpace`, `Superseded`, and `RuntimeError` where a rank of the trainer is gone.
        """
        assert self._publisher is not None, "open comes first"
        return self._publisher.write_from(version, source)

    def write_adapter(self, version: int, tensors: NamedTensors, settings: Mapping[str, Any]) -> Manifest:
        """Write `version`, a LoRA adapter of the model. Raises `NoSpace`, `BadAdapter`, `WeightsRefused`."""
        assert self._publisher is not None, "open comes first"
        return replace(self._publisher.write_adapter(version, tensors, settings), broadcast=self._meeting("adapter"))

    # broadcasts ------------------------------------------------------------------------------------------------------
    def begin_broadcast(
        self,
        version: int,
        tensors: Sequence[StreamTensor],
        sizes: Sequence[tuple[int, ...]] | None = None,
        orders: Sequence[tuple[int, ...]] | None = None,
    ) -> Sending:
        """Places for all servers that wait; `sizes` and `orders` as in `Broadcaster.open`. From the event loop;
        `write_broadcast` follows."""
        assert self.broadcaster is not None, "of the transport broadcast only"
        return self.broadcaster.open(version, tensors, sizes, orders)

    def write_broadcast(self, version: int, source: WeightSource, sending: Sending, expected: int) -> Manifest:
        """Send `version` and, if it is due or one of the `expected` servers has no place, write its file. Blocks.

        Raises `NoSpace`, `Superseded`, and `RuntimeError` where a rank of the trainer is gone.
        """
        assert self._publisher is not None, "open comes first"
        assert self.broadcaster is not None
        self._unwritten = None
        path = self._publisher.path_of(version)
        due = self._streamed % self._full_every == 0 or sending.servers < expected
        streamed = stream_version(
            source, version, path, write=due, bucket_bytes=self.broadcaster.bucket_bytes, sending=sending
        )
        self._streamed += 1
        workers = sending.member.size - 1
        logger.info("broadcast %s: version %d, %d of %d workers have it", sending.name, version, streamed.done, workers)
        manifest = self._publisher.adopt(version, streamed.written, streamed.tensors)
        if not due:
            self._unwritten = _UnwrittenVersion(version, path, source)
        return replace(manifest, broadcast=self._meeting(sending.name))

    def _meeting(self, name: str) -> str:
        """Return the address where servers wait for the next broadcast, and the name of this one."""
        return f"{self._server.url}/broadcasts/{name}" if self._server and self.broadcaster else ""

    def _write_on_demand(self, name: str) -> bool:
        """Write a missing file if its version's bytes are here. Returns True if it will be there. Called from one
        thread.
        """
        unwritten = self._unwritten
        if unwritten is None or unwritten.path.name != name:
            return False
        if self._writing is None or not self._writing.is_alive():
            self._writing = threading.Thread(
                target=self._write_file, args=[unwritten], name="weights asked for", daemon=True
            )
            self._writing.start()
        return True

    def _write_file(self, unwritten: _UnwrittenVersion) -> None:
        assert self.broadcaster is not None
        bucket_bytes = self.broadcaster.bucket_bytes
        try:
            stream_version(unwritten.source, unwritten.version, unwritten.path, write=True, bucket_bytes=bucket_bytes)
        except Superseded:
            logger.info("version %d is not written: a newer one is on its way", unwritten.version)
        except (OSError, RuntimeError) as error:
            logger.error("version %d cannot be written for a server that asked: %s", unwritten.version, error)
        finally:
            if self._unwritten is unwritten:
                self._unwritten = None

    # what is announced -----------------------------------------------------------------------------------------------
    def offers(self, announced: Mapping[str, Any]) -> bool:
        """Return True if a server that joins late can load the announced version: its files are in the announced
        place.
        """
        manifest = _parsed(announced)
        return manifest is not None and self._offers(manifest)

    @staticmethod
    def state_in(announced: Mapping[str, Any]) -> str:
        """Return the state of an announced version's tensors; empty for manifests of another release."""
        manifest = _parsed(announced)
        return manifest.state if manifest is not None else ""

    def moved(self, announced: Mapping[str, Any]) -> Manifest | None:
        """The announced manifest with this process's addresses. None if they are right or its files are not here."""
        manifest = _parsed(announced)
        if self._server is None or manifest is None or manifest.transport not in SERVED or self._offers(manifest):
            return None
        if not all(self._file(file).is_file() for file in manifest.files):
            return None
        files = tuple(replace(file, place=self._place(file)) for file in manifest.files)
        return replace(
            manifest, transport=self._transport, files=files, broadcast=self._meeting(manifest.broadcast_name)
        )

    def _offers(self, manifest: Manifest) -> bool:
        unwritten = self._unwritten.path.name if self._unwritten is not None else ""
        return all(
            file.place == self._place(file) and (file.name == unwritten or self._file(file).is_file())
            for file in manifest.files
        )

    def _file(self, file: ChainFile) -> Path:
        return self.directory / file.name

    def _place(self, file: ChainFile) -> str:
        return f"{self._server.url}/{file.name}" if self._server else str(self._file(file))


def _wires(from_gpus: bool) -> tuple[str, ...]:
    """Return the wires that this process can send over."""
    if not from_gpus or not torch.cuda.is_available():
        return (GLOO,)
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        logger.warning(
            "rollout.weight_transport=nccl: broadcasts go over gloo: CUDA_DEVICE_MAX_CONNECTIONS is 1, one queue of "
            "the GPU, in which they and the collectives of a step would wait for each other; unset it, or set broadcast"
        )
        return (GLOO,)
    try:
        return (f"{NCCL}{Nccl.load().version}", GLOO)
    except (OSError, NcclError) as error:
        logger.warning("rollout.weight_transport=nccl: broadcasts go over gloo, NCCL cannot be used: %s", error)
        return (GLOO,)


def _parsed(announced: Mapping[str, Any]) -> Manifest | None:
    """None for manifests of another release: nothing that this trainer could offer."""
    try:
        return Manifest.parse(announced)
    except WeightsRefused:
        return None
