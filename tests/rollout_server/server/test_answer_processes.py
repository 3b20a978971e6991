"""A sidecar of three processes before one engine, a server process whose tokens are a hash of context and version.

A token under a wrong version's name is another token, so every answer proves its versions by itself.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from pydantic import ValidationError
from tests.rollout_server.conftest import (
    HEADERS,
    TOKEN,
    Mount,
    RunningServer,
    StubQueue,
    ask,
    begun,
    check_answer,
    rollout_server,
    small_config,
)

from penstock.common import cancel_and_wait
from penstock.rollout_server import Chunk, EngineError, Generation, RolloutClient, RolloutConfig
from penstock.rollout_server.protocol import join_chunks
from penstock.testing import FakeHttpEngine, next_token

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PROCESSES = 3
SLOTS = 6
TOKEN_S = 0.003
QUEUE_SECRET = "a-password-of-the-queue"
METRICS_TOKEN = "a-token-of-metrics"


@dataclass
class Several:
    """The server under test."""

    server: RunningServer
    queue: StubQueue
    sidecar: Any
    version: int = 0

    @property
    def processes(self) -> list[Any]:
        return list(self.sidecar.beside.processes)

    async def until(self, condition: Any) -> None:
        await self.server.until(condition, 90.0)

    async def all_begun(self) -> None:
        await self.until(lambda: all(process.begun for process in self.processes))

    async def swap(self) -> int:
        """One more version is loaded."""
        self.version += 1
        self.queue.announce(self.version)
        await self.until(lambda: self.sidecar.version == self.version)
        return self.version

    async def idle(self) -> None:
        """Nothing is in flight, no connection is open, and that was counted."""
        await self.until(lambda: self.sidecar.in_flight == 0)
        await self.until(lambda: all(process.counts.connections == 0 for process in self.processes))

    async def engine_figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = await self.server.engine.server.call("GET", "/load_figures")
        return figures


@asynccontextmanager
async def several_processes(folder: Path) -> AsyncIterator[Several]:
    queue, mount = StubQueue(), Mount()
    config = small_config(
        engine="vllm", sidecar_processes=PROCESSES, max_concurrent=SLOTS, max_restarts=1000, max_model_len=32_768
    )
    async with rollout_server(
        queue, folder, model=str(folder), new_engine=partial(FakeHttpEngine, token_s=TOKEN_S), config=config,
        mount=mount, metrics_token=METRICS_TOKEN,
    ) as server:  # fmt: skip
        several = Several(server, queue, mount.sidecar)
        await several.all_begun()
        yield several


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def several(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Several]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_REDIS_PASSWORD", QUEUE_SECRET)
        patch.setenv("PENSTOCK_TOKEN", TOKEN)
        patch.setattr("penstock.rollout_server.server.answer_processes.restart_after", lambda _s: asyncio.sleep(0))
        async with several_processes(tmp_path_factory.mktemp("several")) as found:
            yield found


def http() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers=HEADERS, connector=aiohttp.TCPConnector(limit=0))


def prompt(number: int) -> list[int]:
    return [number + 1, 2, 3]


class Asked:
    """One request under way on a connection of its own: what has come of it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, number: int, length: int) -> None:
        self.context = prompt(number)
        self.found = Chunk()
        self.status = 0
        self._body = {"token_ids": self.context, "sampling": {"max_new_tokens": length}}
        self.task = asyncio.create_task(self._read(session, url))

    async def _read(self, session: aiohttp.ClientSession, url: str) -> None:
        async with session.post(f"{url}/generate", json=self._body) as response:
            self.status = response.status
            async for line in response.content:
                if self.status == 200 and line.strip():
                    self.found = join_chunks(self.found, Chunk.model_validate_json(line))

    @property
    def newest(self) -> int:
        """Version of its last token."""
        return self.found.version_spans[-1][0] if self.found.version_spans else -1


@asynccontextmanager
async def answers_under_way(several: Several, count: int, length: int) -> AsyncIterator[list[Asked]]:
    """Broken off at the end, where they have not ended."""
    async with http() as session:
        asked = [Asked(session, several.server.url, number, length) for number in range(count)]
        try:
            yield asked
        finally:
            await cancel_and_wait([one.task for one in asked])


async def whole_answers(several: Several, *lengths: int) -> list[Chunk]:
    async with http() as session:
        asked = [Asked(session, several.server.url, number, length) for number, length in enumerate(lengths)]
        await asyncio.gather(*(one.task for one in asked))
    for one, length in zip(asked, lengths, strict=True):
        assert (one.status, one.found.finish_reason, len(one.found.token_ids)) == (200, "length", length)
        check_versions(one.context, one.found)
    return [one.found for one in asked]


def check_versions(context: list[int], found: Chunk | Generation) -> list[int]:
    """Every token is what the version sampled that its span names. The versions, in order."""
    check_answer(found.token_ids, found.logprobs, found.version_spans)
    ids = list(context)
    for version, start, end in found.version_spans:
        for at in range(start, end):
            assert (found.token_ids[at], found.logprobs[at]) == next_token(ids, version), (version, at)
            ids.append(found.token_ids[at])
    return [version for version, _, _ in found.version_spans]


LONG = 30_000
"""Tokens of an answer that still goes on when the test has done what it must do meanwhile."""


async def test_every_process_labels_tokens_rightly_over_swaps(several: Several) -> None:
    await several.idle()
    async with answers_under_way(several, SLOTS, LONG) as asked:
        await several.until(lambda: [process.counts.in_flight for process in several.processes] == [2, 2])
        await several.until(lambda: all(one.found.token_ids for one in asked))
        first = several.version
        for _ in range(3):
            version = await several.swap()
            await several.until(lambda wanted=version: all(one.newest == wanted for one in asked))
    for one in asked:
        assert check_versions(one.context, one.found) == [first, first + 1, first + 2, first + 3]


async def test_a_process_that_read_nothing_before_a_swap_labels_rightly(several: Several) -> None:
    """Its tokens wait in its sockets, and behind them in the engine's front end."""
    await several.idle()
    stopped = several.processes[0]
    async with answers_under_way(several, SLOTS, LONG) as asked:
        await several.until(lambda: stopped.counts.in_flight == 2)
        await several.until(lambda: all(one.found.token_ids for one in asked))
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.8)
            swapping = asyncio.create_task(several.swap())
            await asyncio.sleep(0.4)
            assert not swapping.done(), "the engine waits for it"
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        version = await swapping
        await several.until(lambda: all(one.newest == version for one in asked))
    for one in asked:
        assert check_versions(one.context, one.found) == [version - 1, version]


async def test_limits_hold_in_the_sum_of_all_processes(several: Several) -> None:
    await several.idle()
    places = 5 * SLOTS
    async with answers_under_way(several, places + 20, LONG) as asked:
        await several.until(lambda: sum(one.status == 429 for one in asked) == 20)
        await several.until(lambda: several.sidecar.in_flight == places)
        figures = await several.engine_figures()
        assert figures["running"] == SLOTS
    assert figures["most"] == SLOTS


async def test_metrics_add_up_over_the_processes(several: Several) -> None:
    await several.idle()
    answered = [process.counts.answered for process in several.processes]
    async with http() as session:
        before, wanted = await metrics(session, several), several.sidecar.answered + SLOTS
        await whole_answers(several, *range(10, 10 + SLOTS))
        await several.until(lambda: several.sidecar.answered == wanted and several.sidecar.in_flight == 0)
        after = await metrics(session, several)
    assert after["tokens_total"] - before["tokens_total"] == sum(range(10, 10 + SLOTS))
    whole = 'requests_total{outcome="length"}'
    assert after[whole] - before.get(whole, 0.0) == SLOTS
    assert after["in_flight"] == 0
    assert all(process.counts.answered > then for process, then in zip(several.processes, answered, strict=True))


async def metrics(session: aiohttp.ClientSession, several: Several) -> dict[str, float]:
    async with session.get(f"{several.server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    named = [re.match(r"penstock_rollout_(\S+) (\S+)$", line) for line in lines]
    return {found[1]: float(found[2]) for found in named if found}


async def test_any_route_is_answered_on_any_connection(several: Several) -> None:
    await several.idle()
    sessions = [http() for _ in range(PROCESSES)]  # each keeps its one connection
    try:
        for session in sessions:
            assert (await call(session, several, "GET", "/health"))[0] == 200
        await several.until(lambda: [one.counts.connections for one in several.processes] == [1, 1])
        for session in sessions:
            await check_routes(session, several)
    finally:
        for session in sessions:
            await session.close()


async def check_routes(session: aiohttp.ClientSession, several: Several) -> None:
    status, health = await call(session, several, "GET", "/health")
    assert (status, health["ok"], health["version"]) == (200, True, several.version)
    assert (await call(session, several, "GET", "/nothing"))[0] == 404
    assert (await call(session, several, "POST", "/weights", {"action": "pull"}))[1]["version"] == several.version
    status, refusal = await call(session, several, "POST", "/generate", {"token_ids": "none"})
    assert (status, refusal["error"]["field"]) == (422, "token_ids")
    image = {"sha256": "0" * 64, "url": "data:image/png;base64,AAAA"}
    status, refusal = await call(session, several, "POST", "/generate", {"token_ids": [1], "images": [image]})
    assert (status, refusal["error"]["field"]) == (422, "images")
    status, _ = await call(session, several, "POST", "/generate", {"token_ids": [1], "min_version": 10**6})
    assert status == 409
    for path, method in (("/generate", "POST"), ("/health", "GET"), ("/nothing", "GET")):
        assert (await call(session, several, method, path, headers={"Authorization": "Bearer another"}))[0] == 401
    headers = {"Authorization": f"Bearer {METRICS_TOKEN}"}
    async with session.get(f"{several.server.url}/metrics", headers=headers) as response:
        assert response.status == 200
    assert (await call(session, several, "GET", "/health", headers=headers))[0] == 401
    one = Asked(session, several.server.url, 1, 3)
    await one.task
    assert (one.status, len(one.found.token_ids)) == (200, 3)


async def call(
    session: aiohttp.ClientSession, several: Several, method: str, path: str, body: Any = None, **given: Any
) -> tuple[int, Any]:
    async with session.request(method, several.server.url + path, json=body, **given) as response:
        return response.status, await response.json()


async def test_a_process_has_no_secret_but_its_own(several: Several) -> None:
    for process in several.processes:
        proc = Path(f"/proc/{process.pid}")
        said = (proc / "environ").read_bytes() + (proc / "cmdline").read_bytes()
        for secret in (QUEUE_SECRET, METRICS_TOKEN, TOKEN):
            assert secret.encode() not in said
    specs = str(several.sidecar.beside._specs)
    assert TOKEN not in specs
    assert QUEUE_SECRET not in specs


async def test_a_killed_process_breaks_off_its_own_answers_alone(several: Several) -> None:
    await several.idle()
    client = RolloutClient(several.queue, TOKEN, 60.0)
    try:
        asked = await begun(client, [ask(prompt(n), 1200) for n in range(SLOTS)])
        victim = several.processes[1]
        await several.until(lambda: several.sidecar.in_flight == SLOTS)
        theirs, pid = victim.counts.in_flight, victim.pid
        os.kill(pid, signal.SIGKILL)
        await several.swap()
        answers = await asyncio.gather(*asked)
    finally:
        await client.close()
    assert theirs == 2
    assert sum(found.resumed > 0 for found in answers) == theirs
    for number, found in enumerate(answers):
        check_versions(prompt(number), found)
    await several.all_begun()
    assert victim.pid != pid
    await several.idle()
    await whole_answers(several, *[5] * SLOTS)
    await several.until(lambda: victim.counts.tokens == 10)


async def test_no_process_hands_on_what_was_not_verified(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is found to hold other weights than the version's: it ends, and all follow to the next one."""
    monkeypatch.setattr("penstock.rollout_server.server.sidecar.restart_after", lambda _s: asyncio.sleep(0))
    await several.idle()
    looking, engines, before = asyncio.Event(), several.server.engines, several.version

    async def differs(_fetched: Any) -> None:
        await looking.wait()
        raise EngineError("it holds other values")

    monkeypatch.setattr(several.server.engine.weights, "_verify", differs)
    async with answers_under_way(several, SLOTS, LONG) as asked:
        await several.until(lambda: all(one.found.token_ids for one in asked))
        several.version = before + 1
        several.queue.announce(several.version)
        await several.until(lambda: not several.server.engine.weights.verified)
        sampled = (await several.engine_figures())["sampled"]
        while (await several.engine_figures())["sampled"] < sampled + 40 * SLOTS:
            await asyncio.sleep(0.02)
        looking.set()
        await asyncio.gather(*(one.task for one in asked))
    for one in asked:
        assert check_versions(one.context, one.found) == [before]
    await several.until(lambda: len(engines) == 2 and several.sidecar.open)
    client = RolloutClient(several.queue, TOKEN, 60.0)
    try:
        answers = await asyncio.gather(*(client.generate(ask(prompt(n), 5)) for n in range(SLOTS)))
    finally:
        await client.close()
    for number, found in enumerate(answers):
        assert check_versions(prompt(number), found) == [several.version]


@pytest.mark.deep
async def test_a_process_that_hangs_is_killed_before_decoding_goes_on(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.server.answer_processes.FOLLOW_S", 3.0)
    client = RolloutClient(several.queue, TOKEN, 60.0)
    try:
        for round_ in range(2):
            await several.all_begun()
            await several.idle()
            asked = await begun(client, [ask(prompt(n), 400) for n in range(SLOTS)])
            victim = several.processes[round_ % 2]
            pid = victim.pid
            os.kill(pid, signal.SIGSTOP)
            await several.swap()
            await several.swap()
            assert victim.pid != pid or not victim.begun
            for number, found in enumerate(await asyncio.gather(*asked)):
                check_versions(prompt(number), found)
    finally:
        await client.close()


async def test_one_process_alone_can_ask_the_hf_engine() -> None:
    with pytest.raises(ValidationError, match=r"sidecar_processes is 2.*hf engine"):
        RolloutConfig(engine="hf", sidecar_processes=2)
    with pytest.raises(ValidationError, match="max_concurrent is 3"):
        RolloutConfig(engine="vllm", sidecar_processes=4, max_concurrent=3)
