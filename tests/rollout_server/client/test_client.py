"""The client against servers that die, drain, fall behind or never come: one whole answer, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import ClassVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.rollout_server.conftest import (
    TOKEN,
    RunningServer,
    RunQueue,
    begun,
    check_answer,
    fake_answer,
    join_chunks,
    rollout_server,
)

import penstock
from penstock.rollout_server import BadRequest, Chunk, EngineError, GenerateRequest, Generation, RolloutClient, Sampling
from penstock.rollout_server.protocol import VersionsDisproved
from penstock.testing import FakeEngine
from penstock.transfer_queue import ServerInfo

PYTHONPATH = str(Path(penstock.__file__).parent.parent)


@pytest.fixture
async def server(queue: RunQueue, tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with rollout_server(queue, tmp_path, token_s=0.002) as running:
        yield running


def ask(ids: list[int], count: int, episode: str = "e", **changes: int) -> GenerateRequest:
    return GenerateRequest(token_ids=ids, sampling=Sampling(max_new_tokens=count), episode_id=episode, **changes)


def check(answer: Generation) -> Generation:
    check_answer(answer.token_ids, answer.logprobs, answer.version_spans)
    return answer


async def collect(client: RolloutClient, request: GenerateRequest) -> tuple[list[Chunk], Chunk]:
    """The chunks of a stream, and all of them in one."""
    chunks = [chunk async for chunk in client.stream(request)]
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for chunk in chunks:
        check_answer(chunk.token_ids, chunk.logprobs, chunk.version_spans)
    return chunks, reduce(join_chunks, chunks)


async def test_generate_returns_the_whole_answer_of_one_server(client: RolloutClient, server: RunningServer) -> None:
    answer = check(await client.generate(ask([4, 5], 60)))
    assert answer.token_ids == fake_answer([4, 5], 60)
    assert answer.version_spans == [(0, 0, 60)]
    assert (answer.finish_reason, answer.resumed, answer.continued_over_update) == ("length", 0, False)
    assert await client.best_version() == 0


class DisprovedOnce(FakeEngine):
    """Its first answer ends with the report that the versions of its tokens were wrong."""

    contexts: ClassVar[list[list[int]]]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        self.contexts.append(request.token_ids)
        async for chunk in super().generate(request):
            if chunk.finish_reason and len(self.contexts) == 1:
                yield chunk.model_copy(update={"finish_reason": None})
                raise VersionsDisproved("versions on receipt differ from the engine's own")
            yield chunk


@pytest.mark.parametrize("token_s", [0.0, 0.01])
async def test_disproved_tokens_are_sampled_again_or_end_a_stream(
    client: RolloutClient, queue: RunQueue, tmp_path: Path, token_s: float
) -> None:
    async with rollout_server(queue, tmp_path, new_engine=partial(DisprovedOnce, token_s=token_s)):
        DisprovedOnce.contexts = []
        answer = check(await client.generate(ask([4, 5], 60)))
        assert DisprovedOnce.contexts == [[4, 5], [4, 5]]
        assert (len(answer.token_ids), answer.version_spans, answer.resumed) == (60, [(0, 0, 60)], 0)
        DisprovedOnce.contexts = []
        with pytest.raises(EngineError, match="differ from the engine's own"):
            await collect(client, ask([4, 5], 60))


async def test_stream_brings_the_answer_piece_by_piece(client: RolloutClient, server: RunningServer) -> None:
    chunks, total = await collect(client, ask([4, 5], 300))
    assert len(chunks) > 2
    assert (total.token_ids, total.finish_reason) == (fake_answer([4, 5], 300), "length")
    assert [chunk.version_spans for chunk in chunks] == [[(0, 0, len(chunk.token_ids))] for chunk in chunks]


async def test_closed_stream_frees_the_engine(client: RolloutClient, server: RunningServer) -> None:
    chunks = client.stream(ask([7], 500))
    await anext(chunks)
    await chunks.aclose()
    await server.until(lambda: server.engine.running == 0)
    assert client._router.describe() == "s0 v0 accepts"


async def test_bad_request_is_not_tried_again(client: RolloutClient, server: RunningServer) -> None:
    with pytest.raises(BadRequest, match=r"^token_ids.0: 512 is outside") as refused:
        await client.generate(ask([512], 5))
    assert not refused.value.retryable
    with pytest.raises(BadRequest, match="512 is outside"):
        await anext(client.stream(ask([512], 5)))


class NeverSaysSo(FakeEngine):
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(request):
            yield chunk.model_copy(update={"finish_reason": None})


async def test_last_chunk_of_a_server_that_gave_no_finish_reason_ends_the_stream(
    client: RolloutClient, queue: RunQueue, tmp_path: Path
) -> None:
    async with rollout_server(queue, tmp_path, new_engine=NeverSaysSo):
        _, total = await collect(client, ask([3], 20))
    assert (total.token_ids, total.finish_reason) == (fake_answer([3], 20), "length")


async def test_update_in_the_middle_shows_in_the_spans(client: RolloutClient, server: RunningServer) -> None:
    server.engine.token_s = 0.1  # the update comes within the answer
    asking = asyncio.create_task(client.generate(ask([1], 400)))
    await server.until(lambda: server.engine.sampled > 0)
    server.queue.announce(1)
    await server.until(lambda: server.engine.version == 1)
    server.engine.token_s = 0.0
    answer = check(await asking)
    assert [version for version, _, _ in answer.version_spans] == [0, 1]
    assert (answer.continued_over_update, answer.resumed) == (True, 0)
    swap = answer.version_spans[1][1]
    assert answer.token_ids[:swap] == fake_answer([1], swap)
    assert answer.token_ids[swap:] == fake_answer([1, *answer.token_ids[:swap]], 400 - swap, version=1)


async def test_draining_server_hands_new_requests_to_the_next(
    client: RolloutClient, queue: RunQueue, tmp_path: Path
) -> None:
    async with (
        rollout_server(queue, tmp_path, name="s0", token_s=0.002) as first,
        rollout_server(queue, tmp_path, name="s1", token_s=0.002) as second,
    ):
        for _ in range(4):
            await client.generate(ask([1], 3, "sticky"))
        holder = first if client._router._sticky["sticky"] == first.url else second
        other = second if holder is first else first
        holder.task.cancel()
        answer = await client.generate(ask([1], 30, "sticky"))
        assert answer.token_ids == fake_answer([1], 30)
        assert client._router._sticky["sticky"] == other.url


@contextmanager
def killable_server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, str(Path(__file__).with_name("fake_server.py")), TOKEN, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": PYTHONPATH})
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.wait()


@pytest.mark.crash
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_answers_of_a_lost_server_go_on_token_exact_at_the_next(
    client: RolloutClient,
    queue: RunQueue,
    tmp_path: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stays registered. After SIGSTOP of a whole sidecar its socket stays open, its keep-alives stop."""
    if number == signal.SIGSTOP:
        monkeypatch.setattr("penstock.rollout_server.client.client.SILENCE_S", 15.0)
    with killable_server(tmp_path) as (process, url):
        queue.registered["killed"] = ServerInfo("killed", url, 0)
        asking = await begun(client, [ask([9, i], 400, f"e{i}") for i in range(8)])
        process.send_signal(number)
        async with rollout_server(queue, tmp_path, name="s1", token_s=0.001) as other:
            for i, answer in enumerate(await asyncio.gather(*asking)):
                assert check(answer).token_ids == fake_answer([9, i], 400)
                assert answer.resumed == 1
            assert other.engine.asked >= 8


async def test_server_that_falls_short_of_the_version_is_not_asked(
    client: RolloutClient, queue: RunQueue, tmp_path: Path
) -> None:
    queue.announce(2)
    async with rollout_server(queue, tmp_path, name="new"):
        queue.registered["old"] = ServerInfo("old", "http://127.0.0.1:9", 1)
        answer = await client.generate(ask([1], 5, min_version=2))
        assert answer.version_spans == [(2, 0, 5)]
        assert await client.best_version() == 2


@pytest.mark.parametrize(
    ("accepting", "cause"),
    [
        (None, "no rollout server is registered"),
        (True, "gone at http://127"),
        (False, "gone v0 does not accept"),
    ],
)
async def test_waiting_for_a_server_ends_with_the_cause(queue: RunQueue, accepting: bool | None, cause: str) -> None:
    if accepting is not None:
        queue.registered["gone"] = ServerInfo("gone", "http://127.0.0.1:9", 0, accepting=accepting)
    client = RolloutClient(queue, TOKEN, timeout_s=1.0)
    for asking in (client.generate(ask([1], 5)), anext(client.stream(ask([1], 5)))):
        with pytest.raises(EngineError, match=cause) as caught:
            async with asyncio.timeout(30):  # and not the default of minutes
                await asking
        assert caught.value.retryable
    await client.close()


async def test_server_that_comes_late_is_found(client: RolloutClient, queue: RunQueue, tmp_path: Path) -> None:
    asking = asyncio.create_task(client.generate(ask([1], 5)))
    await asyncio.sleep(0.3)
    async with rollout_server(queue, tmp_path):
        assert (await asking).token_ids == fake_answer([1], 5)
        queue.down = True
        await asyncio.sleep(0.4)
        assert (await client.generate(ask([1], 3))).token_ids == fake_answer([1], 3), "the queue is away"


async def test_server_that_refuses_the_token_for_long_is_believed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout_server.client.client.STRANGER_S", 0.5)
    wrong = RolloutClient(server.queue, "another token")
    with pytest.raises(EngineError, match=r"refused for 0.5 s: .*401: a bearer token of this run") as caught:
        await wrong.generate(ask([1], 5))
    assert not caught.value.retryable
    await wrong.close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, b"not here") for status in (401, 403, 404, 405)),
        (404, "nicht verfügbar".encode("latin-1")),
        (200, b'{"status": "ok"}\n'),
        (200, b"[1, 2]\n"),
        (200, b'{"error": "no such model"}\n'),
        (200, b"<html></html>\n"),
    ],
)
async def test_stranger_at_the_address_of_a_server_that_is_gone_costs_one_try(
    client: RolloutClient, server: RunningServer, status: int, body: bytes
) -> None:
    """A port is free once its server is killed, and the registry knows of that server for some seconds yet."""
    asked = []

    async def refuse(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status, body=body, content_type="text/plain", charset="utf-8")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as stranger:
        url = str(stranger.make_url("")).rstrip("/")
        server.queue.registered["gone"] = ServerInfo("gone", url, 0)
        client._router._home = url
        for first in (1, 2):
            check(await client.generate(ask([first], 20)))
    assert asked == ["/generate"]
    assert ("another program's" if status == 200 else str(status)) in client._router._states[url].breaker.cause


class AbortsOnce(FakeEngine):
    """Ends its first answer after 5 tokens as an engine does that aborts for its own reasons."""

    aborted = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        count = 0
        async for chunk in super().generate(request):
            count += 1
            if count == 5 and not self.aborted:
                self.aborted = True
                yield chunk.model_copy(update={"finish_reason": "abort"})
                return
            yield chunk


async def test_aborted_answer_goes_on_where_its_kv_is(client: RolloutClient, queue: RunQueue, tmp_path: Path) -> None:
    async with (
        rollout_server(queue, tmp_path, name="s0", new_engine=AbortsOnce) as home,
        rollout_server(queue, tmp_path, name="s1") as other,
    ):
        client._router._home = home.url
        answer = check(await client.generate(ask([1], 20)))
        assert other.engine.asked == 0
        assert "rests" not in client._router.describe()
    assert answer.token_ids == fake_answer([1], 20)
    assert (answer.finish_reason, answer.resumed) == ("length", 1)


def test_client_and_server_process_need_no_torch() -> None:
    code = (
        "import sys, penstock.rollout_server.client.client, penstock.rollout_server.server.process;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": PYTHONPATH})
