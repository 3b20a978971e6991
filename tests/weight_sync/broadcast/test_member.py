"""A member of broadcasts: the offers that it reads, and answers that stop none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.broadcasting import StagedServer
from tests.until import until
from tests.weight_sync.conftest import TOKEN
from tests.weight_sync.http.http_parts import RecordedPauses

torch = pytest.importorskip("torch")

from penstock.common import cancel_and_wait
from penstock.weight_sync import (
    BroadcastMember,
    Offer,
    StagedFetch,
)

pytestmark = pytest.mark.torch
BEARER = {"Authorization": f"Bearer {TOKEN}"}


OFFER = {
    "version": 1, "port": 1, "name": "a-1", "group": "a-1", "first_rank": 1, "count": 1, "size": 2, "bucket_bytes": 9,
    "silence_s": 1.0, "deadline_s": 1.0, "tensors": [{"name": "w", "shape": [3], "dtype": "float32"}],
    "splits": [[12]], "split_of": [0],
}  # fmt: skip


def test_offer_is_read_back() -> None:
    assert Offer.parse(Offer.parse(OFFER).as_dict()) == Offer.parse(OFFER)
    assert Offer.parse(OFFER).nbytes == 12


@pytest.mark.parametrize(
    "change",
    [
        {"bucket_bytes": 1},
        {"silence_s": 2},
        {"tensors": [], "split_of": []},
        {"splits": [[0, 12], [4, 8, 0]], "split_of": [1]},
        {"splits": [[0, 12], [4, 8, 0]], "split_of": [1], "orders": [[], [1, 0]]},
    ],
    ids=repr,
)
def test_offer_at_its_limits_is_taken(change: dict[str, object]) -> None:
    assert Offer.parse({**OFFER, **change}).size == 2


def test_workers_of_an_offer_have_places_in_a_row() -> None:
    offer = Offer.parse(OFFER | {"first_rank": 3, "count": 2, "size": 6})
    assert [(offer.member(worker).rank, offer.member(worker).size) for worker in range(2)] == [(3, 6), (4, 6)]


@pytest.mark.parametrize(
    "change",
    [
        {"port": "1"}, {"colour": "red"}, {"tensors": 3}, {"tensors": [{"name": "w"}]}, {"bucket_bytes": 0},
        {"first_rank": 0}, {"first_rank": 2}, {"count": True}, {"silence_s": None},
        {"tensors": [{"name": "w", "shape": [-3], "dtype": "float32"}]},
        {"tensors": [{"name": "w", "shape": [3], "dtype": "complex64"}]},
        {"tensors": [{"name": 3, "shape": [3], "dtype": "float32"}]},
        {"splits": 3}, {"splits": [3]}, {"splits": [[11]]}, {"splits": [[-12, 24]]}, {"splits": [[True]]},
        {"orders": [[0], [0]]}, {"orders": [[1]]}, {"orders": [["0"]]}, {"splits": [[4, 8]], "orders": [[0]]},
        {"split_of": []}, {"split_of": [1]}, {"split_of": ["0"]}, {"split_of": [0, 0]},
    ],
    ids=repr,
)  # fmt: skip
def test_offer_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="offer"):
        Offer.parse({**OFFER, **change})


@pytest.mark.parametrize(
    ("offer", "status"), [({"port": 1}, 200), ([], 200), (3, 200), (None, 200), (OFFER, 503)], ids=str
)
async def test_member_goes_on_after_an_answer_that_is_no_offer(
    offer: object, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        if "no place" in caplog.text:
            asked.set()
        return web.Response(text="no JSON") if offer is None else web.json_response(offer, status=status)

    await run_member(answer, asked)


async def test_member_pauses_longer_after_each_answer_in_vain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that no broadcast began is as good as any."""
    pauses, statuses, done = RecordedPauses(), [500, 500, 204, 500], asyncio.Event()
    monkeypatch.setattr("penstock.weight_sync.broadcast.member.AGAIN", pauses)

    async def answer(_request: web.Request) -> web.Response:
        if not statuses:
            done.set()
            await asyncio.sleep(60)
        return web.Response(status=statuses.pop(0))

    await run_member(answer, done)
    assert pauses.failures == [1, 2, 1]


async def test_member_of_another_wire_says_so_and_takes_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a minute: the trainer may be another one by then."""
    monkeypatch.setattr("penstock.weight_sync.broadcast.member.OTHER_WIRE_S", 600.0)
    asked = list[object]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(status=409, text="this trainer broadcasts over carrier pigeons")

    refused = asyncio.Event()

    async def watch() -> None:
        await until(lambda: "carrier pigeons" in caplog.text)
        await asyncio.sleep(0.1)
        refused.set()

    watching = asyncio.create_task(watch())
    await run_member(answer, refused)
    await watching
    assert asked == [{"count": 1, "wire": "gloo/2", "seat": ""}]
    assert "no place" not in caplog.text


async def run_member(answer: Callable[[web.Request], Awaitable[web.Response]], until_set: asyncio.Event) -> None:
    app = web.Application()
    app.router.add_post("/broadcasts", answer)
    async with TestServer(app) as trainer:
        member, url = BroadcastMember(TOKEN), str(trainer.make_url("/broadcasts/1"))
        running = asyncio.create_task(member.run(StagedServer(Path("none")), lambda: url))
        async with asyncio.timeout(60):
            await until_set.wait()
        await cancel_and_wait([running])
    assert (member.received, member.missed, member.busy, member.cause) == (0, 0, False, "")


async def test_member_closes_what_fetches_its_files() -> None:
    class Fetched:
        closed = False

        async def __call__(self, manifest: Any, /) -> Any:
            return manifest

        async def close(self) -> None:
            self.closed = True

    fetched = Fetched()
    await StagedFetch(BroadcastMember(TOKEN), fetched).close()
    assert fetched.closed
