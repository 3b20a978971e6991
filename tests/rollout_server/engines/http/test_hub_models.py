"""A model that is named as in a hub: servers and checks have the folder that was fetched."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_server.conftest import small_config

from penstock.rollout_server import EngineError
from penstock.rollout_server.engines.http.server_process import ChildServer, Installation
from penstock.rollout_server.engines.http.weights import HttpWeights
from penstock.rollout_server.engines.registry import make_engine

pytest.importorskip("torch")
FAR_ENOUGH = "far enough"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``team/model``, in the hub's cache."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 99}))
    header = json.dumps({"norm": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, **_: str(folder))
    return folder


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_server_and_weights_have_the_folder_of_a_hub_model(
    name: str, fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the name, a server may load another revision, and the tensors of a version cannot be checked."""
    started = list[str]()

    async def start(server: Any) -> Installation:
        started.append(server.model)
        return Installation("python", "1", cpu=True)

    async def call(server: Any, *_: Any) -> Any:
        raise EngineError(FAR_ENOUGH)

    async def nothing(weights: Any) -> list[str]:
        return []

    async def version(weights: Any) -> int:
        return 0

    monkeypatch.setattr(ChildServer, "start", start)
    monkeypatch.setattr(ChildServer, "call", call)
    engine: Any = make_engine(small_config(engine=name), "team/model", tmp_path / "logs", 0)
    with pytest.raises(EngineError, match=FAR_ENOUGH):
        await engine.start()
    assert started == [str(fetched)]
    monkeypatch.setattr(type(engine.weights), "_look", nothing)
    monkeypatch.setattr(HttpWeights, "server_version", version)
    assert await engine.weights.start() == []
    assert engine.weights.shapes == {"norm": (3,)}
