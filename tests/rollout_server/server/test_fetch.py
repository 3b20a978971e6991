"""A rollout server whose weights come over HTTP: its engine sees files only; a trainer that is away is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import broadcasting
from tests.ports import free_port
from tests.rollout_server.conftest import TOKEN, RunQueue, rollout_server, small_config

from penstock.rollout_server import Sidecar
from penstock.testing import FakeEngine
from penstock.transfer_queue import Announcement
from penstock.weight_sync import LoadReport, Manifest

torch = pytest.importorskip("torch")

from penstock.weight_sync import FileServer, Offer, StagedWeights, WeightPublisher, WeightReader

pytestmark = pytest.mark.torch


class ReadingEngine(FakeEngine):
    """A fake engine that reads what it is told to load."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reader = WeightReader()
        self.held: dict[str, Any] = {}

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        assert manifest.transport == "shm"
        self.held = await asyncio.to_thread(self.reader.read, manifest)
        return await super().load_weights(manifest)


class StagingFake(FakeEngine):
    """A fake engine that receives broadcasts too."""

    weight_workers = 1
    weight_wires = ("gloo/2",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reader, self.staged = WeightReader(), StagedWeights()
        self.held: dict[str, Any] = {}
        self.by_broadcast: list[int] = []

    async def stage_weights(self, offer: Offer) -> str:
        return await asyncio.to_thread(self.staged.receive, offer)

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        staged = manifest.transport == "broadcast"
        self.held = await asyncio.to_thread(self.staged.take if staged else self.reader.read, manifest)
        if staged:
            self.by_broadcast.append(manifest.version)
        return await super().load_weights(manifest)


def announce(queue: RunQueue, manifest: Manifest) -> None:
    queue.announced = Announcement(manifest.version, manifest.as_dict())


async def test_versions_are_pulled_and_the_files_go_with_the_server(queue: RunQueue, tmp_path: Path) -> None:
    files = FileServer(tmp_path / "published", TOKEN)
    await files.start()
    publisher = WeightPublisher(files._directory, "http", full_every=3, base_url=files.url)
    weights = torch.arange(1000.0)
    async with rollout_server(queue, tmp_path, new_engine=ReadingEngine) as server:
        for version in range(1, 6):
            weights[version] = -1
            announce(queue, publisher.write(version, {"w": weights}.items()))
            await server.until(lambda version=version: server.engine.version == version)
            assert torch.equal(server.engine.held["w"], weights)
        # Each file came once; the fetch is in the report.
        assert [update.version for update in queue.reported] == [1, 2, 3, 4, 5]
        assert (tmp_path / "weights-of-s0").is_dir()
    await files.stop()
    assert not (tmp_path / "weights-of-s0").exists()


async def test_draining_server_waits_for_no_broadcast(queue: RunQueue) -> None:
    """Its end would cost all other members theirs."""
    sidecar = Sidecar("s0", "http://s0", lambda: FakeEngine(small_config(), "", None, 0), queue, slots=1)
    sidecar.weights.newest = Announcement(1, {"round": "http://trainer/broadcasts/1"})
    assert sidecar._meeting() == "http://trainer/broadcasts/1"
    await sidecar.drain(0.0)
    assert sidecar._meeting() == ""


async def test_servers_receive_broadcasts_and_hand_on_what_came_as_a_file(queue: RunQueue, tmp_path: Path) -> None:
    config = small_config(engine="hf", weight_transport="broadcast")
    async with broadcasting(tmp_path / "published", token=TOKEN, full_every=2) as trainer:
        # The first announcement says where servers wait; its version is a file.
        announce(queue, await trainer.publish(1, {"w": torch.arange(1000.0)}, members=0))
        async with (
            rollout_server(queue, tmp_path, new_engine=StagingFake, name="a", config=config) as first,
            rollout_server(queue, tmp_path, new_engine=StagingFake, name="b", config=config) as second,
        ):
            for version in range(1, 6):
                weights = torch.arange(1000.0) + version - 1
                if version > 1:
                    manifest = await trainer.publish(version, {"w": weights}, members=2)
                    announce(queue, manifest)
                for server in (first, second):
                    await server.until(lambda server=server, version=version: server.engine.version == version)
                    assert torch.equal(server.engine.held["w"], weights)
            assert [server.engine.by_broadcast for server in (first, second)] == [[2, 3, 4, 5]] * 2
            async with rollout_server(queue, tmp_path, new_engine=StagingFake, name="late", config=config) as late:
                await late.until(lambda: late.engine.version == 5)
                assert torch.equal(late.engine.held["w"], weights)
                assert late.engine.by_broadcast == []


async def test_engine_that_lost_what_it_received_takes_the_file(queue: RunQueue, tmp_path: Path) -> None:
    config = small_config(engine="hf", weight_transport="broadcast")
    async with broadcasting(tmp_path / "published", token=TOKEN, full_every=5) as trainer:
        announce(queue, await trainer.publish(1, {"w": torch.zeros(9)}, members=0))
        async with rollout_server(queue, tmp_path, new_engine=StagingFake, config=config) as server:
            manifest = await trainer.publish(2, {"w": torch.ones(9)}, members=1)
            await server.until(lambda: server.engine.staged._held is not None)
            server.engine.staged._held = None
            announce(queue, manifest)
            await server.until(lambda: server.engine.version == 2)
            assert torch.equal(server.engine.held["w"], torch.ones(9))
            assert server.engine.by_broadcast == []
            assert (await server.status("/health"))["ok"]


async def test_a_trainer_that_is_away_is_waited_for_and_old_weights_serve(queue: RunQueue, tmp_path: Path) -> None:
    port = free_port()
    publisher = WeightPublisher(tmp_path / "published", "http", base_url=f"http://127.0.0.1:{port}")
    async with rollout_server(queue, tmp_path, new_engine=ReadingEngine) as server:
        announce(queue, publisher.write(1, {"w": torch.ones(9)}.items()))
        await server.status("/health", lambda found: "not fetched, version 0 stays" in found["cause"])
        assert (await server.status("/health"))["ok"]
        again = FileServer(tmp_path / "published", TOKEN, port=port)
        await again.start()
        await server.until(lambda: server.engine.version == 1)
        await server.status("/health", lambda found: not found["cause"])
        await again.stop()


async def test_a_file_that_is_not_there_yet_is_waited_for(queue: RunQueue, tmp_path: Path) -> None:
    """A run was killed with its weights: a server that is back before the trainer finds them announced, and later the
    trainer writes the same file again, under the same announcement."""
    weights = {"w": torch.arange(10.0)}
    manifest = WeightPublisher(tmp_path / "published", "shm").write(1, weights.items())
    file = Path(manifest.files[-1].place)
    kept = file.rename(tmp_path / "kept")
    async with rollout_server(queue, tmp_path, new_engine=ReadingEngine) as server:
        announce(queue, manifest)
        await server.status("/health", lambda found: "not fetched, version 0 stays" in found["cause"])
        assert queue.registered[server.name].refused is None, "refused by every server, it would end the run"
        kept.rename(file)
        await server.until(lambda: server.engine.version == 1)
