"""A server fetches from a trainer and peers that answer by a script: whom it asks, how long, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.virtual_clock import VirtualClock
from tests.weight_sync.conftest import TOKEN
from tests.weight_sync.http.http_parts import (
    PEER,
    TRAINER,
    RecordedPauses,
    Reply,
    ScriptedHosts,
    begin_of,
    names,
    one_mib,
    promising,
    says,
    too_much,
    whole,
    wrong,
)

torch = pytest.importorskip("torch")

from penstock.common import Backoff
from penstock.weight_sync import Downloader, WeightPublisher, WeightsRefused, WeightsUnreachable, read_verified
from penstock.weight_sync.http.progress import FetchProgress

pytestmark = pytest.mark.torch


@pytest.fixture
async def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedHosts]:
    for name, pause in (("PAUSE_S", 0.001), ("RECONNECT", Backoff(0.001))):
        monkeypatch.setattr(f"penstock.weight_sync.http.client.{name}", pause)
    scripted, app = ScriptedHosts(tmp_path / "published"), web.Application()
    app.router.add_route("*", "/{name}", scripted.answer)
    async with TestServer(app, host="0.0.0.0") as server:  # every address of loopback
        url = f"http://{TRAINER}:{server.port}"
        scripted.publisher = WeightPublisher(scripted.folder, "http", base_url=url)
        yield scripted


@pytest.fixture
def downloader(tmp_path: Path) -> Downloader:
    return Downloader(tmp_path / "s0", TOKEN, stall_s=30, serves="http://127.0.0.1:9")


async def test_fetch_asks_the_eight_peers_that_were_named_last(hosts: ScriptedHosts, downloader: Downloader) -> None:
    peers = [f"127.0.0.{number}" for number in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 3)]
    manifest = hosts.publish(1, *map(names, peers), whole)
    await asyncio.to_thread(downloader.localise, manifest)
    assert hosts.asked == [host for peer in peers for host in (TRAINER, peer)] + [TRAINER]
    port = manifest.place.split(":")[2].partition("/")[0]
    assert hosts.avoided[2] == f"http://127.0.0.2:{port},http://127.0.0.3:{port}"
    manifest = hosts.publish(2, names("127.0.0.9"), says(502), whole)
    await asyncio.to_thread(downloader.localise, manifest)
    known = [f"127.0.0.{number}" for number in (3, 11, 10, 8, 7, 6, 5)]
    assert hosts.asked == [TRAINER, "127.0.0.9", TRAINER, *known, TRAINER]


async def test_fetch_ends_with_the_peer_that_has_all(hosts: ScriptedHosts, downloader: Downloader) -> None:
    await asyncio.to_thread(downloader.localise, hosts.publish(1, names("127.0.0.3"), names(PEER), whole))
    manifest = hosts.publish(2, says(502))
    hosts.scripts[PEER] = [whole]
    read_verified(await asyncio.to_thread(downloader.localise, manifest))
    assert (hosts.asked, hosts.puts) == ([TRAINER, PEER], 2)
    await asyncio.to_thread(downloader.localise, manifest)
    assert (hosts.asked, hosts.puts) == ([TRAINER, PEER], 2), "it is here, and the trainer knows it"


async def test_fetch_of_wrong_bytes_is_refused_after_a_peer_was_asked(
    hosts: ScriptedHosts, downloader: Downloader
) -> None:
    """All of them are the trainer's."""
    manifest = hosts.publish(1, names(PEER), wrong)
    with pytest.raises(WeightsRefused, match="weights-00000001"):
        await asyncio.to_thread(downloader.localise, manifest)
    assert downloader.bytes_received == {"trainer": manifest.bytes, "peers": 0}


async def test_fetch_of_wrong_bytes_is_refused_after_their_file_has_gone(
    hosts: ScriptedHosts, downloader: Downloader
) -> None:
    """As after a `close` at that moment, which deletes what is there."""

    def remove_and_lie(request: web.Request, file: Path) -> web.StreamResponse:
        for part in downloader.directory.iterdir():
            part.unlink()
        return wrong(request, file)

    with pytest.raises(WeightsRefused, match=r"version 1: .*weights-00000001"):
        await asyncio.to_thread(downloader.localise, hosts.publish(1, remove_and_lie))


async def test_trickle_is_given_up_and_what_came_counts(hosts: ScriptedHosts, tmp_path: Path) -> None:
    """Each byte comes before the connection is silent for too long; at that pace the file would take days."""

    async def trickle(request: web.Request, file: Path) -> web.StreamResponse:
        answer = web.StreamResponse(status=206, headers=promising(request, file))
        await answer.prepare(request)
        for byte in file.read_bytes()[begin_of(request) :]:
            await answer.write(bytes([byte]))
            await asyncio.sleep(0.02)
        return answer

    manifest = hosts.publish(1, trickle, whole)
    with pytest.raises(WeightsUnreachable, match=r"not done in time: less than \d+ bytes came in 5 s"):
        await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN, stall_s=5).localise, manifest)
    hosts.scripts[TRAINER] = [whole]
    second = Downloader(tmp_path / "s0", TOKEN, stall_s=20)
    read_verified(await asyncio.to_thread(second.localise, manifest))
    assert 0 < second.bytes_received["trainer"] < manifest.bytes, "verified with the bytes of the first attempt"


async def test_fetch_takes_no_more_than_was_announced(hosts: ScriptedHosts, downloader: Downloader) -> None:
    manifest = hosts.publish(1, too_much)
    read_verified(await asyncio.to_thread(downloader.localise, manifest))
    assert downloader.bytes_received == {"trainer": manifest.bytes, "peers": 0}


async def test_fetch_that_goes_on_from_one_wrong_byte_begins_anew(
    hosts: ScriptedHosts, downloader: Downloader, tmp_path: Path
) -> None:
    manifest = hosts.publish(1, whole, whole)
    (tmp_path / "s0").mkdir(mode=0o700)
    part = tmp_path / "s0" / f"{manifest.files[-1].xxh3}-{manifest.files[-1].name}.part"
    part.write_bytes(b"\xff")
    part.chmod(0o600)
    read_verified(await asyncio.to_thread(downloader.localise, manifest))
    assert downloader.bytes_received["trainer"] == 2 * manifest.bytes - 1


REFUSED, UNREACHABLE = WeightsRefused, WeightsUnreachable
ALL = "bytes 0-9/10"


@pytest.mark.parametrize(
    ("reply", "error", "words", "requests"),
    [
        (says(400, "x" * 201), UNREACHABLE, "400 x{200}$", 1),
        (says(499), UNREACHABLE, "499", 1),
        (says(417), UNREACHABLE, "417", 1),
        (says(416), REFUSED, "answers 416 None, the manifest promises bytes 0-", 1),
        (says(200), REFUSED, "answers 200 None", 1),
        (lambda *of: web.Response(status=200, headers=promising(*of)), REFUSED, "answers 200 bytes 0-", 1),
        (says(206, Content_Range=ALL), REFUSED, f"answers 206 {ALL}, the manifest promises", 1),
        (says(500), UNREACHABLE, "500.*given up after 5 attempts", 5),
        (says(501), UNREACHABLE, "501.*given up after 5 attempts", 5),
        (says(503), UNREACHABLE, "503.*given up after 5 attempts", 5),
    ],
    ids=["400", "499", "417", "416", "200", "200-range", "206", "500", "501", "503"],
)
async def test_fetch_says_what_was_answered(
    hosts: ScriptedHosts, downloader: Downloader, reply: Reply, error: type[Exception], words: str, requests: int
) -> None:
    manifest = hosts.publish(1, *[reply] * 20)
    with pytest.raises(error, match=rf"version 1: http.*weights-00000001.*{words}"):
        await asyncio.to_thread(downloader.localise, manifest)
    assert len(hosts.asked) == requests


async def test_fetch_pauses_longer_after_each_attempt_in_vain(
    hosts: ScriptedHosts, downloader: Downloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = RecordedPauses()
    monkeypatch.setattr("penstock.weight_sync.http.client.RECONNECT", pauses)
    tensors = {"w": torch.rand(400_000)}
    manifest = hosts.publish(1, says(502), says(502), one_mib, says(502), whole, tensors=tensors)
    read_verified(await asyncio.to_thread(downloader.localise, manifest))
    assert pauses.failures == [2, 3, 1, 2]


@pytest.mark.parametrize("serves", ["http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"])
async def test_fetch_offers_no_loopback_address_to_another_machine(
    hosts: ScriptedHosts, tmp_path: Path, serves: str
) -> None:
    manifest = hosts.publish(1)
    place = manifest.place.replace(TRAINER, "0.0.0.0")  # not of loopback by its name
    hosts.scripts["0.0.0.0"] = [whole]
    remote = replace(manifest, files=(replace(manifest.files[-1], place=place),))
    await asyncio.to_thread(Downloader(tmp_path / "s0", TOKEN, serves=serves).localise, remote)
    assert (hosts.asked, hosts.puts) == (["0.0.0.0"], 0)
    hosts.scripts[TRAINER] = [whole]
    await asyncio.to_thread(Downloader(tmp_path / "s1", TOKEN, serves=serves).localise, manifest)
    assert (hosts.asked, hosts.puts) == (["0.0.0.0", TRAINER], 1)


WAIT = says(503, Retry_After="1")


class SlowHosts:
    """Replies that take time, and a fetch that measures it by the same clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        monkeypatch.setattr("penstock.weight_sync.http.client.FetchProgress", partial(FetchProgress, clock=self.clock))

    def after(self, seconds: float, reply: Reply) -> Reply:
        def late(request: web.Request, file: Path) -> web.StreamResponse | Awaitable[web.StreamResponse]:
            self.clock.now += seconds
            return reply(request, file)

        return late


async def test_fetch_stalls_by_the_time_without_a_source_alone(
    hosts: ScriptedHosts, downloader: Downloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 s: neither the wait for a turn, nor a peer that brought nothing, nor a MiB that came count."""
    late = SlowHosts(monkeypatch).after
    tensors = {"w": torch.rand(800_000)}
    scripts: list[list[Reply]] = [[late(16, WAIT)], [names(PEER)], [late(16, one_mib)] * 2]
    for version, script in enumerate(scripts, 1):
        hosts.scripts[PEER] = [late(16, says(404))]
        manifest = hosts.publish(version, *script, late(16, says(502)), whole, tensors=tensors)
        read_verified(await asyncio.to_thread(downloader.localise, manifest))


async def test_fetch_waits_for_its_turn_no_longer_than_the_file_takes(
    hosts: ScriptedHosts, downloader: Downloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = SlowHosts(monkeypatch).after
    manifest = hosts.publish(1, *[late(20, WAIT)] * 4, whole)
    with pytest.raises(WeightsUnreachable, match=r"another server is fetching it.*waited for its turn"):
        await asyncio.to_thread(downloader.localise, manifest)
    assert len(hosts.asked) == 2


async def test_fetched_files_may_be_removed_by_others(
    hosts: ScriptedHosts, downloader: Downloader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unlink, removed = Path.unlink, list[str]()

    def unlink_second(path: Path, missing_ok: bool = False) -> None:
        if path.exists() and path.parent == tmp_path / "s0":
            removed.append(path.name.partition("-")[2])
            unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_second)
    for version in (1, 2):
        await asyncio.to_thread(downloader.localise, hosts.publish(version, whole))
    downloader.close()
    assert removed == ["weights-00000001.safetensors", "weights-00000002.safetensors"]
    assert not (tmp_path / "s0").exists()
