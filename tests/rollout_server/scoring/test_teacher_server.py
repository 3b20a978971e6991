"""A tiny teacher behind a real socket: its numbers are the model's own, its refusals name the field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

torch = pytest.importorskip("torch")

from tests.tiny_model import save_tiny_model
from tests.tools.conftest import serve  # noqa: F401 - the fixture

from penstock.agent_loops import PROBE, BadTeacher, Teacher, TeacherConfig
from penstock.rollout_server import TokenScorer, build_teacher_app
from penstock.rollout_server.scoring.teacher_scorer import TeacherRow

pytestmark = pytest.mark.torch
TOKEN = "only-for-this-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ROWS = [[1, 5, 9, 33, 2, 7], [4, 4], [60, 3, 8, 1, 1, 2, 3, 5, 8, 13, 21]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), tokenizer=True)


@pytest.fixture(scope="module")
def scorer(model: str) -> TokenScorer:
    return TokenScorer(model, "float32", max_tokens=1000)


@pytest.fixture
async def url(scorer: TokenScorer, serve: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PENSTOCK_TEACHER_TOKEN", TOKEN)
    return await serve(build_teacher_app(scorer, TOKEN, "tiny"))


def alone(model: str, ids: list[int]) -> list[float]:
    """As transformers itself computes them, one row at a time."""
    return distributions(model, ids).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()


def distributions(model: str, ids: list[int]) -> Any:
    """[L − 1, V] logprobs"""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return loaded(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def check_likeliest(found: Any, logprobs: Any, top_k: int) -> None:
    """Of `logprobs` [rows, V]; two ids whose last bits alone differ may come in either order."""
    best, ids = logprobs.topk(top_k).values.numpy(), found.top_ids.astype("int64")
    assert ids.shape == best.shape
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert logprobs.gather(-1, torch.from_numpy(ids)).numpy() == pytest.approx(best, abs=1e-5)
    assert found.top_logprobs == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2"])
def test_logprobs_are_the_models_own(kind: str, tmp_path: Path) -> None:
    """Gemma 2 caps its logits: what its head says alone is not what it samples from."""
    folder = save_tiny_model(tmp_path, kind, tokenizer=True)
    asked = [TeacherRow(row, top_k) for row, top_k in zip(ROWS, (0, 64, 3), strict=True)]
    for row, found in zip(asked, TokenScorer(folder, "float32").score(asked), strict=True):
        assert found.logprobs.tolist() == pytest.approx(alone(folder, list(row.ids)), abs=1e-5)
        check_likeliest(found, distributions(folder, list(row.ids)), row.top_k)


@pytest.mark.parametrize("top_k", [0, 1, 5, 64])
async def test_client_reads_what_the_server_says(url: str, model: str, top_k: int) -> None:
    """With the whole vocabulary the probabilities sum to 1."""
    teacher = Teacher(TeacherConfig(url=url, top_k=top_k))
    for row in ROWS if top_k == 0 else [ROWS[2]]:
        found = await teacher.judge(row, [3, 4, 9])
        assert found.logprobs[0] == 0
        assert found.logprobs[1:].tolist() == pytest.approx(alone(model, row), abs=1e-5)
        if top_k == 0:
            assert found.top_ids is None
            continue
        assert found.top_ids is not None
        check_likeliest(found, distributions(model, row)[[2, 3, 8]], top_k)
    await teacher.close()


async def test_a_start_is_refused_with_the_cause(url: str, scorer: TokenScorer) -> None:
    encoded = scorer.encode(PROBE, special=False)
    teacher = Teacher(TeacherConfig(url=url))
    assert "same ids" in await teacher.check(encoded, 63, 255)
    with pytest.raises(BadTeacher, match="their vocabularies differ"):
        await teacher.check([*encoded, 1], 63, 255)
    with pytest.raises(BadTeacher, match="reads 256 tokens") as short:
        await teacher.check(encoded, 63, 256)
    assert "257 or more" in short.value.fix
    with pytest.raises(BadTeacher, match="token id 64 is outside the vocabulary of 64"):
        await teacher.check(encoded, 64, 255)
    await teacher.close()


async def test_routes_need_the_token_and_refuse_what_they_cannot_judge(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        body = {"prompt": [1, 2, 3], "prompt_logprobs": 0}
        assert (
            await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer no"})
        ).status_code == 401
        bad_prompts = ({"prompt": [1, 64]}, {"prompt": [-1, 2]}, {"prompt": [1] * 257}, {"prompt": []})
        for wrong in (*bad_prompts, {"echo": True}, {"prompt_logprobs": 65}, {"prompt_logprobs": -1}):
            assert (await client.post("/v1/completions", json=body | wrong)).status_code == 422, wrong
        answer = (await client.post("/v1/completions", json=body | {"prompt": [7]})).json()
        assert answer["choices"][0]["prompt_logprobs"] == [None]
        assert (await client.get("/health")).json()["waiting"] == 0
        assert "penstock_teacher_tokens_total" in (await client.get("/metrics")).text


async def test_an_answer_that_memory_has_no_room_for_is_refused(serve: Callable[[Any], Any]) -> None:
    """32,768 tokens with 1,024 likeliest each took gigabytes as Python objects."""
    scorer = SimpleNamespace(vocabulary=200_000, max_tokens=32_768, score=None)
    url = await serve(build_teacher_app(cast("TokenScorer", scorer), TOKEN, "large"))
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        body = {"prompt": [1] * 32_768, "prompt_logprobs": 1024}
        refused = await client.post("/v1/completions", json=body)
    assert (refused.status_code, "of 32768 tokens at most 63 in one answer" in refused.text) == (422, True)
