"""The pipeline and dead letters of a living run, over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import numpy as np
import pytest
from tests.dashboard.recorded import write_config

from penstock.dashboard import Pulse
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import (
    JournalEntry,
    JournalKind,
    Limits,
    Outcome,
    OutcomeKind,
    QueueUnavailable,
    ServerInfo,
    Task,
    WeightUpdate,
)

MODEL = Path(__file__).parents[2] / "recipes" / "calculator" / "model"


@pytest.fixture
async def run(queue: MemoryTransferQueue, tmp_path: Path) -> MemoryTransferQueue:
    write_config(tmp_path / "mine", f"model: {MODEL}\nmax_staleness: 1\ngroups_per_step: 1\n")
    await queue.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1, max_attempts=1), "x")
    await queue.submit([Task(f"train/{n}", "train", [{"role": "user", "content": "?"}], "test", "1") for n in range(3)])
    return queue


async def test_the_state_of_a_living_run(page: httpx.AsyncClient, run: MemoryTransferQueue) -> None:
    await run.heartbeat(ServerInfo("s1", "http://b", 0, in_flight=3, accepting=False))
    await run.heartbeat(ServerInfo("s0", "http://a", 0, in_flight=2, in_flight_tokens=50))
    await run.report_update(WeightUpdate("s0", 1, 0.002, 0.1, 0.01, 4))
    await run.lease_episodes("worker", 2, 0)
    told = (await page.get("/api/runs/mine/live")).json()
    assert told["alive"]
    assert (told["status"]["groups"]["queued"], told["status"]["groups"]["admitted"]) == (2, 1)
    servers = [(s["server_id"], s["in_flight"], s["accepting"], s["lag"]) for s in told["servers"]]
    assert servers == [("s0", 2, True, 0), ("s1", 3, False, 0)]
    assert (told["updates"]["count"], told["updates"]["pause_ms_p50"]) == (1, pytest.approx(2.0))
    assert told["limits"]["groups_per_step"] == 1


async def test_a_queue_that_does_not_answer_is_a_cause_and_not_waited_for(page, run, monkeypatch) -> None:
    async def away() -> None:
        raise QueueUnavailable("status: redis did not answer in 4 s")

    monkeypatch.setattr(run, "status", away)
    state = (await page.get("/api/runs/mine/live")).json()
    assert (state["alive"], state["cause"]) == (False, "status: redis did not answer in 4 s")
    monkeypatch.setattr("penstock.dashboard.live.FRESH_S", 0.0)
    monkeypatch.setattr("penstock.dashboard.live.DEADLINE_S", 0.05)
    monkeypatch.setattr("penstock.dashboard.routes.DEADLINE_S", 0.05)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(run, "status", never)
    monkeypatch.setattr(run, "requeue", never)
    assert "did not answer within" in (await page.get("/api/runs/mine/live")).json()["cause"]
    answer = await page.post("/api/runs/mine/dead-letters/requeue", json={"episode": "train/0#0"})
    assert (answer.status_code, "did not answer" in answer.json()["error"]["message"]) == (503, True)


async def test_a_run_that_ended(page: httpx.AsyncClient, tmp_path: Path) -> None:
    write_config(tmp_path / "old")
    assert "is not running" in (await page.get("/api/runs/old/live")).json()["cause"]
    answer = await page.get("/api/runs/old/dead-letters")
    assert (answer.status_code, answer.json()["error"]["field"]) == (409, "run")
    letters = [{"episode": f"train/{i}#0", "component": "tool", "reason": "stuck", "journal": []} for i in range(3)]
    (tmp_path / "old" / "dead_letters.jsonl").write_text("".join(f"{json.dumps(letter)}\n" for letter in letters))
    answer = await page.get("/api/runs/old/dead-letters", params={"start": 1})
    assert answer.json() == {"start": 1, "letters": letters[1:]}


async def test_many_pages_ask_the_queue_once(queues, run: MemoryTransferQueue, monkeypatch) -> None:
    monkeypatch.setattr("penstock.dashboard.live.FRESH_S", 1e9)
    status = AsyncMock(wraps=run.status)
    monkeypatch.setattr(run, "status", status)
    pulse = Pulse(queues)
    answers = [await pulse.of("mine") for _ in range(20)]
    assert (status.await_count, answers[0] is answers[-1]) == (1, True)


async def test_dead_letters_with_their_journal(page: httpx.AsyncClient, run: MemoryTransferQueue) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode("12+30").ids
    failed = Outcome(OutcomeKind.INFRA_ERROR, "the box is gone", "sandbox")
    for lease in await run.lease_episodes("worker", 2, 0):
        spans, logprobs = np.array([[0, 0, len(ids)]], dtype=np.int32), np.zeros(len(ids), dtype=np.float32)
        sampled = JournalEntry(
            JournalKind.SAMPLED, 3, 7, np.array(ids, dtype=np.int32), logprobs, spans, {"finish_reason": "stop"}
        )
        await run.journal(lease, sampled, 0)
        await run.journal(lease, JournalEntry(JournalKind.TOOLS, data={"results": ["<b>42</b>"]}), 1)
        await run.fail(lease, failed)
    listed = (await page.get("/api/runs/mine/dead-letters")).json()["letters"]
    lines = [(one["episode"], one["component"], one["attempts"], one["events"]) for one in listed]
    assert lines == [("train/0#0", "sandbox", 1, 2), ("train/0#1", "sandbox", 1, 2)]
    whole = (await page.get("/api/runs/mine/dead-letter", params={"episode": "train/0#1"})).json()
    events = [(event["kind"], event["tokens"], event["text"]) for event in whole["journal"]]
    assert events == [("sampled", len(ids), "12+30"), ("tools", 0, "")]
    assert whole["journal"][1]["data"] == {"results": ["<b>42</b>"]}
    missing = await page.get("/api/runs/mine/dead-letter", params={"episode": "train/9#1"})
    assert (missing.status_code, missing.json()["error"]["field"]) == (404, "episode")
    refused = await page.post("/api/runs/mine/dead-letters/requeue", json={"episode": "train/9#1"})
    assert (refused.status_code, "no such dead letter" in refused.json()["error"]["message"]) == (409, True)
