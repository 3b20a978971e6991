"""Rollout servers and trainers as processes of their own, so that they can be killed at any line.

    python -m tests.weight_sync.processes server FOLDER SERVES      manifests in, reports out, line by line
    python -m tests.weight_sync.processes trainer FOLDER PORT SEED  serves a version with a round

A server whose request has ``stop_after`` says "in the middle" once so many bytes of it came, and goes no further.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

TOKEN = "the-token-of-this-run"
BUCKET_BYTES = 1 << 20
SILENCE_S = 10.0
VALUES = 16 << 20
"""64 MB: far more than what sockets hold."""


class ServerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, manifest: Any, stop_after: int | None = None) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"manifest": manifest.as_dict(), "stop_after": stop_after}).encode() + b"\n"
        )
        await self.process.stdin.drain()

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))

    async def fetch(self, manifest: Any) -> Any:
        await self.ask(manifest)
        return await self.hear()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def started(*arguments: Any) -> AsyncIterator[ServerProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *map(str, arguments),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    child = ServerProcess(process)
    try:
        yield child
    finally:
        await child.kill()


def big(seed: int) -> dict[str, Any]:
    import torch

    return {"w": torch.full((VALUES,), float(seed)), "last": torch.arange(10.0) + seed}


def state(tensors: dict[str, Any]) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in tensors.items()}


def _serve(folder: Path, serves: str) -> None:
    from penstock.weight_sync import Downloader, Manifest, PeerServer, WeightReader, WeightsRefused, WeightsUnreachable

    peers = PeerServer(folder, TOKEN, "127.0.0.1") if serves == "serves" else None
    downloader, reader = Downloader(folder, TOKEN, stall_s=30, serves=peers.start() if peers else ""), WeightReader()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _stop_after(request["stop_after"])
        try:
            tensors = reader.read(downloader.localise(Manifest.parse(request["manifest"])))
            answer: dict[str, Any] = {"holds": state(tensors)}
        except (WeightsRefused, WeightsUnreachable) as error:
            answer = {"error": str(error)}
        print(json.dumps({**answer, "bytes": downloader.bytes_received}), flush=True)


def _stop_after(count: int | None) -> None:
    from penstock.weight_sync import PartialFile

    if count is None:
        return
    append = PartialFile.append

    def append_and_stop(self: PartialFile, piece: bytes | memoryview) -> None:
        append(self, piece)
        if self.length >= count:
            print(json.dumps("in the middle"), flush=True)
            time.sleep(600)

    PartialFile.append = append_and_stop  # type: ignore[method-assign]


async def _train(folder: Path, port: int, seed: int) -> None:
    from penstock.weight_sync import Broadcaster, FileServer, WeightPublisher

    rounds = Broadcaster(window_s=60, bucket_bytes=BUCKET_BYTES, silence_s=SILENCE_S)
    server = FileServer(folder, TOKEN, port=port, broadcaster=rounds)
    await server.start()
    publisher = WeightPublisher(folder, "collective", base_url=server.url)
    manifest = publisher.write(1, big(seed).items())
    name = rounds.offer(folder / "weights-00000001.safetensors", 2)
    print(json.dumps(manifest.as_dict() | {"round": f"{server.url}/rounds/{name}"}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        _serve(Path(sys.argv[2]), sys.argv[3])
    else:
        asyncio.run(_train(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
