"""Teachers and episodes: what is recorded, both forms of servers, failures that are infrastructure, refusals."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, HTTPException, Request
from tests.tools.conftest import serve  # noqa: F401 - the fixture

from penstock.agent_loops import (
    AgentConfig,
    BadTeacher,
    Episode,
    FakeClient,
    InfraFailure,
    Teacher,
    TeacherConfig,
    Teachers,
)
from penstock.common import Backoff
from penstock.transfer_queue import OutcomeKind


class FakeServer:
    """Judges token n by its id and place: −(id mod 7) − n / 1000."""

    def __init__(self, form: str = "prompt_logprobs") -> None:
        self.form = form
        self.asked: list[list[int]] = []
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
        ids = body["prompt"]
        self.asked.append(ids)
        found = [judged(ids, n) if self.value is None else self.value for n in range(1, len(ids))]
        if self.form == "prompt_logprobs":
            keyed = [{str(token): {"logprob": v}} for token, v in zip(ids[1:], found, strict=True)]
            return {"choices": [{"prompt_logprobs": [None, *keyed]}]}
        return {"choices": [{"logprobs": {"token_logprobs": [None, *found, -0.5]}}]}


def judged(ids: list[int], n: int) -> float:
    return -(ids[n] % 7) - n / 1000


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.agent_loops.teachers.BACKOFF", Backoff(0.001))


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


def test_names_go_before_patterns() -> None:
    configs = {pattern: TeacherConfig(url=f"http://{n}") for n, pattern in enumerate(["ma*", "*", "maths"])}
    teachers = Teachers(configs)
    order = list(teachers._teachers.values())
    assert [order.index(teachers.of(name)) for name in ("maths", "mazes", "code")] == [2, 0, 1]


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


async def test_a_worker_that_dies_while_the_teacher_answers_leaves_nothing(
    serve: Callable[[Any], Any], queue_of, tasks_of, parts_of, calling_policy, calculator
) -> None:
    """The next one samples nothing and runs no tool again, and records what a worker that lived would have."""
    server, (task,) = FakeServer(), tasks_of()
    queue, client = queue_of([task]), FakeClient(calling_policy())
    teachers = Teachers({"*": TeacherConfig(url=await serve(server.app))})
    parts = dataclasses.replace(parts_of(queue, client, calculator), teachers=teachers)
    server.open.clear()
    dying = asyncio.create_task(Episode(parts, queue.lease(task)).run())
    await server.entered.wait()
    queue.expire_all()  # from here on nothing that the dead worker does counts
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    assert task.task_id not in queue.done
    sampled, executed = len(client.requests), list(calculator.executed)
    server.open.set()
    outcome = await Episode(parts, queue.lease(task)).run()
    assert outcome.kind is OutcomeKind.COMPLETED
    assert (len(client.requests), calculator.executed) == (sampled, executed)
    (segment,) = queue.done[task.task_id].segments
    ids = [*segment.prompt_ids.tolist(), *segment.response_ids.tolist()]
    expected = [judged(ids, n) for n in range(len(segment.prompt_ids), len(ids))]
    np.testing.assert_allclose(segment.teacher_logprobs, np.where(segment.response_mask, expected, 0), atol=1e-6)
    await teachers.close()


async def test_a_teacher_that_is_away_is_named(run) -> None:
    outcome, trajectory = await run("http://127.0.0.1:9", retries=1)
    assert (outcome.kind, outcome.component, trajectory) == (OutcomeKind.INFRA_ERROR, "teacher", None)
    assert "127.0.0.1:9" in outcome.reason


async def test_waits_have_a_deadline(serve: Callable[[Any], Any]) -> None:
    server = FakeServer()
    server.failures = [503] * 10_000
    teacher = Teacher(TeacherConfig(url=await serve(server.app), retries=10_000, deadline_s=0.5))
    with pytest.raises(InfraFailure, match=r"no logprobs within 0\.5 s"):
        await teacher.logprobs([1, 2, 3])
    await teacher.close()


async def test_very_unlikely_tokens_stay_finite(serve: Callable[[Any], Any]) -> None:
    server = FakeServer()
    server.value = -9999.0
    teacher = Teacher(TeacherConfig(url=await serve(server.app)))
    assert (await teacher.logprobs([1, 2, 3])).tolist() == [0.0, -100.0, -100.0]
    await teacher.close()


async def test_ids_of_another_server_are_refused(serve: Callable[[Any], Any]) -> None:
    """The logprobs are keyed by the ids that were judged."""
    app = FastAPI()
    app.get("/v1/models")(FakeServer().models)

    @app.post("/v1/completions")
    async def completions() -> Any:
        return {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}, {"9": {"logprob": -1.0}}]}]}

    teacher = Teacher(TeacherConfig(url=await serve(app)))
    with pytest.raises(InfraFailure, match="gives no logprobs of a prompt"):
        await teacher.logprobs([5, 7, 8])
    await teacher.close()


@pytest.mark.parametrize(
    ("spoil", "named", "fix"),
    [
        ({"tokens": [1, 2, 4]}, "their vocabularies differ", "tokenizer"),
        ({"form": "none"}, "no logprobs of a prompt", "penstock teacher-server"),
        ({"failures": [401, 401]}, "HTTP 401", "key_variable"),
        ({"failures": [503]}, "HTTP 503", "start the server"),
    ],
)
async def test_a_bad_teacher_is_refused_at_start(
    serve: Callable[[Any], Any], spoil: dict[str, Any], named: str, fix: str
) -> None:
    server = FakeServer()
    for name, value in spoil.items():
        setattr(server, name, value)
    teacher = Teacher(TeacherConfig(url=await serve(server.app)))
    with pytest.raises(BadTeacher, match=named) as refused:
        await teacher.check([1, 2, 3], 63, 100)
    assert fix in refused.value.fix
    await teacher.close()


@pytest.mark.parametrize("tokens", [[1, 2, 3], None])
async def test_a_good_teacher_passes(serve: Callable[[Any], Any], tokens: list[int] | None) -> None:
    server = FakeServer()
    server.tokens = tokens
    teacher = Teacher(TeacherConfig(url=await serve(server.app)))
    found = await teacher.check([1, 2, 3], 63, 511)
    assert ("same ids" in found) == (tokens is not None)
    assert server.asked == [[1, 2, 3], [1, 2, 3, 63]]
    with pytest.raises(BadTeacher, match="reads 512 tokens"):
        await teacher.check([1, 2, 3], 63, 512)
    await teacher.close()


def test_settings_are_frozen_and_known() -> None:
    config = AgentConfig(teachers={"*": {"url": "http://teacher"}})
    assert config.teachers["*"].retries == 30
    with pytest.raises(ValueError, match="extra"):
        TeacherConfig(url="http://teacher", uri="x")
