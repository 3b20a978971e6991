"""Servers' workers as processes, so that they can be killed at any line.

python -m tests.weight_sync.processes      requests in, answers out, a JSON object a line each

{"offer", "stop_after", "piece_s"}   {"state"} or {"lost"}; a bucket takes `piece_s` seconds more;
                                     "in the middle" once `stop_after` bytes came, and no further then
{"manifest"}                         {"holds"} or {"error"}
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

BUCKET_BYTES = 1 << 20
VALUES = 16 << 20
"""64 MB: far more than what sockets hold."""
IN_THE_MIDDLE = "in the middle"


class WorkerGone(Exception):
    """The process ended before its answer."""


class ReceivingProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._middle = asyncio.Event()

    async def ask(self, **request: Any) -> Any:
        """The answer. One request at a time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            if answer != IN_THE_MIDDLE:
                return answer
            self._middle.set()
        return {"lost": "the process is gone"}

    async def in_the_middle(self) -> None:
        async with asyncio.timeout(60):
            await self._middle.wait()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def receiving() -> AsyncIterator[ReceivingProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    child = ReceivingProcess(process)
    assert process.stdout is not None
    async with asyncio.timeout(300):
        assert json.loads(await process.stdout.readline()) == "ready"
    try:
        yield child
    finally:
        await child.kill()


def big(seed: int) -> dict[str, Any]:
    import torch

    return {"w": torch.full((VALUES,), float(seed)), "last": torch.arange(10.0) + seed}


def state(tensors: dict[str, Any]) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}


def _serve(cleanups: ExitStack) -> None:
    if library := os.environ.get("PENSTOCK_FAKE_NCCL_LIBRARY"):
        from tests.weight_sync.broadcast.fake_cuda import streams_of

        from penstock.weight_sync.broadcast.nccl import Nccl

        Nccl.path = library
        cleanups.enter_context(streams_of(library))
    from penstock.weight_sync import (
        Manifest,
        Offer,
        StagedWeights,
        WeightReader,
        WeightsRefused,
        WeightsUnreachable,
    )

    staged, reader = StagedWeights(), WeightReader()
    _say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        if "offer" in request:
            _stop_after(request["stop_after"], request["piece_s"])
            try:
                _say({"state": staged.receive(Offer.parse(request["offer"]))})
            except WeightsUnreachable as error:
                _say({"lost": str(error)})
            continue
        manifest = Manifest.parse(request["manifest"])
        try:
            read = staged.take if manifest.transport == "broadcast" else reader.read
            _say({"holds": state(read(manifest))})
        except (WeightsRefused, WeightsUnreachable) as error:
            _say({"error": str(error)})


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _stop_after(count: int, piece_s: float) -> None:
    """Whatever the worker computes from the stream, it computes from here."""
    from penstock.weight_sync.broadcast.offer import StreamDigests

    came = 0
    update = StreamDigests.update

    def update_and_stop(self: StreamDigests, piece: memoryview) -> None:
        nonlocal came
        update(self, piece)
        came += len(piece)
        time.sleep(piece_s)
        if count and came >= count:
            _say(IN_THE_MIDDLE)
            time.sleep(600)

    StreamDigests.update = update_and_stop if count or piece_s else update  # type: ignore[method-assign]


if __name__ == "__main__":
    with ExitStack() as stack:
        _serve(stack)
