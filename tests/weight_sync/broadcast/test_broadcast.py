"""Broadcasts: what comes is what was announced; whoever is late, dead, slow or damaged costs nobody a version."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.broadcasting import TOKEN, BroadcastingTrainer, HeldTrainer, StagedServer, broadcasting, give_up_soon
from tests.until import until
from tests.weight_sync.conftest import altered, next_version, other_checksum, small_tensors
from tests.weight_sync.processes import BUCKET_BYTES, ReceivingProcess, big, receiving, state

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from penstock.common import cancel_and_wait
from penstock.weight_sync import (
    Broadcaster,
    Manifest,
    NoSpace,
    StagedMemory,
    StagedWeights,
    StreamTensor,
    WeightReader,
    WeightsRefused,
    WeightsUnreachable,
    stream_version,
)
from penstock.weight_sync.broadcast import receiver
from penstock.weight_sync.broadcast.memory import SpareMemory
from penstock.weight_sync.broadcast.shards import Superseded

pytestmark = pytest.mark.torch
KILLS = int(os.environ.get("PENSTOCK_KILLS", "12"))


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[BroadcastingTrainer]:
    async with broadcasting(tmp_path / "published", full_every=4) as opened:
        yield opened


class Members:
    """Servers that take part in broadcasts, until they leave."""

    def __init__(self, trainer: BroadcastingTrainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.tasks: dict[Any, asyncio.Task[None]] = {}

    def join(self, name: str, engine: Any = None) -> Any:
        server = engine or StagedServer(self.folder / name)
        self.tasks[server] = asyncio.create_task(server.member.run(server, lambda: self.trainer.meeting))
        return server

    async def leave(self, server: Any) -> None:
        await cancel_and_wait([self.tasks.pop(server)])


@pytest.fixture
async def members(trainer: BroadcastingTrainer, tmp_path: Path) -> AsyncIterator[Members]:
    opened = Members(trainer, tmp_path)
    yield opened
    await cancel_and_wait(list(opened.tasks.values()))


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("apart_bytes", [1, 1 << 18])
async def test_members_have_every_version_and_take_no_file(
    trainer: BroadcastingTrainer, members: Members, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart_bytes: int
) -> None:
    monkeypatch.setattr("penstock.weight_sync.broadcast.stream_places.APART_BYTES", apart_bytes)
    kinds = {"a": StagedWeights, "b": StagedMemory, "c": StagedWeights}
    servers = [members.join(name, StagedServer(tmp_path / name, staged())) for name, staged in kinds.items()]
    tensors = small_tensors()
    for version in range(1, 6):
        manifest = await trainer.publish(version, tensors, members=3)
        for server in servers:
            assert same(await server.receive(manifest), tensors)
        tensors = next_version(tensors, version)
    assert [server.by_file for server in servers] == [0, 0, 0]
    assert [(server.member.cause, server.member.busy) for server in servers] == [("", False)] * 3
    written = sorted(path.name for path in trainer.files.directory.glob("weights-*"))
    assert [name[8:16] for name in written] == ["00000001", "00000005"], "one file in four versions"


async def test_late_joiner_has_the_file_written_for_it(trainer: BroadcastingTrainer, members: Members) -> None:
    first = members.join("first")
    versions = [small_tensors(seed) for seed in range(4)]
    for version, tensors in enumerate(versions, 1):
        manifest = await trainer.publish(version, tensors, members=1)
        assert same(await first.receive(manifest), tensors)
    late = members.join("late")
    assert not trainer.place_of_file(manifest).exists()
    assert same(await late.receive(manifest), versions[3])
    assert trainer.place_of_file(manifest).exists()
    assert (first.by_file, late.by_file) == (0, 1)
    both = await trainer.publish(5, versions[0], members=2)
    assert same(await late.receive(both), versions[0])
    assert late.by_file == 1


async def test_server_without_a_place_is_expected_and_gets_a_file_at_once(
    trainer: BroadcastingTrainer, members: Members
) -> None:
    members.join("first")
    await trainer.publish(1, small_tensors(), members=1)
    manifest = await trainer.publish(2, small_tensors(1), members=1, expected=2)
    assert trainer.place_of_file(manifest).exists()
    manifest = await trainer.publish(3, small_tensors(2), members=1, expected=1)
    assert not trainer.place_of_file(manifest).exists(), "all have a place"


async def test_file_of_an_older_version_is_not_made_of_newer_bytes(
    trainer: BroadcastingTrainer, members: Members, tmp_path: Path
) -> None:
    first = members.join("first")
    for version in (1, 2):
        manifest = await trainer.publish(version, small_tensors(version), members=1)
    await trainer.take(3, small_tensors(3))
    late = StagedServer(tmp_path / "late")
    with pytest.raises(WeightsUnreachable):
        await late.receive(manifest)
    assert not trainer.place_of_file(manifest).exists()
    assert same(await first.receive(manifest), small_tensors(2)), "it has the version from its broadcast"


async def test_member_that_leaves_is_not_waited_for_and_may_come_back(
    trainer: BroadcastingTrainer, members: Members
) -> None:
    stays, leaves = members.join("stays"), members.join("leaves")
    await trainer.publish(1, small_tensors(1), members=2)
    await members.leave(leaves)
    while trainer.files.broadcaster.parked > 1:
        await asyncio.sleep(0.01)
    manifest = await trainer.publish(2, small_tensors(2), members=1)
    assert same(await stays.receive(manifest), small_tensors(2))
    back = members.join("leaves")
    manifest = await trainer.publish(3, small_tensors(3), members=2)
    assert same(await back.receive(manifest), small_tensors(3))
    assert back.by_file == 0


@pytest.mark.parametrize("change", [other_checksum, lambda plain: plain["tensors"][0].update(shape=[10, 10])])
async def test_announcement_of_other_tensors_is_not_served_from_a_broadcast(
    trainer: BroadcastingTrainer, members: Members, change: Any
) -> None:
    server = members.join("a")
    manifest = altered(await trainer.publish(1, small_tensors(), members=1), change)
    with pytest.raises(WeightsRefused, match="'last' has"):
        await server.receive(manifest)
    assert server.by_file == 1


@pytest.mark.parametrize("staged", [StagedWeights, StagedMemory])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (other_checksum, "'last' "),
        (lambda plain: plain["tensors"].append(plain["tensors"][0] | {"name": "more"}), "'more' is missing"),
        (lambda plain: plain["tensors"].pop(), "'flags' is not in the manifest"),
    ],
    ids=["checksum", "missing", "extra"],
)
async def test_worker_names_the_tensor_that_differs_from_the_announcement(
    trainer: BroadcastingTrainer, members: Members, tmp_path: Path, staged: Any, change: Any, problem: str
) -> None:
    server = members.join("a", StagedServer(tmp_path / "a", staged()))
    manifest = await trainer.publish(1, small_tensors(), members=1)
    assert await server.member.holds(manifest)
    assert not await server.member.holds(manifest), "once"
    with pytest.raises(WeightsRefused, match=f"version 1: tensor {problem}"):
        server.staged.take(altered(manifest, change))
    with pytest.raises(WeightsUnreachable, match="does not hold"):
        server.staged.take(manifest)


@pytest.mark.parametrize("staged", [StagedWeights, StagedMemory])
async def test_version_without_a_byte_is_broadcast(
    trainer: BroadcastingTrainer, members: Members, tmp_path: Path, staged: Any
) -> None:
    server = members.join("a", StagedServer(tmp_path / "a", staged()))
    manifest = await trainer.publish(1, {"empty": torch.empty(0, 4)}, members=1)
    assert (await server.receive(manifest))["empty"].shape == (0, 4)
    assert server.by_file == 0


async def test_broadcast_counts_the_workers_that_have_all(
    trainer: BroadcastingTrainer, members: Members, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And ends for those who would have it later than agreed."""
    for name in "ab":
        members.join(name)
    for deadline_s, done in ((60.0, 2), (-1.0, 0)):
        await until(lambda: trainer.files.broadcaster.parked == 2)
        await trainer.take(1, small_tensors())
        sending = replace(trainer.files.begin_broadcast(1, trainer.source.tensors), deadline_s=deadline_s)
        found = await asyncio.to_thread(
            stream_version, trainer.source, 1, tmp_path / "w", write=False, bucket_bytes=10_000, sending=sending
        )
        assert found.done == done
        assert ("not done in -1 s" in caplog.text) is (done == 0)


async def test_broadcast_has_the_time_that_its_bytes_take() -> None:
    """20 s, and what the bytes take at 50 MB/s. Where no member waits no port is opened."""
    sending = Broadcaster().open(1, [StreamTensor("w", (25_000_000,), "bfloat16")])
    assert (sending.deadline_s, sending.servers, sending.listener, sending.member.port) == (21.0, 0, None, 0)


async def test_broadcaster_takes_servers_of_1024_workers_at_most() -> None:
    assert await Broadcaster().park(1024, "gloo/2", wait_s=0.0) is None
    with pytest.raises(ValueError, match="count is 1025, not 1 to 1024"):
        await Broadcaster().park(1025, "gloo/2", wait_s=0.0)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 on this machine")
async def test_broadcaster_listens_on_ipv6_where_it_is_told_to() -> None:
    broadcaster = Broadcaster("::1")
    waiting = asyncio.create_task(broadcaster.park(1, "gloo/2"))
    await asyncio.sleep(0)
    sending = broadcaster.open(1, ())
    assert (await waiting) is not None
    assert sending.listener is not None
    with sending.listener as listener, socket.create_connection(("::1", sending.member.port), timeout=60):
        assert listener.getsockname()[0] == "::1"


async def test_older_version_that_was_not_loaded_is_dropped(trainer: BroadcastingTrainer, members: Members) -> None:
    server = members.join("a")
    first = await trainer.publish(1, small_tensors(1), members=1)
    second = await trainer.publish(2, small_tensors(2), members=1)
    with pytest.raises(WeightsUnreachable, match="does not hold"):
        server.staged.take(first)
    assert not await server.member.holds(first)
    assert same(await server.receive(second), small_tensors(2))
    assert server.by_file == 0


async def test_memory_of_a_version_is_used_again_once_nobody_reads_it(
    trainer: BroadcastingTrainer, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(receiver, "SpareMemory", lambda nbytes: made.append(nbytes) or SpareMemory(nbytes))
    server = members.join("a")
    places = []
    for version in range(1, 5):
        manifest = await trainer.publish(version, small_tensors(version), members=1)
        assert await server.member.holds(manifest)
        tensors = server.staged.take(manifest)
        assert same(tensors, small_tensors(version))
        places.append(tensors["last"].data_ptr())
        kept = tensors["last"] if version == 2 else None
        tensors.clear()
        assert not tensors
        if kept is not None:
            second = kept
        del kept
    assert torch.equal(second, small_tensors(2)["last"]), "whoever still uses a tensor has it"
    assert places[0] == places[1] != places[2] == places[3]
    assert len(made) == 2


async def test_member_that_never_comes_costs_the_broadcast_only(tmp_path: Path) -> None:
    async with broadcasting(tmp_path / "published", full_every=4, silence_s=0.5) as trainer:
        waiting = asyncio.create_task(trainer.files.broadcaster.park(1, "gloo/2"))
        await trainer.publish(1, small_tensors(), members=0)
        waiting = asyncio.create_task(trainer.files.broadcaster.park(1, "gloo/2"))
        manifest = await trainer.publish(2, small_tensors(2), members=1)
        assert (await waiting).version == 2
        late = StagedServer(tmp_path / "late")
        assert same(await late.receive(manifest), small_tensors(2))


async def test_full_disk_is_said_and_nothing_is_announced(
    trainer: BroadcastingTrainer, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    server = members.join("a")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("usage", (), {"free": 0}))
    with pytest.raises(NoSpace):
        await trainer.publish(1, small_tensors(), members=1)
    monkeypatch.undo()
    manifest = await trainer.publish(2, small_tensors(2), members=1)
    assert same(await server.receive(manifest), small_tensors(2))


async def test_old_version_is_superseded_in_the_middle(tmp_path: Path) -> None:
    async with broadcasting(tmp_path / "published") as trainer:
        await trainer.take(1, small_tensors())
        buckets = trainer.source.buckets(1, 1000)
        next(buckets)
        await trainer.take(2, small_tensors(2))
        with pytest.raises(Superseded):
            next(buckets)


async def test_worker_that_does_not_reach_the_group_names_the_key(trainer: BroadcastingTrainer) -> None:
    waiting = asyncio.create_task(trainer.files.broadcaster.park(1, "gloo/2"))
    await asyncio.sleep(0)
    sending = trainer.files.begin_broadcast(1, ())
    sending.listener.close()
    offer = replace(await waiting, trainer="127.0.0.1", here="127.0.0.1", silence_s=1.0)
    with pytest.raises(WeightsUnreachable, match=r"rollout\.weights_host"):
        await asyncio.to_thread(StagedWeights().receive, offer)


async def test_places_are_given_to_servers_of_this_wire_and_token_only(trainer: BroadcastingTrainer) -> None:
    url = trainer.meeting.rpartition("/")[0]
    good = {"count": 1, "wire": "gloo/2"}
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.post(url, json=good)).status_code == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        answer = await client.post(url, json=good | {"wire": "nccl/7"}, headers=bearer)
        assert (answer.status_code, "rollout.weight_transport" in answer.text) == (409, True)
        for bad in ({"count": 0}, {"count": "many"}, {"count": None}, {"wire": None, "count": -1}):
            assert (await client.post(url, json=good | bad, headers=bearer)).status_code in (400, 409)


async def test_place_given_as_the_wait_ends_is_taken() -> None:
    """The others of the group would wait for it in vain."""
    broadcaster, given = Broadcaster(), []
    waiting = asyncio.create_task(broadcaster.park(1, "gloo/2", wait_s=1.0))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, lambda: given.append(broadcaster.open(1, ())))
    time.sleep(1.1)  # both timers are due in one turn of the loop, the place first
    offer = await waiting
    assert given[0].servers == 1
    given[0].listener.close()
    assert offer is not None
    assert offer.name == given[0].name


async def test_trainer_that_cannot_listen_publishes_by_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broadcaster = Broadcaster("203.0.113.9")  # of no machine
    waiting = asyncio.create_task(broadcaster.park(2, "gloo/2"))
    await asyncio.sleep(0)
    assert broadcaster.open(1, ()).servers == 0
    assert await waiting is None
    assert "rollout.weights_host" in caplog.text


# processes that are killed -------------------------------------------------------------------------------------------
class Killable:
    """A server whose worker is a process."""

    weight_workers = 1
    weight_wires = ("gloo/2",)

    def __init__(self, folder: Path, process: ReceivingProcess) -> None:
        self.inner, self.process = StagedServer(folder), process
        self.member, self.stop_after, self.piece_s = self.inner.member, 0, 0.0

    async def stage_weights(self, offer: Any) -> str:
        answer = await self.process.ask(offer=offer.as_dict(), stop_after=self.stop_after, piece_s=self.piece_s)
        if "lost" in answer:
            raise WeightsUnreachable(answer["lost"])
        return str(answer["state"])

    async def receive(self, manifest: Any) -> Any:
        """What the process holds then."""
        found = await self.inner.fetch(manifest)
        return await self.process.ask(manifest=found.as_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)], ids=["killed", "stopped"]
)
async def test_member_lost_in_the_middle_costs_the_others_no_version(tmp_path: Path, how: signal.Signals) -> None:
    async with (
        broadcasting(tmp_path / "published", full_every=9, bucket_bytes=BUCKET_BYTES) as trainer,
        receiving() as one,
        receiving() as other,
    ):
        servers = [Killable(tmp_path / name, process) for name, process in (("a", one), ("b", other))]
        members = Members(trainer, tmp_path)
        for server in servers:
            members.join("", server)
        manifest = await trainer.publish(1, big(1), members=2)
        assert [(await server.receive(manifest))["holds"] for server in servers] == [state(big(1))] * 2
        servers[1].stop_after = 2 * BUCKET_BYTES
        by_file = servers[0].inner.by_file  # of the first version, where the machine was too busy for its broadcast
        publishing = asyncio.create_task(trainer.publish(2, big(2), members=2))
        await other.in_the_middle()
        other.process.send_signal(how)
        manifest = await publishing
        assert (await servers[0].receive(manifest))["holds"] == state(big(2))
        assert servers[0].inner.by_file == by_file + 1, "its broadcast broke"
        await other.kill()
        await cancel_and_wait(list(members.tasks.values()))


@pytest.mark.slow
async def test_member_that_is_too_slow_delays_a_version_until_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One MB in a second; without an end to it, the version would be a minute late."""
    monkeypatch.setattr("penstock.weight_sync.broadcast.seats.SEND_S", 2.0)
    monkeypatch.setattr("penstock.weight_sync.broadcast.seats.SEND_BYTES_PER_S", 1e12)
    async with (
        broadcasting(tmp_path / "published", full_every=9, bucket_bytes=BUCKET_BYTES) as trainer,
        receiving() as process,
    ):
        fast, slow = StagedServer(tmp_path / "fast"), Killable(tmp_path / "slow", process)
        slow.piece_s = 1.0
        members = Members(trainer, tmp_path)
        for server in (fast, slow):
            members.join("", server)
        manifest = await trainer.publish(1, big(1), members=2)
        assert state(await fast.receive(manifest)) == state(big(1))
        assert (fast.member.missed, fast.by_file, fast.member.cause) == (1, 1, ""), "it still holds the version before"
        await cancel_and_wait(list(members.tasks.values()))


@pytest.mark.deep
@pytest.mark.timeout(1800)
async def test_kills_in_mid_bucket_label_no_wrong_version(tmp_path: Path) -> None:
    """Each version of each server, by broadcast or by file, is the trainer's; the victims come back as late joiners."""
    chosen = random.Random(0)
    by_file = survived = 0
    async with (
        broadcasting(tmp_path / "published", full_every=5, bucket_bytes=BUCKET_BYTES) as trainer,
        AsyncExitStack() as stack,
    ):
        members = Members(trainer, tmp_path)
        servers = [
            Killable(tmp_path / str(number), await stack.enter_async_context(receiving())) for number in range(3)
        ]
        for server in servers:
            members.join("", server)
        for version in range(1, KILLS + 1):
            victim = chosen.randrange(3)
            servers[victim].stop_after = chosen.randrange(1, 60) * BUCKET_BYTES
            publishing = asyncio.create_task(trainer.publish(version, big(version), members=3))
            await servers[victim].process.in_the_middle()
            await servers[victim].process.kill()
            manifest = await publishing
            await members.leave(servers[victim])
            servers[victim] = Killable(tmp_path / str(victim), await stack.enter_async_context(receiving()))
            members.join("", servers[victim])
            for server in servers:
                assert (await server.receive(manifest))["holds"] == state(big(version))
            survived += 1
            by_file += sum(server.inner.by_file for server in servers)
        await cancel_and_wait(list(members.tasks.values()))
    assert survived == KILLS
    assert by_file >= KILLS


@pytest.fixture
async def server(trainer: BroadcastingTrainer, tmp_path: Path) -> AsyncIterator[StagedServer]:
    joined = StagedServer(tmp_path / "server", StagedMemory())
    task = asyncio.create_task(joined.member.run(joined, lambda: trainer.meeting))
    yield joined
    await cancel_and_wait([task])


async def received(trainer: BroadcastingTrainer, server: StagedServer, seed: int) -> tuple[Manifest, Any]:
    manifest = await trainer.publish(seed, small_tensors(seed), members=1)
    assert await server.member.holds(manifest)
    return manifest, server.staged.take(manifest)


async def test_memory_is_the_file_that_the_trainer_writes(trainer: BroadcastingTrainer, server: StagedServer) -> None:
    manifest, memory = await received(trainer, server, 1)
    assert same(dict(memory), small_tensors(1))
    shown = f"/proc/{os.getpid()}/fd/{memory.descriptor}"
    assert same(load_file(shown), small_tensors(1))
    assert Path(shown).read_bytes() == trainer.place_of_file(manifest).read_bytes()


async def test_another_worker_maps_what_one_has_received(trainer: BroadcastingTrainer, server: StagedServer) -> None:
    manifest, version = await received(trainer, server, 1)
    holder, other = WeightReader(), WeightReader()
    asking = asyncio.create_task(asyncio.to_thread(other.shared, manifest))
    await asyncio.sleep(0)
    holder.share(manifest, version)
    mapped = await asking
    assert same(dict(mapped), small_tensors(1))
    assert os.fstat(mapped.descriptor).st_ino == os.fstat(version.descriptor).st_ino, "one memory"
    assert (holder.verified, other.verified) == (0, 0), "checked as it came, and not again"


def is_open(name: str) -> bool:
    """By this process."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if name in os.readlink(link):
                return True
    return False


async def test_version_that_nobody_takes_is_freed_by_the_next(
    trainer: BroadcastingTrainer, server: StagedServer
) -> None:
    for version in (101, 102):
        manifest = await trainer.publish(version, small_tensors(version), members=1)
        assert await server.member.holds(manifest)
    await until(lambda: not is_open("memfd:broadcast-101"))
    assert is_open("memfd:broadcast-102")
    assert same(dict(server.staged.take(manifest)), small_tensors(102))
    await until(lambda: not is_open("memfd:broadcast-102"))


async def test_broadcast_that_breaks_off_drops_what_came_before_it(
    trainer: BroadcastingTrainer, server: StagedServer
) -> None:
    before = await trainer.publish(1, small_tensors(), members=1)
    assert await server.member.holds(before)
    await until(lambda: trainer.files.broadcaster.parked == 1)
    give_up_soon(server.staged._membership)
    trainer.files.begin_broadcast(2, trainer.source.tensors)
    await until(lambda: server.member.missed == 1)
    with pytest.raises(WeightsUnreachable, match="does not hold"):
        server.staged.take(before)


async def test_broadcast_that_breaks_off_in_its_middle_gives_up_its_memory(
    trainer: BroadcastingTrainer, server: StagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps the error, as a log record does, keeps no half version."""
    errors = list[Exception]()

    async def stage(offer: Any) -> str:
        try:
            return str(await asyncio.to_thread(server.staged.receive, offer))
        except WeightsUnreachable as error:
            errors.append(error)
            raise

    monkeypatch.setattr(server, "stage_weights", stage)
    held = HeldTrainer(trainer, 2, dies=True)
    held.go_on.set()
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        await trainer.publish(201, small_tensors(1), members=1)
    await until(lambda: server.member.missed == 1)
    assert (len(errors), is_open("memfd:broadcast-201")) == (1, False)
    manifest = await trainer.publish(202, small_tensors(2), members=1)
    assert same(await server.receive(manifest), small_tensors(2))
