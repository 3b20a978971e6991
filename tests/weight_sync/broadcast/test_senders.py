"""A broadcast of several trainer ranks: each sends its own bytes, to two servers of two workers.

Ranks and workers are threads here; `sender_ranks` has ranks that are processes, which can be killed at any line.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.weight_sync.broadcast.test_source import Ranks, sharded

torch = pytest.importorskip("torch")

from tests.weight_sync.sender_ranks import IN_THE_MIDDLE

from penstock.weight_sync import (
    Broadcaster,
    JoinedBroadcast,
    Membership,
    Offer,
    StagedWeights,
    StreamedVersion,
    WeightsBroken,
    WeightsUnreachable,
    state_of,
    stream_version,
)
from penstock.weight_sync.broadcast.group import BroadcastGroup, GlooGroup, leave_groups
from penstock.weight_sync.broadcast.rank_wire import RankWire
from penstock.weight_sync.broadcast.seats import Sending
from penstock.weight_sync.broadcast.senders import Members, OwnGroup
from penstock.weight_sync.broadcast.shards import Superseded

pytestmark = pytest.mark.torch
WORLD, WORKERS = 4, 4
SIZES = {
    "even": [(40, 40, 40, 40)] * 5,
    "uneven": [(3, 0, 50, 1), (0, 0, 0, 9), (7, 7, 7, 0), (0, 0, 0, 0), (1, 2, 3, 4)],
    "none on rank 0": [(0, 30, 30, 30), (0, 0, 11, 0)],
    "one tensor after the other": [(25, 0, 0, 0), (0, 25, 0, 0), (0, 0, 25, 0), (0, 0, 0, 25)],
}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    opened = Ranks(WORLD, monkeypatch)
    yield opened
    opened.stop()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * WORKERS) as pool:
        yield pool


class Broadcast:
    """Version 1 of the ranks, on its way to two servers; `receive` is what each worker does with its offer."""

    def __init__(
        self,
        ranks: Ranks,
        sizes: list[tuple[int, ...]],
        receive: Callable[[Any, int], Any],
        *,
        bucket_bytes: int,
        silence_s: float = 60.0,
        wire: str = "gloo/2",
        order: tuple[int, ...] = (),
    ) -> None:
        shards, self.stream = sharded(1, sizes, order)
        ranks.take(1, shards)
        self.source, self.receive = ranks.sources[0], receive
        self.sending, offers = asyncio.run(self._places(bucket_bytes, silence_s, wire))
        self.places = [(offer, worker) for offer in offers for worker in range(2)]

    async def _places(self, bucket_bytes: int, silence_s: float, wire: str) -> tuple[Sending, list[Any]]:
        broadcaster = Broadcaster(wires=[wire], bucket_bytes=bucket_bytes, silence_s=silence_s)
        waiting = [asyncio.create_task(broadcaster.park(2, wire)) for _ in range(2)]
        await asyncio.sleep(0)
        sending = broadcaster.open(1, self.source.tensors, self.source.sizes, self.source.orders)
        here = {"trainer": "127.0.0.1", "here": "127.0.0.1"}
        return sending, [replace(offer, **here) for offer in await asyncio.gather(*waiting) if offer]

    def run(self, threads: ThreadPoolExecutor, path: Path) -> tuple[StreamedVersion, list[Future[Any]]]:
        """What rank 0 says of the version, whose file is `path`, and what the workers have."""
        workers = [threads.submit(self.receive, *place) for place in self.places]
        bucket_bytes = self.places[0][0].bucket_bytes
        found = stream_version(self.source, 1, path, write=True, bucket_bytes=bucket_bytes, sending=self.sending)
        for worker in workers:
            worker.exception(60)
        return found, workers

    def is_whole(self, path: Path) -> bool:
        return path.read_bytes().endswith(self.stream.numpy().tobytes())


def staged(offer: Any, worker: int) -> tuple[str, bytes]:
    memory = StagedWeights()
    state = memory.receive(offer, worker)
    assert memory._held is not None
    return state, b"".join(tensor.numpy().tobytes() for tensor in memory._held[2].values())


@pytest.mark.parametrize(("bucket_bytes", "apart_bytes"), [(64, 1), (200, 1 << 18), (10_000, 100), (10_000, 1 << 18)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_worker_has_the_stream_and_each_rank_sends_its_own_bytes(
    ranks: Ranks,
    threads: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[tuple[int, ...]],
    bucket_bytes: int,
    apart_bytes: int,
) -> None:
    monkeypatch.setattr("penstock.weight_sync.broadcast.stream_places.APART_BYTES", apart_bytes)
    sent = dict[str, int]()

    def send(group: OwnGroup, memory: Any, send: Any = OwnGroup.send) -> None:
        name = threading.current_thread().name
        sent[name] = sent.get(name, 0) + sum(each.nbytes for each in memory)
        send(group, memory)

    monkeypatch.setattr(OwnGroup, "send", send)
    broadcast = Broadcast(ranks, sizes, staged, bucket_bytes=bucket_bytes)
    found, workers = broadcast.run(threads, tmp_path / "w")
    assert found.done == WORKERS
    expected = state_of(found.tensors), broadcast.stream.numpy().tobytes()
    assert [worker.result() for worker in workers] == [expected] * WORKERS
    assert broadcast.is_whole(tmp_path / "w")
    own = [4 * sum(column) for column in zip(*sizes, strict=True)][1:]
    assert sorted(sent.values()) == sorted(filter(None, own)), "and rank 0 asks for nothing else"
    assert not [words for _, words in ranks.wire.sent if words[0] == 1 and len(words) == 4]


@pytest.mark.parametrize("sizes", [SIZES["even"], SIZES["uneven"]], ids=["even", "uneven"])
def test_every_worker_has_a_stream_whose_ranks_do_not_follow_each_other(
    ranks: Ranks, threads: ThreadPoolExecutor, tmp_path: Path, sizes: list[tuple[int, ...]]
) -> None:
    """The layout of stacked experts under expert parallelism."""
    broadcast = Broadcast(ranks, sizes, staged, bucket_bytes=200, order=(0, 2, 1, 3))
    found, workers = broadcast.run(threads, tmp_path / "w")
    assert broadcast.is_whole(tmp_path / "w")
    expected = state_of(found.tensors), broadcast.stream.numpy().tobytes()
    assert [worker.result() for worker in workers] == [expected] * WORKERS


def in_place_until(lost: int, bucket: int) -> Callable[[Any, int], int]:
    """Worker `lost` of the first server leaves at that bucket; the bytes that one has otherwise."""

    def receive(offer: Any, worker: int) -> int:
        came = 0
        with closing(JoinedBroadcast(offer, Membership(), worker)) as joined:
            for number, piece in enumerate(joined.buckets()):
                if (offer.first_rank, worker, number) == (1, lost, bucket):
                    return came
                came += len(piece)
        return came

    return receive


@pytest.mark.parametrize("bucket", [0, 3])
def test_worker_that_is_lost_costs_the_others_this_broadcast_and_the_file_nothing(
    ranks: Ranks, threads: ThreadPoolExecutor, tmp_path: Path, bucket: int
) -> None:
    broadcast = Broadcast(ranks, [(4000,) * WORLD] * 9, in_place_until(1, bucket), bucket_bytes=16_000, silence_s=2.0)
    found, workers = broadcast.run(threads, tmp_path / "w")
    assert broadcast.is_whole(tmp_path / "w")
    assert found.done < WORKERS
    lost = [worker.exception() for worker in workers if worker.exception()]
    assert all(isinstance(error, (WeightsBroken, WeightsUnreachable)) for error in lost)
    again = stream_version(broadcast.source, 1, tmp_path / "w", write=False, bucket_bytes=777)
    assert again == replace(found, done=0), "the ranks answer as before"


@pytest.mark.parametrize("number", [0, 5])
def test_sender_that_loses_its_group_costs_the_broadcast_and_the_file_nothing(
    ranks: Ranks, threads: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sends = iter(range(1000))

    def send(group: OwnGroup, memory: Any, send: Any = OwnGroup.send) -> None:
        if next(sends) == number:
            group.leave()
        send(group, memory)

    monkeypatch.setattr(OwnGroup, "send", send)
    broadcast = Broadcast(ranks, [(4000,) * WORLD] * 9, staged, bucket_bytes=16_000, silence_s=2.0)
    found, workers = broadcast.run(threads, tmp_path / "w")
    assert broadcast.is_whole(tmp_path / "w")
    assert found.done == 0
    assert all(isinstance(worker.exception(), WeightsUnreachable) for worker in workers)


def test_rank_that_cannot_join_costs_the_broadcast_and_the_file_nothing(
    ranks: Ranks, threads: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnGroup, "join", lambda *_: None)
    broadcast = Broadcast(ranks, SIZES["even"], staged, bucket_bytes=64, silence_s=5.0)
    found, workers = broadcast.run(threads, tmp_path / "w")
    assert broadcast.is_whole(tmp_path / "w")
    assert found.done == 0
    assert all(isinstance(worker.exception(), WeightsUnreachable) for worker in workers)
    assert all("rank 1 of the trainer sends is not complete" in str(worker.exception()) for worker in workers)


@pytest.mark.parametrize("begins", [True, False], ids=["before it begins", "before it ends"])
def test_trainer_that_stops_asks_nothing_of_ranks_that_have_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, begins: bool
) -> None:
    """Nobody would answer: the thread that publishes would wait until the wire's deadline."""
    ranks = Ranks(WORLD, monkeypatch)
    broadcast = Broadcast(ranks, SIZES["even"], staged, bucket_bytes=64, silence_s=1.0)  # no worker comes
    broadcast.source.wire.close()
    ranks.stop()
    asked = list(ranks.wire.sent)
    if begins:
        with pytest.raises(Superseded, match="the trainer stops"):
            stream_version(broadcast.source, 1, tmp_path / "w", write=True, bucket_bytes=64, sending=broadcast.sending)
    else:
        Members(broadcast.sending, broadcast.source.wire).close()
    assert ranks.wire.sent == asked


def test_rank_is_invited_when_the_group_before_its_own_is_formed(
    ranks: Ranks, threads: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of many ranks would else wait longer than the silence, and leave."""
    events, rank0 = list[str](), threading.current_thread()

    class Group(GlooGroup):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if threading.current_thread() is rank0:
                events.append("formed")

    def invite(wire: RankWire, rank: int, place: bytes, invite: Any = RankWire.invite) -> None:
        events.append(f"rank {rank}")
        invite(wire, rank, place)

    monkeypatch.setattr("penstock.weight_sync.broadcast.group.GlooGroup", Group)
    monkeypatch.setattr(RankWire, "invite", invite)
    found, _ = Broadcast(ranks, SIZES["even"], staged, bucket_bytes=64).run(threads, tmp_path / "w")
    assert found.done == WORKERS
    assert events == ["formed", "rank 1", "formed", "rank 2", "formed", "rank 3", "formed"]


def test_groups_are_left_at_once() -> None:
    all_close = threading.Barrier(3)
    groups = [Mock(close=Mock(side_effect=lambda: all_close.wait(60))) for _ in range(3)]
    leave_groups(groups)
    assert not all_close.broken


def test_deadline_holds_within_a_bucket_of_many_messages(ranks: Ranks) -> None:
    broadcast = Broadcast(ranks, SIZES["even"], staged, bucket_bytes=64)
    members, group = Members(broadcast.sending, broadcast.source.wire), Mock()
    broadcast.sending.membership.groups, members._give_up_at = {0: group}, math.inf

    def pass_deadline() -> None:
        members._give_up_at = -math.inf

    group.begin.return_value.wait = Mock(side_effect=pass_deadline)
    with closing(members):
        for _ in range(3):
            members.begin(0, torch.zeros(1, dtype=torch.uint8))
        assert not members.wait()
    assert group.begin.return_value.wait.call_count == 1
    assert group.close.call_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_rank_that_is_lost_while_it_sends_ends_the_version_for_all(tmp_path: Path, how: signal.Signals) -> None:
    """The trainer announces nothing, and no worker has a version: the run's ranks start again."""
    async with AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(sender(rank, tmp_path / "store", "2,9")) for rank in range(3)]
        offer = Offer.parse(json.loads(await ranks[0].stdout.readline()))
        offer = replace(offer, trainer="127.0.0.1", here="127.0.0.1")
        held = [StagedWeights() for _ in range(2)]
        workers = [asyncio.create_task(asyncio.to_thread(one.receive, offer, n)) for n, one in enumerate(held)]
        assert [json.loads(await ranks[2].stdout.readline()) for _ in range(2)] == ["ready", IN_THE_MIDDLE]
        ranks[2].send_signal(how)
        async with asyncio.timeout(200):
            assert "error" in json.loads(await ranks[0].stdout.readline())
            ends = await asyncio.gather(*workers, return_exceptions=True)
        assert [type(end) for end in ends] == [WeightsUnreachable] * 2
        assert [one._held for one in held] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "awaited"), [(1, "0"), (2, "1")], ids=["a worker", "a rank that sends"])
async def test_trainer_that_stops_waits_for_no_member_that_is_missing(
    tmp_path: Path, workers: int, awaited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the silence, an hour here: neither its rank 0 nor the workers that came."""
    came = threading.Semaphore(0)

    def wait(group: BroadcastGroup, key: str, wait_s: float, wait: Any = BroadcastGroup._until_set) -> None:
        came.release()
        wait(group, key, wait_s)

    monkeypatch.setattr(BroadcastGroup, "_until_set", wait)
    async with AsyncExitStack() as stack:
        ranks = [
            await stack.enter_async_context(sender(rank, tmp_path / "store", "1,-1", 2, 3600)) for rank in range(2)
        ]
        offer = Offer.parse(json.loads(await ranks[0].stdout.readline()))
        offer = replace(offer, trainer="127.0.0.1", here="127.0.0.1")
        receive = [asyncio.to_thread(StagedWeights().receive, offer, number) for number in range(workers)]
        received = [asyncio.create_task(one) for one in receive]
        while json.loads(await ranks[0].stdout.readline()) != awaited:
            pass
        for _ in range(workers):
            assert await asyncio.to_thread(came.acquire, timeout=200)
        ranks[0].stdin.close()
        async with asyncio.timeout(120):
            assert "error" in json.loads(await ranks[0].stdout.readline())
            ends = await asyncio.gather(*received, return_exceptions=True)
        assert [type(end) for end in ends] == [WeightsUnreachable] * workers


@asynccontextmanager
async def sender(rank: int, store: Path, stop_at: str, world: int = 3, *more: float) -> AsyncIterator[Any]:
    command = [sys.executable, "-m", "tests.weight_sync.sender_ranks", str(rank), str(world), str(store), stop_at]
    command += [str(one) for one in more]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
