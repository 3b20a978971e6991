"""A broadcast over the real NCCL, from one GPU to another: `scripts/gpu-check` runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.broadcasting import StagedServer, broadcasting
from tests.weight_sync.broadcast.test_broadcast import Members, same
from tests.weight_sync.conftest import next_version, small_tensors

torch = pytest.importorskip("torch")

from penstock.common import cancel_and_wait
from penstock.weight_sync import StagedMemory
from penstock.weight_sync.broadcast.nccl import Nccl

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]


class SecondGpu(StagedServer):
    """Receives on the second GPU; the trainer sends from the first."""

    @property
    def weight_wires(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"nccl/{Nccl.load().version}",)

    async def stage_weights(self, offer: Any) -> str:
        return str(await asyncio.to_thread(self.staged.receive, offer, 0, torch.device("cuda", 1)))


async def test_versions_go_from_gpu_to_gpu(tmp_path: Path) -> None:
    async with broadcasting(tmp_path / "published", full_every=9, from_gpus=True) as trainer:
        members = Members(trainer, tmp_path)
        server = members.join("", SecondGpu(tmp_path / "server", StagedMemory()))
        tensors = small_tensors()
        for version in range(1, 6):
            manifest = await trainer.publish(version, tensors, members=1)
            assert same(await server.receive(manifest), tensors)
            tensors = next_version(tensors, version)
        assert (server.member.received, server.by_file) == (5, 0)
        await cancel_and_wait(list(members.tasks.values()))


async def test_a_bucket_of_a_gigabyte_arrives_byte_by_byte(tmp_path: Path) -> None:
    nbytes = 1 << 30
    tensors = {"weight": torch.randint(-(2**31), 2**31, (nbytes // 4,), dtype=torch.int32)}
    async with broadcasting(tmp_path / "published", bucket_bytes=nbytes, silence_s=60, from_gpus=True) as trainer:
        members = Members(trainer, tmp_path)
        server = members.join("", SecondGpu(tmp_path / "server", StagedMemory()))
        manifest = await trainer.publish(1, tensors, members=1)
        assert same(await server.receive(manifest), tensors)
        assert (server.member.received, server.by_file) == (1, 0)
        await cancel_and_wait(list(members.tasks.values()))
