"""Deadlines of an engine's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import small_config

from penstock.rollout_server import EngineError
from penstock.rollout_server.engines.http.server_process import ChildServer, Installation
from penstock.rollout_server.engines.vllm.server import VLLM


class Unprepared(ChildServer):
    product, ready_path = VLLM, "/health"

    async def find_installation(self) -> Installation:
        return Installation("python", "0.32.0", cpu=True)

    def prepare(self, installation: Installation) -> Any:
        raise EngineError("not prepared")


async def test_start_gives_loads_of_a_large_model_the_time_to_read_it(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(470 * 10**9)  # no block of it is written
    server = Unprepared(small_config(start_timeout_s=180), str(tmp_path), tmp_path, 0)
    assert server.timeout_s == 180
    with pytest.raises(EngineError, match="not prepared"):
        await server.start()
    assert server.timeout_s == 180 + 4700
