"""Teachers and episodes: what is recorded, both forms of servers, failures that are infrastructure, refusals."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, HTTPException, Request
from tests.tools.conftest import serve  # noqa: F401 - the fixture

from penstock.agent_loops import BadTeacher, Episode, InfraFailure, Teacher, TeacherConfig, Teachers
from penstock.common import Backoff
from penstock.testing import FakeClient
from penstock.transfer_queue import OutcomeKind


class FakeServer:
    """Judges token n by its id and place: −(id mod 7) − n / 1000."""

    def __init__(self, form: str = "prompt_logprobs") -> None:
        self.form = form
        self.asked: list[list[int]] = []
        self.top_k: list[int] = []
        """By answer."""
        self.max_logprobs = 20
        self.failures: list[int] = []
        """Statuses of the next answers."""
        self.value: Any = None
        """In place of every logprob."""
        self.tokens: list[int] | None = None
        """What /tokenize answers; None: there is no such route."""
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        """Answers wait for it."""
        self.open.set()
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/generate")(self.generate)
        self.app.post("/tokenize")(self.tokenize)
        self.app.get("/v1/models")(self.models)

    async def models(self) -> Any:
        return {"data": [{"id": "teacher", "max_model_len": 512}]}

    async def tokenize(self) -> Any:
        if self.tokens is None:
            raise HTTPException(404)
        return {"tokens": self.tokens}

    async def completions(self, request: Request) -> Any:
        body = await request.json()
        self.entered.set()
        await self.open.wait()
        assert body["model"] == "teacher"
        if self.failures:
            raise HTTPException(self.failures.pop(0), "not now")
        if self.form not in body:
            raise HTTPException(400, f"unknown field, this server knows {self.form}")
        ids, k = body["prompt"], body.get("prompt_logprobs", 0)
        if k > self.max_logprobs:
            raise HTTPException(
                400, f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
            )
        found = self._judged(ids, k)
        if self.form == "prompt_logprobs":
            places = range(1, len(ids))
            keyed = [
                {str(token): {"logprob": value, "rank": 1, "decoded_token": "x"} for value, token in entries}
                for entries in ([*likeliest(ids, n, k), (found[n - 1], ids[n])] for n in places)
            ]
            return {"choices": [{"prompt_logprobs": [None, *keyed]}]}
        return {"choices": [{"logprobs": {"token_logprobs": [None, *found, -0.5]}}]}

    async def generate(self, request: Request) -> Any:
        """SGLang's own route."""
        body = await request.json()
        if self.form != "generate":
            raise HTTPException(404)
        assert body["return_logprob"]
        assert body["logprob_start_len"] == 0
        ids, k = body["input_ids"], body["top_logprobs_num"]
        found = self._judged(ids, k)
        own = [[None, ids[0], None], *([value, token, None] for value, token in zip(found, ids[1:], strict=True))]
        tops = [[[value, token, None] for value, token in likeliest(ids, n, k)] for n in range(1, len(ids))]
        return {"text": "", "meta_info": {"input_token_logprobs": own, "input_top_logprobs": [None, *tops]}}

    def _judged(self, ids: list[int], k: int) -> list[Any]:
        self.asked.append(ids)
        self.top_k.append(k)
        return [judged(ids, n) if self.value is None else self.value for n in range(1, len(ids))]


def likeliest(ids: list[int], n: int, k: int) -> list[tuple[float, int]]:
    """The token itself where it is likely, and ids that hang on it; the likeliest last, as no server does."""
    first = [(judged(ids, n), ids[n])] if ids[n] % 7 < 3 and k else []
    best = -8.0 if first else -1.5
    others = [(best - rank / 100 - n / 1e6, (ids[n] + 1 + rank) % 997) for rank in range(k - len(first))]
    return [*reversed(others), *first]


def judged(ids: list[int], n: int) -> float:
    return -(ids[n] % 7) - n / 1000


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.agent_loops.teachers.BACKOFF", Backoff(0.001))


@pytest.fixture
async def teacher_of(serve: Callable[[Any], Any]) -> AsyncIterator[Callable[..., Awaitable[Teacher]]]:
    """A teacher that asks a served application."""
    made = []

    async def make(app: FastAPI, **settings: Any) -> Teacher:
        made.append(Teacher(TeacherConfig(url=await serve(app), **settings)))
        return made[-1]

    yield make
    for teacher in made:
        await teacher.close()


@pytest.fixture
def run(queue_of, tasks_of, parts_of, calling_policy, calculator):
    async def go(url: str, source: str = "*", task: dict | None = None, **settings: Any):
        made = tasks_of(**(task or {}))
        queue = queue_of(made)
        teachers = Teachers({source: TeacherConfig(url=url, **settings)})
        parts = dataclasses.replace(parts_of(queue, FakeClient(calling_policy()), calculator), teachers=teachers)
        outcome = await Episode(parts, queue.lease(made[0])).run()
        await teachers.close()
        return outcome, queue.done.get(made[0].task_id)

    return go


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
async def test_every_sampled_token_has_its_judgement(run, serve: Callable[[Any], Any], form: str) -> None:
    server = FakeServer(form)
    outcome, trajectory = await run(await serve(server.app))
    assert outcome.kind is OutcomeKind.COMPLETED
    (segment,) = trajectory.segments
    ids = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    expected = [judged(ids, n) for n in range(len(segment.prompt_ids), len(ids))]
    mask = segment.response_mask == 1
    assert 0 < mask.sum() < len(mask)
    np.testing.assert_allclose(segment.teacher_logprobs, np.where(mask, expected, 0.0), atol=1e-6)
    assert segment.teacher_logprobs.dtype == np.float32
    last = int(np.flatnonzero(mask)[-1]) + 1
    assert server.asked == [ids[: len(segment.prompt_ids) + last]], "asked once, without what follows the last token"


@pytest.mark.parametrize(
    ("source", "task"), [("other", {}), ("oth*", {}), ("*", {"split": "eval/3"})], ids=["name", "pattern", "evaluation"]
)
async def test_episodes_without_a_teacher_are_as_before(
    run, serve: Callable[[Any], Any], source: str, task: dict
) -> None:
    server = FakeServer()
    _, trajectory = await run(await serve(server.app), source, task)
    assert trajectory.segments[0].teacher_logprobs is None
    assert server.asked == []


@pytest.mark.parametrize("form", ["prompt_logprobs", "generate"])
async def test_every_sampled_token_has_the_likeliest_ids(run, serve: Callable[[Any], Any], form: str) -> None:
    """Of vLLM's form the k likeliest alone, whether or not the sampled token is one of them."""
    server = FakeServer(form)
    outcome, trajectory = await run(await serve(server.app), top_k=3)
    assert outcome.kind is OutcomeKind.COMPLETED
    assert server.top_k == [3]
    (segment,) = trajectory.segments
    ids = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    places = len(segment.prompt_ids) + np.flatnonzero(segment.response_mask)
    assert 0 < len(places) < len(segment.response_ids)
    expected = [sorted(likeliest(ids, n, 3), key=lambda pair: -pair[0]) for n in places.tolist()]
    assert segment.teacher_top_ids.tolist() == [[token for _, token in row] for row in expected]
    np.testing.assert_allclose(
        segment.teacher_top_logprobs, [[value for value, _ in row] for row in expected], rtol=1e-6
    )
    assert (segment.teacher_top_ids.dtype, segment.teacher_top_logprobs.dtype) == (np.int32, np.float32)
    inside = segment.teacher_top_ids == np.array(ids)[places][:, None]
    assert 0 < inside.any(1).sum() < len(places), "tokens of both kinds"
    found = segment.teacher_logprobs[np.flatnonzero(segment.response_mask)]
    np.testing.assert_allclose(found, [judged(ids, n) for n in places.tolist()], atol=1e-6)


async def test_texts_in_place_of_ids_are_no_likeliest_ids(teacher_of) -> None:
    """`echo` names its likeliest tokens by their texts, of which several ids may have one."""
    teacher = await teacher_of(FakeServer("echo").app, top_k=2)
    with pytest.raises(InfraFailure, match="gives no logprobs of a prompt"):
        await teacher.judge([1, 2, 3], [2])


async def test_a_busy_teacher_is_asked_again(run, serve: Callable[[Any], Any]) -> None:
    server = FakeServer()
    server.failures = [503, 429, 500]
    outcome, trajectory = await run(await serve(server.app))
    assert outcome.kind is OutcomeKind.COMPLETED
    assert trajectory.segments[0].teacher_logprobs is not None
    assert trajectory.metrics["teacher_latency_s"] > 0


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ({"failures": [503] * 9}, "HTTP 503"),
        ({"value": "nan"}, "not a finite number"),
        ({"form": "none"}, "gives no logprobs of a prompt"),
    ],
)
async def test_a_failed_teacher_is_infrastructure(
    run, serve: Callable[[Any], Any], spoil: dict[str, Any], named: str
) -> None:
    server = FakeServer()
    for name, value in spoil.items():
        setattr(server, name, value)
    outcome, trajectory = await run(await serve(server.app), retries=2)
    assert (outcome.kind, outcome.component, trajectory) == (OutcomeKind.INFRA_ERROR, "teacher", None)
    assert named in outcome.reason


async def test_a_teacher_that_is_away_is_named(run) -> None:
    outcome, trajectory = await run("http://127.0.0.1:9", retries=1)
    assert (outcome.kind, outcome.component, trajectory) == (OutcomeKind.INFRA_ERROR, "teacher", None)
    assert "127.0.0.1:9" in outcome.reason


async def test_waits_have_a_deadline(teacher_of) -> None:
    server = FakeServer()
    server.failures = [503] * 10_000
    teacher = await teacher_of(server.app, retries=10_000, deadline_s=0.5)
    with pytest.raises(InfraFailure, match=r"no logprobs within 0\.5 s"):
        await teacher.judge([1, 2, 3])


async def test_very_unlikely_tokens_stay_finite(teacher_of) -> None:
    server = FakeServer()
    server.value = -9999.0
    teacher = await teacher_of(server.app)
    assert (await teacher.judge([1, 2, 3])).logprobs.tolist() == [0.0, -100.0, -100.0]


async def test_ids_of_another_server_are_refused(teacher_of) -> None:
    """The logprobs are keyed by the ids that were judged."""
    app = FastAPI()
    app.get("/v1/models")(FakeServer().models)

    @app.post("/v1/completions")
    async def completions() -> Any:
        return {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}]}]}

    teacher = await teacher_of(app)
    with pytest.raises(InfraFailure, match="gives no logprobs of a prompt"):
        await teacher.judge([5, 7, 8])


@pytest.mark.parametrize(
    ("spoil", "named", "fix"),
    [
        ({"tokens": [1, 2, 4]}, "their vocabularies differ", "tokenizer"),
        ({"form": "none"}, "no logprobs of a prompt", "penstock teacher-server"),
        ({"failures": [401, 401]}, "HTTP 401", "key_variable"),
        ({"failures": [503]}, "HTTP 503", "start the server"),
    ],
)
async def test_a_bad_teacher_is_refused_at_start(teacher_of, spoil: dict[str, Any], named: str, fix: str) -> None:
    server = FakeServer()
    for name, value in spoil.items():
        setattr(server, name, value)
    teacher = await teacher_of(server.app)
    with pytest.raises(BadTeacher, match=named) as refused:
        await teacher.check([1, 2, 3], 63, 100)
    assert fix in refused.value.fix


@pytest.mark.parametrize("tokens", [[1, 2, 3], None])
async def test_a_good_teacher_passes(teacher_of, tokens: list[int] | None) -> None:
    server = FakeServer()
    server.tokens = tokens
    teacher = await teacher_of(server.app)
    found = await teacher.check([1, 2, 3], 63, 511)
    assert ("same ids" in found) == (tokens is not None)
    assert server.asked == [[1, 2, 3], [1, 2, 3, 63]]
    with pytest.raises(BadTeacher, match="reads 512 tokens"):
        await teacher.check([1, 2, 3], 63, 512)


@pytest.mark.parametrize(
    ("top_k", "longest", "named", "fix"),
    [
        (21, 100, "greater than max allowed: 20", "--max-logprobs 21"),
        (65, 100, "top_k is 65, the vocabulary has 64 ids", "64 or less"),
        (60, 1 << 20, "more than the 256 MiB that are read", "rollout.max_model_len"),
    ],
)
async def test_more_likeliest_ids_than_there_can_be_are_refused(
    teacher_of, top_k: int, longest: int, named: str, fix: str
) -> None:
    teacher = await teacher_of(FakeServer().app, top_k=top_k)
    with pytest.raises(BadTeacher, match=named) as refused:
        await teacher.check([1, 2, 3], 63, longest)
    assert fix in refused.value.fix


async def test_a_teacher_says_what_its_likeliest_ids_cost(teacher_of) -> None:
    server = FakeServer()
    teacher = await teacher_of(server.app, top_k=20)
    assert "top_k 20: 160 bytes more per sampled token" in await teacher.check([1, 2, 3], 63, 100)
    assert server.top_k == [20, 20]
