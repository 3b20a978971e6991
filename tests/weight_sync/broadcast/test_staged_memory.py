"""Broadcasts that are received once for all processes of a server: complete, and mapped by the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import BroadcastingTrainer, StagedServer, broadcasting
from tests.until import until
from tests.weight_sync.conftest import small_tensors

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from penstock.common import cancel_and_wait
from penstock.weight_sync import Manifest, StagedMemory, WeightReader, WeightsUnreachable

pytestmark = pytest.mark.torch


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[BroadcastingTrainer]:
    async with broadcasting(tmp_path / "published", full_every=9, silence_s=2.0) as opened:
        yield opened


@pytest.fixture
async def server(trainer: BroadcastingTrainer, tmp_path: Path) -> AsyncIterator[StagedServer]:
    joined = StagedServer(tmp_path / "server", StagedMemory())
    task = asyncio.create_task(joined.member.run(joined, lambda: trainer.meeting))
    yield joined
    await cancel_and_wait([task])


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


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
    assert (is_open("memfd:broadcast-101"), is_open("memfd:broadcast-102")) == (False, True)
    assert same(dict(server.staged.take(manifest)), small_tensors(102))
    await until(lambda: not is_open("memfd:broadcast-102"))


async def test_broadcast_that_breaks_off_drops_what_came_before_it(
    trainer: BroadcastingTrainer, server: StagedServer
) -> None:
    before = await trainer.publish(1, small_tensors(), members=1)
    assert await server.member.holds(before)
    await until(lambda: trainer.files.broadcaster.parked == 1)
    trainer.files.begin_broadcast(2, trainer.source.tensors).listener.close()
    await until(lambda: server.member.missed == 1)
    with pytest.raises(WeightsUnreachable, match="does not hold"):
        server.staged.take(before)
