"""In which order vLLM is told of a version, without vLLM: a server that notes its calls, workers made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout_server import EngineError, RolloutConfig
from penstock.rollout_server.engines import vllm
from penstock.weight_sync import ChainFile, Manifest, WeightsRefused, state_of

MANIFEST = Manifest("shm", (ChainFile(3, None, "/dev/null", 0, "", state_of(())),), ())


class Server:
    """Answers what a vLLM that holds version 3 would; `report` is where the workers are to say that they have read."""

    name, alive = "vLLM", True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[str] = []
        self.report = asyncio.get_running_loop().create_future()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        info = (body or {}).get("update_info", {})
        self.calls.append(path.partition("?")[0] + (f" {info['phase']}" if info else ""))
        if info.get("phase") == "fetch":
            self.report.set_result(Path(info["report"]))
        return {"weight_version": "3"}

    def cause(self) -> str:
        return "its log is empty"

    async def stop(self) -> None:
        self.alive = False


async def weights_of(server: Server, workers: int) -> vllm.VLLMWeights:
    weights = vllm.VLLMWeights(RolloutConfig(engine="vllm"), str(server.folder), server, set())  # type: ignore[arg-type]
    weights._world_size = workers
    return weights


async def a_while() -> None:
    await asyncio.sleep(5 * vllm.READ_POLL_S)


async def test_the_pause_begins_when_every_worker_has_read(tmp_path: Path) -> None:
    server = Server(tmp_path)
    swap = asyncio.create_task((await weights_of(server, 2)).swap(MANIFEST))
    report = await server.report
    before = ["/start_weight_update", "/update_weights fetch"]
    await a_while()
    assert server.calls == before
    (report / "101").write_text("")
    await a_while()
    assert server.calls == before
    (report / "102").write_text("")
    assert (await swap).version == 3
    after = ["/pause", "/update_weights load", "/finish_weight_update", "/weight_info", "/resume"]
    assert server.calls == before + after
    assert not report.exists()


async def test_what_a_worker_refuses_does_not_pause(tmp_path: Path) -> None:
    server = Server(tmp_path)
    swap = asyncio.create_task((await weights_of(server, 2)).swap(MANIFEST))
    report = await server.report
    (report / "101").write_text("")
    (report / "102").write_text("tensor 'a' is damaged")
    with pytest.raises(WeightsRefused, match="tensor 'a' is damaged"):
        await swap
    assert server.calls == ["/start_weight_update", "/update_weights fetch", "/finish_weight_update"]
    assert server.alive


async def test_a_server_that_ends_meanwhile_is_an_error(tmp_path: Path) -> None:
    server = Server(tmp_path)
    swap = asyncio.create_task((await weights_of(server, 1)).swap(MANIFEST))
    await server.report
    server.alive = False
    with pytest.raises(EngineError, match="did not read the weights"):
        await swap
