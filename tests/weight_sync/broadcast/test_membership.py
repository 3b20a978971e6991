"""Groups of broadcasts stand while the same members take part, and are formed again when one joins, leaves or dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import BroadcastingTrainer, HeldTrainer, StagedServer, broadcasting, give_up_soon
from tests.until import until
from tests.weight_sync.broadcast.test_broadcast import Killable, Members, same
from tests.weight_sync.broadcast.test_nccl import BOTH, WIRE, library, loaded
from tests.weight_sync.broadcast.test_senders import WORKERS, WORLD
from tests.weight_sync.broadcast.test_source import Ranks, sharded
from tests.weight_sync.conftest import next_version, small_tensors
from tests.weight_sync.processes import BUCKET_BYTES, big, receiving, state

torch = pytest.importorskip("torch")

from penstock.common import cancel_and_wait
from penstock.weight_sync import Broadcaster, Offer, StagedWeights, WeightsUnreachable, stream_version
from penstock.weight_sync.broadcast.group import GlooGroup, NcclGroup

pytestmark = pytest.mark.torch
__all__ = ["library", "loaded"]


class Formed:
    """The groups that this process forms from now on; of trainer and members, where both are here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members = list[Any]()
        for kind in (GlooGroup, NcclGroup):
            monkeypatch.setattr(kind, "__init__", self._counted(kind.__init__))

    def _counted(self, init: Any) -> Any:
        def form(group: Any, store: Any, member: Any, *more: Any) -> None:
            self.members.append(member)
            init(group, store, member, *more)

        return form

    @property
    def by_trainer(self) -> int:
        return sum(member.rank == 0 for member in self.members)


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> Formed:
    monkeypatch.setattr("penstock.weight_sync.broadcast.group.IDLE_S", 3600.0)  # however slow the machine is
    return Formed(monkeypatch)


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[BroadcastingTrainer]:
    async with broadcasting(tmp_path / "published", full_every=9, silence_s=60.0) as opened:
        yield opened


async def leave(members: Members, server: Any, waiting: int) -> None:
    """Once all of `waiting` wait, so that the trainer has noticed it when there is one less."""
    broadcaster = members.trainer.files.broadcaster
    await until(lambda: broadcaster.parked == waiting)
    await members.leave(server)
    await until(lambda: broadcaster.parked == waiting - 1)


async def test_members_that_join_or_leave_cost_one_formation_each(
    trainer: BroadcastingTrainer, tmp_path: Path, formed: Formed
) -> None:
    members, tensors = Members(trainer, tmp_path), small_tensors()
    servers, version = [members.join("a"), members.join("b")], 0

    async def publish() -> None:
        nonlocal tensors, version
        tensors, version = next_version(tensors, version), version + 1
        manifest = await trainer.publish(version, tensors, members=len(servers))
        for server in servers:
            assert same(await server.receive(manifest), tensors)

    for _ in range(3):
        await publish()
    assert formed.by_trainer == 1
    servers.append(members.join("c"))
    for _ in range(2):
        await publish()
    assert formed.by_trainer == 2
    await leave(members, servers.pop(0), 3)
    for _ in range(2):
        await publish()
    assert formed.by_trainer == 3
    trainer.files.broadcaster.membership._met_at -= 1e6  # connections may have been cut meanwhile
    await publish()
    assert formed.by_trainer == 4
    assert [server.by_file for server in servers] == [0, 0]
    await cancel_and_wait(list(members.tasks.values()))


@pytest.mark.parametrize("ends", [False, True], ids=["whole", "broken"])
async def test_groups_of_a_broadcast_that_broke_are_left(
    trainer: BroadcastingTrainer, tmp_path: Path, formed: Formed, *, ends: bool
) -> None:
    members = Members(trainer, tmp_path)
    server = members.join("a")
    await trainer.publish(1, small_tensors(1), members=1)
    if ends:
        HeldTrainer(trainer, 2, dies=True).go_on.set()
        with pytest.raises(RuntimeError, match="the trainer is gone"):
            await trainer.publish(2, small_tensors(2), members=1)
    manifest = await trainer.publish(3, small_tensors(3), members=1)
    assert same(await server.receive(manifest), small_tensors(3))
    assert formed.by_trainer == 1 + ends
    await trainer.files.close()
    assert trainer.files.broadcaster.membership.groups == {}
    await cancel_and_wait(list(members.tasks.values()))


@pytest.mark.slow
@pytest.mark.parametrize("wires", [("gloo/2",), BOTH], ids=["gloo", "nccl"])
async def test_member_killed_between_versions_costs_one_version_and_a_formation(
    tmp_path: Path, formed: Formed, monkeypatch: pytest.MonkeyPatch, wires: tuple[str, ...]
) -> None:
    """Nothing older than the announced version is read, whatever the dead one left."""
    monkeypatch.setattr("penstock.weight_sync.broadcast.seats.SEND_S", 600.0)
    async with (
        broadcasting(tmp_path / "published", full_every=9, bucket_bytes=BUCKET_BYTES, silence_s=60.0) as trainer,
        AsyncExitStack() as stack,
    ):
        trainer.files.broadcaster._wires = frozenset(wires)
        members, servers = Members(trainer, tmp_path), []

        async def join(name: str) -> None:
            servers.append(Killable(tmp_path / name, await stack.enter_async_context(receiving())))
            servers[-1].weight_wires = wires
            members.join("", servers[-1])

        for name in "ab":
            await join(name)
        for version in range(1, 6):
            manifest = await trainer.publish(version, big(version), members=2)
            assert [(await one.receive(manifest))["holds"] for one in servers] == [state(big(version))] * 2
        assert [one.inner.by_file for one in servers] == [0, 0]
        assert formed.by_trainer == 1
        dead = servers.pop()
        await dead.process.kill()
        give_up_soon(trainer.files.broadcaster.membership)
        manifest = await trainer.publish(6, big(6), members=2)
        assert (await servers[0].receive(manifest))["holds"] == state(big(6))
        assert servers[0].inner.by_file == 1
        await leave(members, dead, 2)
        await join("c")
        for version in (7, 8):
            manifest = await trainer.publish(version, big(version), members=2)
            assert [(await one.receive(manifest))["holds"] for one in servers] == [state(big(version))] * 2
        assert [one.inner.by_file for one in servers] == [1, 0]
        assert formed.by_trainer == 2
        await cancel_and_wait(list(members.tasks.values()))


@pytest.mark.parametrize("wire", ["gloo/2", WIRE])
def test_groups_of_all_ranks_stand_from_version_to_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, formed: Formed, wire: str
) -> None:
    """A member's broadcasts are on one stream in one order, as in one version: `test_nccl` has the order. Another one
    has its copies."""
    streams = list[Any]()
    made = torch.cuda.Stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or made(device))
    ranks, sizes = Ranks(WORLD, monkeypatch), [(40,) * WORLD] * 5
    broadcaster = Broadcaster(wires=[wire], bucket_bytes=64, silence_s=60.0)
    workers = [StagedWeights() for _ in range(WORKERS)]
    seats = ["", ""]
    with ThreadPoolExecutor(WORKERS) as threads:
        for version in range(1, 4):
            shards, stream = sharded(version, sizes)
            ranks.take(version, shards)
            source = ranks.sources[0]
            sending, offers = asyncio.run(_places(broadcaster, version, source, seats))
            seats = [offer.seat for offer in offers]
            places = [(offer, number) for offer in offers for number in range(2)]
            received = [threads.submit(one.receive, *place) for one, place in zip(workers, places, strict=True)]
            found = stream_version(source, version, tmp_path / "w", write=False, bucket_bytes=64, sending=sending)
            assert found.done == WORKERS
            assert all(one.result(60) for one in received)
            for one in workers:
                assert one._held is not None
                assert (
                    b"".join(tensor.numpy().tobytes() for tensor in one._held[2].values()) == stream.numpy().tobytes()
                )
    assert {member.group.partition("/")[0] for member in formed.members} == {sending.member.group}
    assert len(formed.members) == WORLD * (WORKERS + 1) + (WORLD - 1), "of workers, rank 0 and the sending ranks"
    assert len(streams) == (0 if wire == "gloo/2" else 2 * (WORLD + WORKERS))
    broadcaster.membership.leave()
    ranks.stop()


async def _places(broadcaster: Broadcaster, version: int, source: Any, seats: list[str]) -> tuple[Any, list[Offer]]:
    waiting = [asyncio.create_task(broadcaster.park(2, ",".join(broadcaster._wires), seat=seat)) for seat in seats]
    await asyncio.sleep(0)
    sending = broadcaster.open(version, source.tensors, source.sizes)
    offers = [offer for offer in await asyncio.gather(*waiting) if offer]
    return sending, [replace(offer, trainer="127.0.0.1", here="127.0.0.1") for offer in offers]


async def test_worker_without_the_groups_that_stand_says_so_at_once(
    trainer: BroadcastingTrainer, tmp_path: Path
) -> None:
    """Its sidecar reports places that its workers no longer have: the version is taken as a file."""
    server = StagedServer(tmp_path / "a")
    members = Members(trainer, tmp_path)
    members.join("a", server)
    await trainer.publish(1, small_tensors(1), members=1)
    await until(lambda: trainer.files.broadcaster.parked == 1)
    server.staged._membership.leave()
    give_up_soon(trainer.files.broadcaster.membership)
    manifest = await trainer.publish(2, small_tensors(2), members=1)
    assert same(await server.receive(manifest), small_tensors(2))
    assert (server.member.missed, server.by_file) == (1, 1)
    manifest = await trainer.publish(3, small_tensors(3), members=1)
    assert same(await server.receive(manifest), small_tensors(3))
    assert server.by_file == 1
    await cancel_and_wait(list(members.tasks.values()))
    with pytest.raises(WeightsUnreachable):
        server.staged.take(manifest)
