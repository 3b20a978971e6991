"""Broadcasts over the wire between GPUs, between memories of hosts here.

NCCL's calls are those of `fake_nccl.c`, CUDA's streams those of `fake_cuda.py`.

What NCCL itself does with them needs GPUs; `scripts/gpu-check` runs that.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import BroadcastingTrainer, StagedServer, broadcasting
from tests.until import until
from tests.weight_sync.broadcast.fake_cuda import streams_of
from tests.weight_sync.broadcast.test_broadcast import Killable, Members, same
from tests.weight_sync.broadcast.test_senders import SIZES, WORKERS, WORLD, Broadcast, staged
from tests.weight_sync.broadcast.test_source import Ranks
from tests.weight_sync.conftest import next_version, small_tensors
from tests.weight_sync.processes import BUCKET_BYTES, big, receiving, state

torch = pytest.importorskip("torch")

from penstock.common import cancel_and_wait
from penstock.weight_sync import Broadcaster, StagedMemory, WeightFiles
from penstock.weight_sync.broadcast.group import NcclGroup, NcclStream, leave_groups
from penstock.weight_sync.broadcast.nccl import Nccl, NcclError
from penstock.weight_sync.broadcast.offer import Member

pytestmark = pytest.mark.torch
WIRE = "nccl/2.27.3"
BOTH = (WIRE, "gloo/2")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler (cc) for the stand-in of NCCL: apt-get install gcc")
    made = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-o", made, source], check=True)
    return str(made)


@pytest.fixture(autouse=True)
def loaded(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """For this process and those that it starts."""
    folder = tmp_path / "ids"
    folder.mkdir()
    monkeypatch.setenv("PENSTOCK_FAKE_NCCL", str(folder))
    monkeypatch.setenv("PENSTOCK_FAKE_NCCL_LIBRARY", library)
    monkeypatch.setattr(Nccl, "path", library)
    monkeypatch.setattr(NcclStream, "_idle", {})
    Nccl.load.cache_clear()  # type: ignore[attr-defined]
    with streams_of(library):
        yield
    Nccl.load.cache_clear()  # type: ignore[attr-defined]


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[BroadcastingTrainer]:
    async with broadcasting(tmp_path / "published", full_every=9, silence_s=20.0) as opened:
        opened.files.broadcaster._wires = frozenset(BOTH)
        yield opened


class GpuServer(StagedServer):
    weight_wires = BOTH


def test_version_is_the_librarys() -> None:
    assert Nccl.load().version == "2.27.3"


async def test_members_have_every_version_and_take_no_file(trainer: BroadcastingTrainer, tmp_path: Path) -> None:
    members = Members(trainer, tmp_path)
    servers = [members.join(name, GpuServer(tmp_path / name, StagedMemory())) for name in ("a", "b")]
    tensors = small_tensors()
    for version in range(1, 4):
        manifest = await trainer.publish(version, tensors, members=2)
        for server in servers:
            assert same(await server.receive(manifest), tensors)
        tensors = next_version(tensors, version)
    assert [(server.member.received, server.by_file) for server in servers] == [(3, 0), (3, 0)]
    await cancel_and_wait(list(members.tasks.values()))


async def test_wire_is_the_first_that_both_have(trainer: BroadcastingTrainer) -> None:
    broadcaster = trainer.files.broadcaster
    for asked, given in ((",".join(BOTH), WIRE), ("nccl/2.28.9,gloo/2", "gloo/2"), ("gloo/2", "gloo/2")):
        waiting = asyncio.create_task(broadcaster.park(1, asked))
        await asyncio.sleep(0)
        sending = broadcaster.open(1, ())
        sending.listener.close()
        offer = await waiting
        assert (offer.wire, offer.member(0).wire, sending.member.wire) == (given, given, given)
        assert offer.deadline_s == sending.deadline_s == (80.0 if given == WIRE else 20.0), "NCCL has to form its group"


async def test_group_is_of_the_wire_of_most_servers() -> None:
    broadcaster = Broadcaster(wires=BOTH)
    wires = ["gloo/2", ",".join(BOTH), "gloo/2"]
    waiting = [asyncio.create_task(broadcaster.park(2, wire)) for wire in wires]
    await asyncio.sleep(0)
    sending = broadcaster.open(1, ())
    sending.listener.close()
    first, other, second = await asyncio.gather(*waiting)
    assert other is None, "it takes the file"
    assert (sending.servers, sending.member.size, sending.member.wire) == (2, 5, "gloo/2")
    assert [(offer.first_rank, offer.wire) for offer in (first, second)] == [(1, "gloo/2"), (3, "gloo/2")]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.slow
async def test_member_lost_in_the_middle_costs_the_others_no_version(tmp_path: Path, how: signal.Signals) -> None:
    """torch's own NCCL groups would end the trainer."""
    async with (
        broadcasting(tmp_path / "published", full_every=9, bucket_bytes=BUCKET_BYTES, silence_s=10.0) as trainer,
        receiving() as process,
    ):
        trainer.files.broadcaster._wires = frozenset(BOTH)
        members, stays = Members(trainer, tmp_path), GpuServer(tmp_path / "a", StagedMemory())
        lost = Killable(tmp_path / "b", process)
        lost.weight_wires, lost.stop_after = BOTH, 2 * BUCKET_BYTES
        for server in (stays, lost):
            members.join("", server)
        publishing = asyncio.create_task(trainer.publish(1, big(1), members=2))
        await process.in_the_middle()
        process.process.send_signal(how)
        manifest = await publishing
        assert state(await stays.receive(manifest)) == state(big(1))
        assert (stays.member.missed, stays.by_file) == (1, 1)
        await process.kill()
        await cancel_and_wait(list(members.tasks.values()))


def test_ranks_send_in_one_order_on_one_stream_of_each_member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several messages of each rank are under way at once; communicators of one device never run side by side."""
    streams = list[Any]()
    made = torch.cuda.Stream
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or made(device))
    monkeypatch.setattr("penstock.weight_sync.broadcast.stream_places.APART_BYTES", 1)
    ranks = Ranks(WORLD, monkeypatch)
    broadcast = Broadcast(ranks, SIZES["even"], staged, bucket_bytes=2000, wire=WIRE)
    with ThreadPoolExecutor(WORKERS) as threads:
        found, workers = broadcast.run(threads, tmp_path / "w")
    ranks.stop()
    assert found.done == WORKERS
    assert [worker.result()[1] for worker in workers] == [broadcast.stream.numpy().tobytes()] * WORKERS
    assert len(streams) == 2 * (WORLD + WORKERS), "one for broadcasts, one for copies"


def formed(name: str, receiver: NcclStream, silence_s: float = 5.0) -> tuple[NcclGroup, NcclGroup]:
    """(a sender, a receiver) of a group of two."""
    store = torch.distributed.HashStore()
    members = [Member(0, name, rank, 2, 1 << 20, silence_s, WIRE) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        streams = NcclStream(torch.device("cpu")), receiver
        sender, other = threads.map(lambda member, stream: NcclGroup(store, member, stream), members, streams)
    return sender, other


def test_bytes_that_came_are_taken_where_the_sender_of_later_ones_is_gone() -> None:
    """A copy on the stream of the broadcasts would wait for the later one, without a deadline."""
    receiver, sent = NcclStream(torch.device("cpu")), torch.arange(100, dtype=torch.uint8)
    groups = [formed(name, receiver) for name in ("a", "b")]
    (sender, first), (_, second) = groups
    came, never = torch.zeros_like(sent), torch.zeros_like(sent)
    sending, *arriving = sender.begin(sent), first.begin(came), second.begin(never)
    sending.wait()
    arriving[0].wait()
    assert torch.equal(came, sent)
    with pytest.raises(NcclError, match="silent for 5 s"):
        arriving[1].wait()
    leave_groups(group for pair in groups for group in pair)


def test_broadcast_waits_for_the_copy_into_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, awaited = NcclStream(torch.device("cpu")), list[tuple[int, int]]()
    sender, other = formed("a", receiver)
    broadcast = sender._communicator.broadcast

    def watched(*arguments: Any) -> None:
        awaited.append((sender._stream.stream.awaited, sender._stream.copies.works))  # type: ignore[attr-defined]
        broadcast(*arguments)

    monkeypatch.setattr(sender._communicator, "broadcast", watched)
    for _ in range(2):
        memory = torch.zeros(100, dtype=torch.uint8)
        for transfer in [sender.begin(memory), other.begin(memory.clone())]:
            transfer.wait()
    assert awaited == [(1, 1), (2, 2)]
    leave_groups((sender, other))


async def test_buffers_are_memory_of_the_stream_that_one_broadcast_leaves_to_the_next(
    trainer: BroadcastingTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the trainer's own stream may be in use by a step that is queued there."""
    streams, without, made, empty = list[Any](), list[Any](), torch.cuda.Stream, torch.empty

    def allocate(*shape: int, **settings: Any) -> Any:
        if "device" in settings and torch.cuda.current_stream() is None:
            without.append(shape)
        return empty(*shape, **settings)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or made(device))
    monkeypatch.setattr(torch, "empty", allocate)
    members = Members(trainer, tmp_path)
    server = members.join("a", GpuServer(tmp_path / "a", StagedMemory()))
    for version in range(1, 4):
        manifest = await trainer.publish(version, small_tensors(), members=1)
        assert same(await server.receive(manifest), small_tensors())
    assert server.member.received == 3
    assert without == []
    assert len(streams) == 4, "two of each member"
    await cancel_and_wait(list(members.tasks.values()))


def test_member_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    library = Nccl.load()
    with pytest.raises(NcclError, match=r"silent for 0\.2 s"):
        library.join(2, library.unique_id(), 0, 0.2)
    assert list((tmp_path / "ids").iterdir()) == [], "its place is given up"


def test_forming_a_group_may_take_longer_than_a_broadcast_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member begins seconds after the other, as on a GPU that NCCL has not used yet."""
    join = Nccl.join

    def slow(library: Nccl, size: int, unique_id: bytes, rank: int, *more: Any) -> Any:
        if rank:
            time.sleep(1.0)
        return join(library, size, unique_id, rank, *more)

    monkeypatch.setattr(Nccl, "join", slow)
    leave_groups(formed("late", NcclStream(torch.device("cpu")), silence_s=0.3))


def test_call_that_is_refused_is_an_error() -> None:
    library = Nccl.load()
    name, memory = library.unique_id(), torch.zeros(8, dtype=torch.uint8)
    alone = library.join(1, name, 0, 20.0)
    with pytest.raises(NcclError, match="NCCL: other"):
        library.join(1, name, 0, 20.0)
    with pytest.raises(NcclError, match="NCCL: other"):
        alone.broadcast(memory.data_ptr(), 8, None)  # no stream
    for _ in range(2):
        alone.abort()


async def test_member_whose_group_broke_says_why() -> None:
    library = Nccl.load()
    name, memory = library.unique_id(), torch.zeros(8, dtype=torch.uint8)
    first, second = await asyncio.gather(*(asyncio.to_thread(library.join, 2, name, rank, 20.0) for rank in range(2)))
    first.abort()
    second.broadcast(memory.data_ptr(), 8, torch.cuda.Stream(memory.device).cuda_stream)
    with pytest.raises(NcclError, match="NCCL: remote process exited"):
        await until(lambda: second.busy is None)  # it may be posted before it fails
    second.abort()


async def test_member_without_the_library_takes_files(
    trainer: BroadcastingTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    members = Members(trainer, tmp_path)
    server = members.join("a", GpuServer(tmp_path / "a", StagedMemory()))
    monkeypatch.setattr(Nccl, "path", str(tmp_path / "libnccl.so.2"))
    manifest = await trainer.publish(1, small_tensors(), members=1)
    assert same(await server.receive(manifest), small_tensors())
    assert (server.member.missed, server.by_file) == (1, 1)
    assert "version 1: the broadcast ended early" in caplog.text
    # Trainer and member are of one process here: whichever comes second finds the other gone.
    assert "NCCL cannot be loaded: " in caplog.text
    await cancel_and_wait(list(members.tasks.values()))


async def test_trainer_sends_over_gloo_unless_it_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    files = WeightFiles(tmp_path / "published", "broadcast", token="secret")
    assert files.broadcaster is not None
    with pytest.raises(Exception, match=f"this trainer broadcasts over gloo/2, the server over '{WIRE}'"):
        await files.broadcaster.park(1, WIRE)


@pytest.mark.parametrize(
    ("name", "queues", "wires", "warning"),
    [
        ("", "8", set(BOTH), ""),
        ("libnccl.so.2", "8", {"gloo/2"}, "NCCL cannot be used"),
        ("", "1", {"gloo/2"}, "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
    ],
    ids=["nccl", "no library", "one queue"],
)
def test_trainer_that_cannot_use_nccl_beside_its_steps_sends_over_gloo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    queues: str,
    wires: set[str],
    warning: str,
) -> None:
    """With one queue of launches a bucket and a collective of a step, in another order on another rank, would wait for
    each other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    if name:
        monkeypatch.setattr(Nccl, "path", str(tmp_path / name))
    files = WeightFiles(tmp_path / "published", "broadcast", token="secret", from_gpus=True)
    assert files.broadcaster is not None
    assert files.broadcaster._wires == wires
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)
