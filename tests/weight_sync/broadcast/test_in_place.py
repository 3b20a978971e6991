"""Broadcasts in place: what came whole is what was announced; what broke off is no version, and says so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broadcasting import BroadcastingTrainer, HeldTrainer, InPlaceServer, broadcasting, give_up_soon
from tests.until import until
from tests.weight_sync.conftest import altered, next_version, other_checksum, small_tensors

torch = pytest.importorskip("torch")

from penstock.common import cancel_and_wait
from penstock.weight_sync import (
    StreamTensor,
    WeightPublisher,
    WeightsBroken,
    WeightsUnreachable,
    can_stream,
    file_parts,
    open_published,
    tensor_parts,
    whole_tensors,
)

pytestmark = pytest.mark.torch


@asynccontextmanager
async def member_of(trainer: BroadcastingTrainer, folder: Path) -> AsyncIterator[InPlaceServer]:
    """A server that waits for broadcasts whenever its engine does not stand still."""
    server = InPlaceServer(folder)
    task = asyncio.create_task(server.member.run(server, lambda: "" if server.stands_still else trainer.meeting))
    try:
        yield server
    finally:
        await cancel_and_wait([task])


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[BroadcastingTrainer]:
    async with broadcasting(tmp_path / "published", full_every=9) as opened:
        yield opened


async def test_what_came_in_place_is_what_was_announced(
    trainer: BroadcastingTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with member_of(trainer, tmp_path / "a") as server:
        for version in (1, 2, 3):
            manifest = await trainer.publish(version, small_tensors(version), members=1)
            assert await server.member.holds(manifest)
            assert server.stands_still
            assert server.holds(small_tensors(version))
            await until(lambda: not server.member.busy)
            server.stands_still = False  # labelled
        assert (server.member.received, server.member.missed, server.by_file) == (3, 0, 0)
        assert "other tensors" not in caplog.text


async def test_broken_broadcast_in_place_leaves_no_version(
    trainer: BroadcastingTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with member_of(trainer, tmp_path / "a") as server:
        first = await trainer.publish(1, small_tensors(1), members=1)
        assert await server.member.holds(first)
        server.stands_still = False
        held = HeldTrainer(trainer, 5, dies=True)
        lost = asyncio.create_task(trainer.publish(2, small_tensors(2), members=1))
        await held.reached()
        held.go_on.set()
        with pytest.raises(RuntimeError, match="the trainer is gone"):
            await lost
        await until(lambda: not server.member.busy)
        assert server.stands_still
        assert not server.holds(small_tensors(1))
        assert not server.holds(small_tensors(2))
        assert "version 2: the broadcast ended early" in server.member.cause
        assert (server.member.received, server.member.missed) == (1, 1)
        assert not await server.member.holds(first)
        assert trainer.files.broadcaster.parked == 0, "an engine without a version waits for no broadcast"


async def test_trainer_that_stops_ends_its_broadcast_with_the_bucket(
    trainer: BroadcastingTrainer, tmp_path: Path
) -> None:
    """And writes the file of that version."""
    async with member_of(trainer, tmp_path / "a") as server:
        held = HeldTrainer(trainer, 5)
        publishing = asyncio.create_task(trainer.publish(1, small_tensors(1), members=1))
        await held.reached()
        trainer.files.broadcaster.close()
        held.go_on.set()
        manifest = await publishing
        await until(lambda: not server.member.busy)
        assert (server.member.received, server.member.missed) == (0, 1)
        assert not await server.member.holds(manifest)
        assert trainer.place_of_file(manifest).is_file()


async def test_broadcast_that_ends_before_its_first_bucket_costs_nothing(
    trainer: BroadcastingTrainer, tmp_path: Path
) -> None:
    async with member_of(trainer, tmp_path / "a") as server:
        await server.member.holds(await trainer.publish(1, small_tensors(1), members=1))
        server.stands_still = False
        held = HeldTrainer(trainer, 0, dies=True)
        lost = asyncio.create_task(trainer.publish(2, small_tensors(2), members=1))
        await held.reached()
        held.go_on.set()
        with pytest.raises(RuntimeError, match="the trainer is gone"):
            await lost
        await until(lambda: server.member.missed == 1 and not server.member.busy)
        assert not server.stands_still
        assert server.holds(small_tensors(1))


async def test_group_that_is_never_complete_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        broadcasting(tmp_path / "published", full_every=9) as trainer,
        member_of(trainer, tmp_path / "a") as server,
    ):
        await server.member.holds(await trainer.publish(1, small_tensors(1), members=1))
        server.stands_still = False
        await until(lambda: trainer.files.broadcaster.parked == 1)
        give_up_soon(server.membership)
        trainer.files.begin_broadcast(2, trainer.source.tensors)
        await until(lambda: server.member.missed == 1)
        assert "version 2: the broadcast ended early: the group in which rank 0 of the trainer sends" in caplog.text
        assert not server.stands_still
        assert server.holds(small_tensors(1))


async def test_member_in_place_is_free_once_its_engine_is_gone(trainer: BroadcastingTrainer, tmp_path: Path) -> None:
    async with member_of(trainer, tmp_path / "a") as server:
        held = HeldTrainer(trainer, 5)
        publishing = asyncio.create_task(trainer.publish(1, small_tensors(1), members=1))
        await held.reached()
        assert server.member.busy
    assert not server.member.busy
    held.go_on.set()
    assert not await server.member.holds(await publishing)


async def test_version_in_place_that_nobody_announces_is_given_up(
    trainer: BroadcastingTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weight_sync.broadcast.member.ANNOUNCE_S", 0.2)
    async with member_of(trainer, tmp_path / "a") as server:
        manifest = await trainer.publish(1, small_tensors(1), members=1)
        await until(lambda: server.member.received == 1 and not server.member.busy)
        assert "not announced in 0.2 s" in server.member.cause
        assert not await server.member.holds(manifest), "too late: its file is taken"


async def test_other_tensors_than_announced_are_not_held_in_place(
    trainer: BroadcastingTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with member_of(trainer, tmp_path / "a") as server:
        manifest = altered(await trainer.publish(1, small_tensors(1), members=1), other_checksum)
        assert not await server.member.holds(manifest)
        await until(lambda: not server.member.busy)
        assert "other" in server.member.cause
        assert "version 1 came as other tensors than announced" in caplog.text


async def test_member_that_must_not_be_one_leaves_its_place(
    trainer: BroadcastingTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcaster = trainer.files.broadcaster
    # No side gives up a place by itself.
    monkeypatch.setattr(broadcaster, "park", partial(broadcaster.park, wait_s=600.0))
    monkeypatch.setattr("penstock.weight_sync.broadcast.member.ANSWER_S", 600.0)
    async with member_of(trainer, tmp_path / "a") as server:
        await until(lambda: trainer.files.broadcaster.parked == 1)
        assert not server.member.busy
        server.stands_still = True  # it has begun to load a file
        await until(lambda: trainer.files.broadcaster.parked == 0)
        server.stands_still = False
        await until(lambda: trainer.files.broadcaster.parked == 1)


# the stream ----------------------------------------------------------------------------------------------------------
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), bucket=st.integers(1, 11))
def test_stream_is_cut_at_its_tensors(sizes: list[int], bucket: int) -> None:
    tensors = [StreamTensor(f"t{number}", (size,), "int16") for number, size in enumerate(sizes)]
    values = [torch.arange(size, dtype=torch.int16) + 100 * number for number, size in enumerate(sizes)]
    stream = torch.cat(values).view(torch.uint8).numpy().data if sum(sizes) else memoryview(b"")
    buckets = [stream[at : at + bucket] for at in range(0, len(stream), bucket)]
    found = list(whole_tensors(tensors, iter(buckets)))
    assert [name for name, _ in found] == [tensor.name for tensor in tensors]
    assert all(torch.equal(tensor, value) for (_, tensor), value in zip(found, values, strict=True))


@pytest.mark.parametrize(("length", "words"), [(7, "ends within tensor 'b'"), (9, "longer than its tensors")])
def test_stream_of_another_length_is_an_error(length: int, words: str) -> None:
    tensors = [StreamTensor("a", (4,), "uint8"), StreamTensor("b", (4,), "uint8")]
    with pytest.raises(ValueError, match=words):
        list(tensor_parts(tensors, iter([memoryview(bytearray(length))])))


def test_file_is_the_parts_of_its_tensors(tmp_path: Path) -> None:
    """A tensor of more than a MiB is several, one without a byte is one."""
    sent = {"large": torch.rand(700_001), "empty": torch.empty(0, 4), "small": torch.rand(5)}
    manifest = WeightPublisher(tmp_path, "shm").write(1, sent.items())
    found = {name: torch.zeros(tensor.nbytes, dtype=torch.uint8) for name, tensor in sent.items()}
    descriptor, parts = open_published(manifest.files[-1]), []
    try:
        for part in file_parts(manifest, descriptor):
            part.write(found[part.tensor.name])
            parts.append((part.tensor.name, part.begin, part.is_last))
    finally:
        os.close(descriptor)
    large = [("large", begin << 20, begin == 2) for begin in range(3)]
    assert parts == [*large, ("empty", 0, True), ("small", 0, True)]
    assert all(torch.equal(found[name], tensor.reshape(-1).view(torch.uint8)) for name, tensor in sent.items())


def test_full_version_alone_is_read_as_parts(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, "shm", full_every=4)
    full, delta = (publisher.write(v, next_version(small_tensors(), v).items()) for v in (1, 2))
    odd = altered(full, lambda plain: plain["tensors"][-1].update(dtype="complex64"))
    assert [can_stream(manifest) for manifest in (full, delta, odd)] == [True, False, False]


def test_broken_is_no_kind_of_unreachable() -> None:
    """Handling one as the other would continue with half a version."""
    assert not issubclass(WeightsBroken, WeightsUnreachable)
    assert not issubclass(WeightsUnreachable, WeightsBroken)
