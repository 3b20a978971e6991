"""The bodies that the adapter sends are of SGLang's released types, recorded in a file; no SGLang is needed here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.rollout_server.conftest import small_config
from tests.rollout_server.engines.http.event_server import serving, stream_events
from tests.rollout_server.engines.sglang.sglang_types import TAGS, read_types

from penstock.rollout_server import GenerateRequest, Sampling
from penstock.rollout_server.engines.sglang.engine import SGLangEngine, SGLangStream
from penstock.rollout_server.engines.sglang.server import SGLANG
from penstock.rollout_server.engines.sglang.weights import PAUSES, SGLangWeights

TYPES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("sglang_types.json").read_text())
TYPE_OF = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/weights_checker": "CheckWeightsReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
SIMPLE = {"bool": bool, "str": str, "int": int, "Optional[str]": str, "Optional[bool]": bool}
"""Annotations whose values can be compared by kind alone."""


def check(path: str, body: dict[str, Any]) -> None:
    check_fields(TYPE_OF[path], body)


def check_fields(kind: str, body: dict[str, Any]) -> None:
    for name, value in body.items():
        assert name in TYPES[kind], f"{kind} has no field {name}"
        annotation = TYPES[kind][name]
        if annotation in SIMPLE:
            assert type(value) is SIMPLE[annotation], f"{kind}.{name}: {annotation}"
        if annotation.startswith("Literal["):
            assert repr(value) in annotation, f"{kind}.{name}: {annotation}"


class Noted:
    """In place of the server: notes what it is asked."""

    name, folder = "SGLang", Path()

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self.asked.append((path, body or {}))
        return {"ranks": []}


@pytest.mark.parametrize("pause", ["keep", "recompute", "abort"])
async def test_a_swap_asks_in_sglangs_terms(pause: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    server: Any = Noted()
    weights = SGLangWeights(small_config(engine="sglang", pause=pause), str(tmp_path), server, set())
    await weights._pause()
    await weights._load(3, (tmp_path, {}))
    await weights._checksums()
    await weights._checksums(all_of_them=False)
    await weights._resume()
    assert [path for path, _ in server.asked] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/weights_checker",
        "/weights_checker",
        "/continue_generation",
    ]
    for path, body in server.asked:
        check(path, body)


async def test_a_turn_asks_in_sglangs_terms(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    server: Any = Noted()
    server.sleep_level = 1
    weights = SGLangWeights(small_config(engine="sglang"), str(tmp_path), server, set())
    await weights.sleep(1)
    await weights.wake()
    for path, body in server.asked:
        check(path, body)
    released, resumed = (body["tags"] for path, body in server.asked if "occupation" in path)
    assert released == resumed
    assert set(released) == set(TYPES[TAGS].values()), "all that it can release"


async def test_an_answer_and_its_end_are_asked_for_in_sglangs_terms(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    arguments = {"enable_deterministic_inference": True}
    engine = SGLangEngine(small_config(engine="sglang", sglang_args=arguments), str(tmp_path), tmp_path, 0)
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=4, max_new_tokens=7, stop_token_ids=(1, 2), seed=3)
    body = engine._body(GenerateRequest(token_ids=[1, 2], sampling=sampling))
    check("/generate", body)
    check_fields("SamplingParams", body["sampling_params"])
    asked: list[tuple[str, dict[str, Any]]] = []

    async def note(request: web.Request) -> web.StreamResponse:
        asked.append((request.path, await request.json()))
        return await stream_events(request, [], keep_open=request.path == "/generate")

    async with serving(note) as http:
        stream = SGLangStream(http, body, version=0)
        while not asked:
            await asyncio.sleep(0.01)
        await stream.close()
    for path, sent in asked:
        check(path, sent)
    assert [path for path, _ in asked] == ["/generate", "/abort_request"]


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
