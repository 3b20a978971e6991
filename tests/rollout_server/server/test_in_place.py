"""A rollout server that receives in place: while its engine holds parts of two versions it answers nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import BroadcastingTrainer, broadcasting, receive_in_place
from tests.rollout_server.conftest import (
    TOKEN,
    RunningServer,
    RunQueue,
    ask,
    rollout_server,
    small_config,
    whole,
)

from penstock.rollout_server import Sidecar
from penstock.testing import FakeEngine
from penstock.transfer_queue import Announcement
from penstock.weight_sync import BroadcastMember, LoadReport, Manifest, WeightsUnreachable

torch = pytest.importorskip("torch")

from tests.rollout_server.conformance.losses import lose_the_trainer

from penstock.weight_sync import Membership, Offer, WeightReader

pytestmark = pytest.mark.torch
CONFIG = small_config(engine="hf", weight_transport="broadcast", broadcast_receive="in_place")
TOKEN_S = 0.005
SLOW_S = 0.6
"""Between two tokens, that no answer ends before a broadcast is there."""


class InPlaceFake(FakeEngine):
    """A fake engine whose only copy of the weights is overwritten as they come."""

    weight_workers = 1
    weight_wires = ("gloo/2",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, token_s=TOKEN_S)
        self.reader, self.membership = WeightReader(), Membership()
        self.held: dict[str, Any] = {}
        self.stands_still = False
        self.came = ("", "")

    async def stage_weights(self, offer: Offer) -> str:
        raise AssertionError("it is to receive in place")

    async def receive_weights(self, offer: Offer) -> str:
        try:
            state = await asyncio.to_thread(receive_in_place, offer, self.membership, self.held, self._halt)
        except WeightsUnreachable:
            self._go_on()
            raise
        self.came = (offer.name, state)
        return state

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        if manifest.transport == "broadcast":
            if self.came != (manifest.broadcast_name, manifest.state):
                raise WeightsUnreachable("it did not come")
        else:
            read = await asyncio.to_thread(self.reader.read, manifest)
            self.held = {name: tensor.clone().view(torch.uint8) for name, tensor in read.items()}
        report = await super().load_weights(manifest)
        self.stands_still, self.came = False, ("", "")
        return report

    def _halt(self) -> None:
        self.stands_still = True
        self._resumed.clear()

    def _go_on(self) -> None:
        self.stands_still = False
        self._resumed.set()


def weights(version: int) -> dict[str, Any]:
    return {"w": torch.arange(10_000.0) + version}


def holds(server: RunningServer, version: int) -> bool:
    return torch.equal(server.engine.held["w"].view(torch.float32), weights(version)["w"])


class Setting:
    def __init__(self, queue: RunQueue, trainer: BroadcastingTrainer, server: RunningServer) -> None:
        self.queue, self.trainer, self.server = queue, trainer, server

    async def announce(self, version: int, members: int) -> None:
        manifest = await self.trainer.publish(version, weights(version), members=members)
        self.queue.announced = Announcement(version, manifest.as_dict())

    @property
    def accepts(self) -> bool:
        return self.queue.registered[self.server.name].accepting


@pytest.fixture
async def setting(queue: RunQueue, tmp_path: Path) -> AsyncIterator[Setting]:
    """A server that has version 1, as a file, and waits for the broadcast of the next one."""
    async with broadcasting(tmp_path / "published", token=TOKEN, full_every=1) as trainer:
        first = await trainer.publish(1, weights(1), members=0)
        queue.announced = Announcement(1, first.as_dict())
        async with rollout_server(queue, tmp_path, new_engine=InPlaceFake, config=CONFIG) as server:
            assert holds(server, 1)
            yield Setting(queue, trainer, server)


async def test_version_in_place_is_served_once_it_is_announced(setting: Setting) -> None:
    engine, begun = setting.server.engine, asyncio.Event()
    answer = asyncio.create_task(whole(engine, ask([5], 200), lambda _: begun.set()))
    await begun.wait()
    engine.token_s = SLOW_S
    manifest = await setting.trainer.publish(2, weights(2), members=1)
    await setting.server.until(lambda: engine.came[0] != "")
    engine.token_s = TOKEN_S
    await asyncio.sleep(0.1)
    assert (engine.stands_still, engine.version, setting.accepts) == (True, 1, True)
    assert not answer.done()
    setting.queue.announced = Announcement(2, manifest.as_dict())
    await setting.server.until(lambda: engine.version == 2)
    assert holds(setting.server, 2)
    assert [span[0] for span in (await answer).version_spans] == [1, 2]
    assert engine.loaded == [1, 2]
    await setting.announce(3, members=1)
    await setting.server.until(lambda: engine.version == 3)
    assert holds(setting.server, 3)


async def test_half_a_version_answers_nothing_until_a_whole_file(setting: Setting, tmp_path: Path) -> None:
    """The trainer dies in mid-bucket; what is announced is the version that the engine had, as a file that is away."""
    engine = setting.server.engine
    file = setting.trainer.place_of_file(setting.trainer.published[1])
    kept = file.rename(file.with_suffix(".kept"))
    for fetched in (tmp_path / "weights-of-s0").glob("*weights-*"):
        fetched.unlink()
    answer = asyncio.create_task(whole(engine, ask([5], 100)))
    while not engine.running:
        await asyncio.sleep(0.01)
    engine.token_s = SLOW_S
    await lose_the_trainer(setting.trainer, 2, weights(2), 2)
    await setting.server.until(lambda: not setting.accepts)
    engine.token_s = TOKEN_S
    assert not holds(setting.server, 1)
    asked = engine.asked
    await asyncio.sleep(0.3)
    assert (engine.stands_still, engine.loaded, engine.asked) == (True, [1], asked)
    assert not answer.done()
    kept.rename(file)
    await setting.server.until(lambda: setting.accepts)
    assert holds(setting.server, 1)
    assert engine.loaded == [1, 1]
    assert [span[0] for span in (await answer).version_spans] == [1]
    await setting.announce(2, members=1)
    await setting.server.until(lambda: engine.version == 2)
    assert holds(setting.server, 2)
    assert len(setting.server.engines) == 1


async def test_version_that_is_not_announced_is_loaded_over(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came whole, and its trainer is gone: the version that is announced is served, and under its own label."""
    monkeypatch.setattr("penstock.weight_sync.broadcast.member.ANNOUNCE_S", 0.2)
    engine = setting.server.engine
    manifest = await setting.trainer.publish(2, weights(2), members=1)
    await setting.server.until(lambda: engine.loaded == [1, 1])
    await setting.server.until(lambda: setting.accepts)
    assert holds(setting.server, 1)
    setting.queue.announced = Announcement(2, manifest.as_dict())  # late: by its file
    await setting.server.until(lambda: engine.version == 2)
    assert holds(setting.server, 2)


async def test_evaluation_servers_take_files_where_others_receive_in_place(queue: RunQueue, tmp_path: Path) -> None:
    """An evaluation is of one version: nothing may be received over it."""
    async with broadcasting(tmp_path / "published", token=TOKEN, full_every=1) as trainer:
        queue.announced = Announcement(1, (await trainer.publish(1, weights(1), members=0)).as_dict())
        async with rollout_server(queue, tmp_path, new_engine=InPlaceFake, config=CONFIG, evaluates=True) as server:
            await asyncio.sleep(0.3)
            assert trainer.files.broadcaster.parked == 0
            queue.announced = Announcement(2, (await trainer.publish(2, weights(2), members=0)).as_dict())
            await server.until(lambda: server.engine.version == 2)
            assert holds(server, 2)


def test_a_server_that_is_not_open_is_no_member_in_place() -> None:
    """It loads a file, and could not pause for a broadcast at once."""
    member = BroadcastMember(TOKEN, in_place=True)
    sidecar = Sidecar("s0", "http://s0", lambda: FakeEngine(CONFIG, "", Path(), 0), RunQueue(), slots=1, member=member)
    sidecar.weights.newest = Announcement(1, {"round": "http://trainer/broadcasts/1"})
    assert sidecar._meeting() == ""
    sidecar.open = True
    assert sidecar._meeting() == "http://trainer/broadcasts/1"
    sidecar.weights.loading = True
    assert sidecar._meeting() == ""
