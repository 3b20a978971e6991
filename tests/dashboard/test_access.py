"""Who may look and change, and what every answer forbids the browser."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.dashboard.recorded import LOOKS, write_config

from penstock.dashboard import Tokens
from penstock.testing import MemoryTransferQueue
from penstock.transfer_queue import Limits, Outcome, OutcomeKind, Task

PATHS = ["session", "runs", "runs/mine/live", "runs/mine/trajectories", "runs/mine/dead-letters", "nothing"]
REQUEUE = "/api/runs/mine/dead-letters/requeue"
FORBIDDEN = ("'unsafe-inline'", "'unsafe-eval'", "http:", "https:", "data:", "*")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "writes", "Basic writes"])
async def test_data_needs_a_token(page: httpx.AsyncClient, path: str, header: str | None) -> None:
    page.headers.pop("Authorization")
    answer = await page.get(f"/api/{path}", headers={"Authorization": header} if header is not None else {})
    assert answer.status_code == 401
    assert answer.json()["error"]["field"] == "authorization"


async def test_only_the_token_in_the_header_opens_the_page(page: httpx.AsyncClient) -> None:
    tokens = Tokens("writes")
    assert tokens.scope_of("writes") == "write"
    assert [tokens.scope_of(given) for given in ("", "write", "writes ", "Bearer writes")] == [None] * 4
    assert "writes" not in repr(tokens)
    page.headers.pop("Authorization")
    assert (await page.get("/api/runs", params={"token": "writes"})).status_code == 401
    assert (await page.get("/api/runs", headers={"Cookie": "token=writes"})).status_code == 401


async def test_who_looks_changes_nothing(page: httpx.AsyncClient, queue: MemoryTransferQueue) -> None:
    await queue.create_run(Limits(group_size=2, groups_per_step=1, max_staleness=1, max_attempts=1), "x")
    await queue.submit([Task("train/0", "train", [{"role": "user", "content": "?"}], "test", "1")])
    for lease in await queue.lease_episodes("worker", 2, 0):
        await queue.fail(lease, Outcome(OutcomeKind.INFRA_ERROR, "the box is gone", "sandbox"))
    assert (await page.get("/api/session", headers=LOOKS)).json()["scope"] == "read"
    refused = await page.post(REQUEUE, json={"episode": "train/0#0"}, headers=LOOKS)
    assert (refused.status_code, (await queue.status()).groups["queued"]) == (403, 0)
    assert (await page.get("/api/session")).json()["scope"] == "write"
    assert (await page.post(REQUEUE, json={"episode": "train/0#0"})).json() == {"queued": "train/0#0"}
    assert (await queue.status()).groups["queued"] == 1


@pytest.mark.parametrize(
    "path", ["/", "/static/main.js", "/static/nothing.js", "/api/runs", "/api/nothing", "/favicon.ico"]
)
async def test_every_answer_forbids_foreign_and_inline_code(page: httpx.AsyncClient, path: str) -> None:
    headers = (await page.get(path)).headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert not [word for rule in policy.values() for word in rule.split() if word in FORBIDDEN]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == ("no-store" if path.startswith("/api/") else "no-cache")


@pytest.mark.parametrize("run", ["..", "%2e%2e", "..%2f..", ".hidden", "a%00b", "nothing"])
async def test_no_name_leads_out_of_the_folder(page: httpx.AsyncClient, tmp_path: Path, run: str) -> None:
    write_config(tmp_path.parent / "outside-of-it")
    for what in ("config", "metrics", "trajectories"):
        assert (await page.get(f"/api/runs/{run}/{what}")).status_code == 404


async def test_long_bodies_are_refused(page: httpx.AsyncClient, queue: MemoryTransferQueue) -> None:
    assert (await page.post(REQUEUE, json={"episode": "x" * (1 << 20)})).status_code == 413
