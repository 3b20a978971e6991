"""What is particular to the sglang engine, on the real server; the conformance suite has the rest."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.rollout_server.conformance.subject import PROMPT, SGLANG, Subject, broken_off, prompt
from tests.rollout_server.conftest import Reference, ask, members, whole

from penstock.rollout_server import EngineError

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(900),
]
only = pytest.mark.parametrize("subject", [SGLANG], indirect=True)


@only
async def test_an_abort_inside_the_engine_hands_on_the_partial_answer(subject: Subject, reference: Reference) -> None:
    version = await subject.load(reference, reference.first)
    (task,) = await subject.under_load(1)
    (stream,) = subject.engine.streams
    async with subject.engine.server.http.post("/abort_request", json={"rid": stream._rid}) as response:
        assert response.status == HTTPStatus.OK
    answer = await task
    assert answer.finish_reason == "abort"
    assert 0 < len(answer.token_ids) < subject.long
    assert answer.version_spans == [(version, 0, len(answer.token_ids))]
    subject.close(answer.logprobs, reference.logprobs(prompt(0), answer.token_ids))


@only
async def test_it_is_healthy_while_paused(subject: Subject) -> None:
    server = subject.engine.server
    await server.call("POST", "/pause_generation", {"mode": "in_place"})
    try:
        assert await subject.engine.healthy()
    finally:
        await server.call("POST", "/continue_generation", {"torch_empty_cache": False})


@only
async def test_every_route_but_health_asks_for_the_key(subject: Subject) -> None:
    server = subject.engine.server
    async with aiohttp.ClientSession(server.http._base_url) as stranger:
        for path in ("/generate", "/pause_generation", "/update_weights_from_disk", "/abort_request"):
            async with stranger.post(path, json={}) as response:
                assert response.status == HTTPStatus.UNAUTHORIZED
    assert server.log_path.stat().st_mode & 0o077 == 0
    key = server.http.headers["Authorization"].removeprefix("Bearer ")
    assert not [pid for pid in members(server.pid) if key in Path(f"/proc/{pid}/cmdline").read_text()]


@only
@pytest.mark.ends_engine
async def test_other_weights_than_the_versions_end_the_server_and_its_open_answers(
    subject: Subject, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = subject.engine.weights
    assert "model.layers.0.self_attn.qkv_proj.weight" in weights.checked
    read = weights._read

    def of_another_file(manifest: Any) -> tuple[int, dict[str, str], Any]:
        file, expected, version = read(manifest)
        return file, {**expected, "model.layers.1.mlp.gate_up_proj.weight": "0" * 16}, version

    monkeypatch.setattr(weights, "_read", of_another_file)
    manifest = await subject.publish(reference, reference.other(3))
    tasks = await subject.under_load(2)
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.gate_up_proj"):
        await subject.swap(manifest)
    await broken_off(tasks)
    assert not await subject.engine.healthy()
    with pytest.raises(EngineError, match="not running"):
        await whole(subject.engine, ask(PROMPT, 4))
    with pytest.raises(EngineError, match="not running"):
        await subject.load(reference, reference.first)
