"""The record of SGLang's released types, with which the stand-ins compare each body; no SGLang is needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from tests.rollout_server.conftest import small_config
from tests.rollout_server.engines.http.event_server import serving, stream_events
from tests.rollout_server.engines.sglang.sglang_types import read_types
from tests.rollout_server.engines.stand_ins import TYPES, check_sglang
from tests.until import until

from penstock.rollout_server import GenerateRequest, Sampling
from penstock.rollout_server.engines.sglang.engine import SGLangEngine, SGLangStream
from penstock.rollout_server.engines.sglang.server import SGLANG
from penstock.rollout_server.engines.sglang.weights import PAUSES


async def test_an_answer_and_its_end_are_asked_for_in_sglangs_terms(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    arguments = {"enable_deterministic_inference": True}
    engine = SGLangEngine(small_config(engine="sglang", sglang_args=arguments), str(tmp_path), tmp_path, 0)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=4, max_new_tokens=7, stop_token_ids=(1, 2), seed=3)
    body = engine._body(GenerateRequest(token_ids=[1, 2], sampling=sampling))
    check_sglang("/generate", body)
    check_sglang("SamplingParams", body["sampling_params"])
    asked: list[tuple[str, dict[str, Any]]] = []

    async def note(request: web.Request) -> web.StreamResponse:
        asked.append((request.path, await request.json()))
        return await stream_events(request, [], keep_open=request.path == "/generate")

    async with serving(note) as http:
        stream = SGLangStream(http, body, version=0)
        await until(lambda: bool(asked))
        await stream.close()
    for path, sent in asked:
        check_sglang(path, sent)
    assert [path for path, _ in asked] == ["/generate", "/abort_request"]


async def test_adapters_are_loaded_named_and_unloaded_in_sglangs_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SGLangEngine(small_config(engine="sglang", adapter_rank=8), str(tmp_path), tmp_path, 0)
    monkeypatch.setattr(engine.server, "send", send := AsyncMock(return_value=b"{}"))
    await engine._load_adapter("a", tmp_path)
    await engine._unload_adapter("a")
    for _, path, sent in (call.args for call in send.await_args_list):
        check_sglang(path, sent)
    assert [call.args[1] for call in send.await_args_list] == ["/load_lora_adapter", "/unload_lora_adapter"]
    asked: list[dict[str, Any]] = []

    async def note(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return await stream_events(request, [], keep_open=False)

    async with serving(note) as http:
        monkeypatch.setattr(engine.server, "events", http, raising=False)
        for adapter in ("a", None):
            stream = engine._send(GenerateRequest(token_ids=[1]), (), adapter)
            await until(lambda: bool(asked))
            await stream.close()
            check_sglang("/generate", asked[0])
            assert asked.pop().get("lora_path") == adapter


def test_what_is_read_of_its_replies_is_there() -> None:
    assert "checksums" in TYPES["ChecksumInfo"]
    assert "payload" in TYPES["CheckWeightsReqOutput"]  # given out as "ranks"
    assert set(PAUSES) == {"keep", "recompute", "abort"}


def test_the_record_is_of_the_sglang_that_is_installed_here() -> None:
    python = Path(SGLANG.find_python(None))
    installed = next(python.parent.parent.glob("lib/python3*/site-packages/sglang"), None)
    if installed is None:
        pytest.skip("no .venv-sglang here; scripts/setup-sglang makes it")
    assert read_types(installed.parent) == TYPES
