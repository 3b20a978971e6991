"""Members and trainers that are lost in the middle of a broadcast."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.broadcasting import TOKEN, BroadcastingTrainer, HeldTrainer
from tests.weight_sync.processes import receiving

from penstock.common import cancel_and_wait
from penstock.weight_sync import BroadcastMember, WeightsUnreachable


class OtherServer:
    """A member beside the engine, whose worker is a process."""

    weight_workers = 1
    weight_wires = ("gloo/2",)

    def __init__(self, process: Any) -> None:
        self.process = process

    async def stage_weights(self, offer: Any) -> str:
        answer = await self.process.ask(offer=offer.as_dict(), stop_after=0, piece_s=0.0)
        if "lost" in answer:
            raise WeightsUnreachable(answer["lost"])
        return str(answer["state"])


async def lose_the_other(trainer: BroadcastingTrainer, version: int, tensors: Any, bucket: int) -> Any:
    """The manifest: another member is killed before the bucket, and the trainer announces the version all the same."""
    async with receiving() as process:
        running = BroadcastMember(TOKEN).run(OtherServer(process), lambda: trainer.meeting)
        task, held = asyncio.create_task(running), HeldTrainer(trainer, bucket)
        publishing = asyncio.create_task(trainer.publish(version, tensors, members=2))
        await held.reached()
        await process.kill()
        held.go_on.set()
        manifest = await publishing
        await cancel_and_wait([task])
    return manifest


async def lose_the_trainer(trainer: BroadcastingTrainer, version: int, tensors: Any, bucket: int) -> None:
    """It ends before the bucket and announces nothing."""
    held = HeldTrainer(trainer, bucket, dies=True)
    lost = asyncio.create_task(trainer.publish(version, tensors, members=1))
    await held.reached()
    held.go_on.set()
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        await lost
