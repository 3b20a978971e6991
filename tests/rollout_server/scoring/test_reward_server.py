"""A tiny classifier behind a real socket, asked by the reward and by hand."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")

from tests.tiny_model import SHAPE, save_tokenizer
from tests.tools.conftest import serve  # noqa: F401 - the fixture

from penstock.agent_loops import InfraFailure
from penstock.agent_loops.rewards import TOKEN_VARIABLE, RewardFunction, RewardServer
from penstock.common import Backoff
from penstock.rollout_server import BadModel, Batcher, HuggingFaceClassifier, build_reward_app
from penstock.transfer_queue import Task

pytestmark = pytest.mark.torch
TOKEN = "only-for-this-test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def save_classifier(folder: Path, labels: int) -> str:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SHAPE, "num_labels": labels, "pad_token_id": 0})
    transformers.Qwen3ForSequenceClassification(config).float().save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_classifier(tmp_path_factory.mktemp("classifier"), labels=1)


@pytest.fixture(scope="module")
def classifier(model: str) -> HuggingFaceClassifier:
    return HuggingFaceClassifier(model, None, "float32", max_tokens=16)


@pytest.fixture
async def url(classifier: HuggingFaceClassifier, serve: Callable[[Any], Any]) -> str:
    def score(rows: Sequence[Sequence[int]]) -> list[float]:
        return classifier.score(rows)  # looked up at each batch: a test replaces it

    return await serve(build_reward_app(classifier, TOKEN, "tiny", Batcher(score)))


@pytest.fixture
async def reward(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RewardFunction]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    made = RewardFunction(RewardServer(url=url), "reward_server")
    yield made
    await made.close()


def alone(model: str, text: str) -> float:
    """The logit that transformers itself gives."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")
    loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(loaded(input_ids=tokens["input_ids"]).logits[0, 0])


def task(question: str = "t5 t6") -> Task:
    return Task("train/0", "train", [{"role": "user", "content": question}], "chat", None)


async def test_the_reward_is_the_models_own_number(reward: RewardFunction, model: str) -> None:
    found = await reward.score(task(), "t7 t8 t9", {})
    assert found.reward == pytest.approx(alone(model, "t5 t6\nt7 t8 t9"), abs=1e-5)
    assert found.metrics == {"reward/cut": 0.0}
    long = " ".join(["t7"] * 40)
    cut = await reward.score(task(), long, {})
    assert cut.metrics == {"reward/cut": 1.0}
    assert cut.reward == pytest.approx(alone(model, " ".join(["t7"] * 16)), abs=1e-5)


async def test_a_batch_of_unequal_rows_scores_each_as_if_alone(url: str, model: str) -> None:
    answers = ["t1", "t2 t3 t4 t5", "t9 t10"]
    items = [{"messages": [{"role": "user", "content": "t5"}], "answer": answer} for answer in answers]
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        reply = (await client.post("/score", json={"items": items})).json()
        health = (await client.get("/health")).json()
        metrics = (await client.get("/metrics")).text
    assert reply["scores"] == pytest.approx([alone(model, f"t5\n{answer}") for answer in answers], abs=1e-5)
    assert health == {"model": "tiny", "waiting": 0, "batches": 1}
    assert "penstock_reward_answers_total 3.0" in metrics
    assert 'penstock_reward_requests_total{outcome="scored"} 1.0' in metrics


async def test_every_route_asks_for_the_token_and_bad_bodies_are_named(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for method, path in (("GET", "/health"), ("GET", "/metrics"), ("POST", "/score"), ("GET", "/docs")):
            assert (await client.request(method, path)).status_code == 401
        for body in ({"items": []}, {"items": [{"answer": 3}]}, {"items": [{"answer": "x"}], "more": 1}):
            assert (await client.post("/score", json=body, headers=HEADERS)).status_code == 422


async def test_a_server_that_is_gone_refuses_or_has_no_number_is_a_failure(
    reward: RewardFunction, classifier: HuggingFaceClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tools.guard.BACKOFF", Backoff(0.01))
    monkeypatch.setattr(classifier, "score", lambda rows: [math.nan] * len(rows))
    with pytest.raises(InfraFailure, match="the model's score is nan") as failure:
        await reward.score(task(), "t1 t2", {})
    assert failure.value.component == "reward_server"
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    with pytest.raises(InfraFailure, match="HTTP 401"):
        await reward.score(task(), "t3", {})
    with pytest.raises(InfraFailure, match="attempts"):
        await RewardFunction(RewardServer(url="http://127.0.0.1:9", retries=1), "x").score(task(), "t1", {})


async def test_messages_that_the_template_refuses_are_named(
    url: str, classifier: HuggingFaceClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        answer = await client.post("/score", json={"items": [{"messages": [{"role": "user"}], "answer": "x"}]})
    assert answer.status_code == 422
    assert "chat template rejects these messages: TemplateError: roles must alternate" in answer.json()["detail"]


def test_models_that_cannot_be_reward_models_are_refused(tmp_path: Path) -> None:
    many = save_classifier(tmp_path / "many", labels=3)
    with pytest.raises(BadModel, match=r"has 3 labels: choose with --label \(0 … 2\)"):
        HuggingFaceClassifier(many, None, "float32", None)
    chosen = HuggingFaceClassifier(many, 2, "float32", None)
    (score,) = chosen.score([[5, 6, 7]])
    assert 0 < score < 1
    with pytest.raises(ValueError, match="needs a token"):
        build_reward_app(chosen, "", "tiny")
