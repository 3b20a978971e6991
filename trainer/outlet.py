"""Where published weights leave the trainer: their folder, its server and its rounds. Rank 0 has one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.rollout_server.engines import find_model
from penstock.trainer.job import TrainJob
from penstock.weight_sync import (
    SERVED,
    Broadcaster,
    ChainFile,
    FileServer,
    WeightPublisher,
    WeightsRefused,
    build_manifest,
    links_of,
)


class Outlet:
    """`open` first, `close` last. Files outlive it: a trainer that comes back goes on from them."""

    def __init__(self, job: TrainJob) -> None:
        self.directory = job.weights_dir
        self._job = job
        self._rounds = Broadcaster(job.weights_host) if job.transport == "collective" else None
        self._server = _file_server(job, self._rounds) if job.transport in SERVED else None
        self._writer: WeightPublisher | None = None

    async def open(self) -> None:
        """Raises `OSError` where the address to serve on cannot be had."""
        if self._server is not None:
            await self._server.start()
        job = self._job
        url = self._server.url if self._server else None
        model = find_model(job.model) if job.config.lora.rank else None
        self._writer = WeightPublisher(
            job.weights_dir, job.transport, keep=2, full_every=job.weights_full_every, base_url=url, model=model
        )

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """The manifest of `version`. Blocks while it is written. Raises `NoSpace`."""
        assert self._writer is not None, "open comes first"
        return self._writer.write(version, weights)

    def write_adapter(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The same for a version that is an adapter of the model. Raises `NoSpace`, `BadAdapter`, `WeightsRefused`."""
        assert self._writer is not None, "open comes first"
        return self._writer.write_adapter(version, tensors, settings)

    @property
    def makes_rounds(self) -> bool:
        return self._rounds is not None

    def with_round(self, manifest: dict[str, Any], expected: int) -> dict[str, Any]:
        """What to announce: under ``collective`` with a round for as many servers as are expected to be ready.

        Called from the event loop, at once before the announcement. Without a round where none is expected, and where
        the round of the version before is still on: everybody takes the file.
        """
        if self._rounds is None or self._server is None or not expected:
            return manifest
        name = self._rounds.offer(self._file(links_of(manifest)[-1]), expected)
        return {**manifest, "round": f"{self._server.url}/rounds/{name}"} if name else manifest

    def offers(self, manifest: Mapping[str, Any]) -> bool:
        """Whether a server that joins late could load the version: all of its chain is there, where it says."""
        links = _links(manifest)
        return bool(links) and all(self._file(link).is_file() and link.place == self._place(link) for link in links)

    def moved(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        """The manifest with the addresses of this life. None where they are right, or its files are not here."""
        links = _links(manifest)
        if self._server is None or manifest.get("transport") not in SERVED or self.offers(manifest):
            return None
        if not links or not all(self._file(link).is_file() for link in links):
            return None
        here = [replace(link, place=self._place(link)) for link in links]
        return build_manifest(
            self._job.transport,
            here,
            manifest["tensors"],
            deltas_follow=bool(manifest.get("deltas_follow")),
            adapter=manifest.get("adapter"),
        )

    def _file(self, link: ChainFile) -> Path:
        return self._job.weights_dir / link.place.rpartition("/")[2]

    def _place(self, link: ChainFile) -> str:
        return f"{self._server.url}/{self._file(link).name}" if self._server else str(self._file(link))


def _file_server(job: TrainJob, rounds: Broadcaster | None) -> FileServer:
    return FileServer(job.weights_dir, job.token, job.weights_host, job.weights_port, rounds=rounds)


def _links(manifest: Mapping[str, Any]) -> list[ChainFile]:
    try:
        return links_of(manifest)
    except WeightsRefused:
        return []  # of another release, or of no trainer at all: nothing that we could offer
