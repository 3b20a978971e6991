"""A rollout server whose weights come over HTTP: its engine sees files only; a trainer that is away is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.rollout_server.conftest import TOKEN, RunningServer, StubQueue, rollout_server

from penstock.rollout_server import FakeEngine
from penstock.transfer_queue import Announcement
from penstock.weight_sync import LoadReport, Manifest

torch = pytest.importorskip("torch")

from penstock.weight_sync import Broadcaster, FileServer, WeightPublisher, WeightReader

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


async def health(server: RunningServer) -> dict[str, Any]:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
        found: dict[str, Any] = (await client.get(f"{server.url}/health")).json()
        return found


async def metrics(server: RunningServer) -> str:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
        return (await client.get(f"{server.url}/metrics")).text


async def test_versions_are_pulled_and_the_files_go_with_the_server(tmp_path: Path) -> None:
    queue, files = StubQueue(), FileServer(tmp_path / "published", TOKEN)
    await files.start()
    publisher = WeightPublisher(files._directory, "http", full_every=3, base_url=files.url)
    weights = torch.arange(1000.0)
    async with rollout_server(queue, tmp_path, new_engine=ReadingEngine) as server:
        for version in range(1, 6):
            weights[version] = -1
            queue.announced = Announcement(version, publisher.write(version, {"w": weights}.items()).as_dict())
            await server.until(lambda version=version: server.engine.version == version)
            assert torch.equal(server.engine.held["w"], weights)
        # Each file came once; the fetch is in the report.
        assert [update.version for update in queue.reported] == [1, 2, 3, 4, 5]
        assert (tmp_path / "weights-of-s0").is_dir()
    await files.stop()
    assert not (tmp_path / "weights-of-s0").exists()


async def test_a_server_that_missed_links_of_a_chain_takes_what_it_needs(tmp_path: Path) -> None:
    """The announcements that it did not see, a link that is gone, and the full version that mends it."""
    queue, publisher = StubQueue(), WeightPublisher(tmp_path / "published", "shm", keep=1, full_every=6)
    weights = torch.arange(1000.0)
    async with rollout_server(queue, tmp_path, new_engine=ReadingEngine) as server:
        for version in range(1, 9):
            weights[version] = -1
            manifest = publisher.write(version, {"w": weights}.items())
            if version in (1, 4, 8):  # 2, 3, 5, 6 and 7 are never seen; 7 is full, 8 builds on it
                before = server.engine.reader.bytes_read if version > 1 else 0
                queue.announced = Announcement(version, manifest.as_dict())
                await server.until(lambda version=version: server.engine.version == version)
                assert torch.equal(server.engine.held["w"], weights)
                files = [file.bytes for file in manifest.files]
                expected = {1: files[0], 4: sum(files[1:]), 8: sum(files)}[version]
                assert server.engine.reader.bytes_read - before == expected
        # A link of the chain is gone, and this server holds the state before it: the full version and what follows.
        weights[0] = 7
        publisher.write(9, {"w": weights}.items())
        weights[0] = 8
        manifest = publisher.write(10, {"w": weights}.items())
        Path(manifest.files[-2].place).unlink()
        queue.announced = Announcement(10, manifest.as_dict())
        while "refused, version 8 stays" not in (await health(server))["cause"]:
            await asyncio.sleep(0.02)
        assert "penstock_rollout_version_lag 2.0" in await metrics(server)
        assert (await health(server))["ok"]
        for version in range(11, 14):
            manifest = publisher.write(version, {"w": weights}.items())
        assert manifest.base_version is None
        queue.announced = Announcement(13, manifest.as_dict())
        await server.until(lambda: server.engine.version == 13)
        assert torch.equal(server.engine.held["w"], weights)


async def test_servers_take_part_in_a_round_and_hand_on_what_they_have(tmp_path: Path) -> None:
    queue, rounds = StubQueue(), Broadcaster(window_s=20)
    files = FileServer(tmp_path / "published", TOKEN, broadcaster=rounds)
    await files.start()
    publisher = WeightPublisher(files._directory, "collective", full_every=3, base_url=files.url)
    weights = torch.arange(1000.0)
    async with (
        rollout_server(queue, tmp_path, new_engine=ReadingEngine, name="a") as first,
        rollout_server(queue, tmp_path, new_engine=ReadingEngine, name="b") as second,
    ):
        for version in range(1, 5):
            weights[version] = -1
            manifest = publisher.write(version, {"w": weights}.items())
            name = rounds.offer(files._directory / manifest.files[-1].name, 2)
            queue.announced = Announcement(version, manifest.as_dict() | {"round": f"{files.url}/rounds/{name}"})
            for server in (first, second):
                await server.until(lambda server=server, version=version: server.engine.version == version)
                assert torch.equal(server.engine.held["w"], weights)
            await rounds.settle()
            assert rounds.last == (2, 2)
        async with rollout_server(queue, tmp_path, new_engine=ReadingEngine, name="late") as late:
            await late.until(lambda: late.engine.version == 4)
            assert torch.equal(late.engine.held["w"], weights)
    await files.stop()


async def test_a_trainer_that_is_away_is_waited_for_and_old_weights_serve(tmp_path: Path) -> None:
    queue, files = StubQueue(), FileServer(tmp_path / "published", TOKEN)
    await files.start()
    publisher = WeightPublisher(files._directory, "http", base_url=files.url)
    await files.stop()
    async with rollout_server(queue, tmp_path, new_engine=ReadingEngine) as server:
        queue.announced = Announcement(1, publisher.write(1, {"w": torch.ones(9)}.items()).as_dict())
        while "not fetched, version 0 stays" not in (await health(server))["cause"]:
            await asyncio.sleep(0.02)
        assert (await health(server))["ok"]
        again = FileServer(tmp_path / "published", TOKEN, port=int(files.url.rpartition(":")[2]))
        await again.start()
        await server.until(lambda: server.engine.version == 1)
        while (await health(server))["cause"]:
            await asyncio.sleep(0.02)
        await again.stop()


async def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """A run was killed with its weights: a server that is back before the trainer finds them announced, and later the
    trainer writes the same file again, under the same announcement."""
    queue, weights = StubQueue(), {"w": torch.arange(10.0)}
    manifest = WeightPublisher(tmp_path / "published", "shm").write(1, weights.items())
    file = Path(manifest.files[-1].place)
    kept = file.rename(tmp_path / "kept")
    async with rollout_server(queue, tmp_path, new_engine=ReadingEngine) as server:
        queue.announced = Announcement(1, manifest.as_dict())
        while "not fetched, version 0 stays" not in (await health(server))["cause"]:
            await asyncio.sleep(0.02)
        assert queue.registered[server.name].refused is None, "refused by every server, it would end the run"
        kept.rename(file)
        await server.until(lambda: server.engine.version == 1)
