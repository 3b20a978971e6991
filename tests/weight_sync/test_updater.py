"""The updater: loads what is announced, says what it did not load, and when its server should start over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.rollout_server.conftest import RunQueue
from tests.virtual_clock import VirtualClock

from penstock.testing import fake_manifest
from penstock.transfer_queue import Announcement, QueueUnavailable, ServerInfo
from penstock.weight_sync import Fetch, LoadReport, Manifest, WeightsRefused, WeightsUnreachable, WeightUpdater

Problem = WeightsRefused | WeightsUnreachable | None


class Connected:
    """A `QueueConnection` without a deadline."""

    def __init__(self, queue: RunQueue) -> None:
        self.queue = queue

    async def ask(self, call: Awaitable[Any]) -> Any:
        return await call


class Counted:
    """`UpdateMetrics` that are read back."""

    def __init__(self) -> None:
        self.lag = self.refused = self
        self.lags: list[float] = []
        self.refusals = 0
        self.reports: list[LoadReport] = []

    def set(self, value: float) -> None:
        self.lags.append(value)

    def inc(self) -> None:
        self.refusals += 1

    def updated(self, report: LoadReport) -> None:
        self.reports.append(report)


class LoadingEngine:
    """Raises `problem`, or has the weights."""

    def __init__(self, problem: Problem = None) -> None:
        self.problem = problem
        self.asked: list[int] = []

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        self.asked.append(manifest.version)
        if self.problem is not None:
            raise self.problem
        return LoadReport(version=manifest.version, fetch_s=0.25, pause_s=0.5, load_s=0.125, in_flight=3)


async def here(manifest: Manifest, /) -> Manifest:
    """A fetch of files that are on this machine."""
    return manifest


class Server:
    """An updater with what stands around it."""

    def __init__(
        self, problem: Problem = None, may_move: Callable[[], Awaitable[bool]] | None = None, fetch: Fetch = here
    ) -> None:
        self.queue, self.metrics, self.engine = RunQueue(), Counted(), LoadingEngine(problem)
        counted: Any = self.metrics
        self.updater = WeightUpdater("s0", Connected(self.queue), fetch, counted, may_move)
        self.updater.begin(0)

    async def pull(self, version: int | None = None) -> bool:
        if version is not None:
            self.queue.announce(version)
        return await self.updater.pull(self.engine)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The updater's."""
    found = VirtualClock(1000.0)
    monkeypatch.setattr("penstock.weight_sync.updater.time", SimpleNamespace(monotonic=found, time=found))
    return found


@pytest.mark.parametrize("begun", [False, True], ids=["its first engine starts", "before the first pull"])
async def test_updater_has_a_status_from_the_start(begun: bool) -> None:
    counted: Any = Counted()
    updater = Server().updater if begun else WeightUpdater("s0", Connected(RunQueue()), here, counted)
    assert (updater.loading, updater.is_dropped, updater.announced) == (False, False, False)
    status = updater.status()
    assert (status.version, status.newest, status.behind_versions, status.behind_s) == (0, None, 0, 0.0)
    assert (status.last, status.refused, status.history) == (None, None, [])
    assert bool(status.cause) is begun


async def test_dropped_weights_are_no_version_where_the_queue_has_forgotten_the_announcement() -> None:
    """After a sleep at level 2 the engine holds nothing: it may not serve until the weights are announced anew."""
    server = Server()
    assert await server.pull(1) is True
    assert (server.updater.announced, server.updater.is_dropped) == (True, False)
    server.updater.dropped()
    assert server.updater.is_dropped
    server.queue.announced = None
    assert await server.pull() is False
    assert "forgotten" in server.updater.status().cause
    assert await server.pull(1) is True
    assert (server.engine.asked, server.updater.is_dropped) == ([1, 1], False)


async def test_dropped_weights_are_had_again_whatever_was_refused() -> None:
    """The engine has no other weights than those that are announced."""
    server = Server()
    await server.pull(1)
    server.engine.problem = WeightsRefused("tensor 'w'")
    await server.pull(2)
    assert "version 2 refused, version 1 stays: tensor 'w'" in server.updater.cause
    server.updater.dropped()
    assert await server.pull() is False
    assert "version 2 refused, no version is held: tensor 'w'" in server.updater.cause
    server.engine.problem = None
    server.updater.dropped()
    assert await server.pull() is True
    assert server.engine.asked == [1, 2, 2, 2]


async def test_updater_says_while_it_loads(clock: VirtualClock) -> None:
    seen = list[bool]()

    async def fetch(manifest: Manifest, /) -> Manifest:
        seen.append(server.updater.loading)
        clock.now += 2.0
        return manifest

    async def watched(manifest: Manifest) -> LoadReport:
        seen.append(server.updater.loading)
        return await load(manifest)

    server = Server(fetch=fetch)
    load = server.engine.load_weights
    server.engine.load_weights = watched  # type: ignore[method-assign]
    await server.pull(1)
    assert (seen, server.updater.loading) == ([True, True], False)
    assert server.updater.last is not None
    assert server.updater.last.fetch_s == 2.25, "the engine's own 0.25 s included"


@pytest.mark.parametrize(
    ("form", "problem"), [(["no", "manifest"], "not a mapping"), (fake_manifest(2), "the manifest is of version 2")]
)
async def test_updater_refuses_an_announcement_of_another_form(form: Any, problem: str) -> None:
    server = Server()
    await server.pull(3)
    server.queue.announced = Announcement(4, form)
    assert await server.pull() is False
    assert (server.engine.asked, server.updater.status().refused) == ([3], 4)
    assert problem in server.updater.cause


async def test_updater_two_versions_late_for_a_minute_is_a_straggler(clock: VirtualClock) -> None:
    server = Server(WeightsUnreachable("no route"))
    server.queue.registered["s1"] = ServerInfo("s1", "http://127.0.0.1:9", 2)
    await server.pull(1)
    clock.now += 60.0
    assert server.updater.behind_s == 60.0
    await server.pull(2)
    assert await server.updater.straggles() == ""
    clock.now += 0.12345
    assert server.updater.status().behind_s == 60.123
    straggles = await server.updater.straggles()
    assert "holds version 0, 2 behind" in straggles
    assert "for 60 s, 0 loads refused" in straggles
    server.queue.announce(1)
    await server.pull()
    assert await server.updater.straggles() == "", "one version is not far"


async def test_updater_loads_what_is_announced_once() -> None:
    server = Server()
    assert await server.pull() is True, "nothing is announced: the model's own weights are the newest"
    assert await server.pull(3) is True
    assert await server.pull() is True
    assert server.engine.asked == [3]
    (update,) = server.queue.reported
    assert (update.server_id, update.version, update.pause_s, update.load_s) == ("s0", 3, 0.5, 0.125)
    assert update.in_flight == 3
    status = server.updater.status()
    assert (status.version, status.newest, status.behind_versions, status.behind_s) == (3, 3, 0, 0.0)
    assert (status.refused, status.cause) == (None, "")
    assert status.last is not None
    assert server.metrics.reports == [status.last]
    assert status.last.fetch_s >= 0.25, "the fetch before the load counts too"
    assert [(load.version, load.outcome, load.report) for load in status.history] == [(3, "loaded", status.last)]
    assert (server.metrics.lags, server.updater.pulls) == ([0, 0, 0], 3)


async def test_updater_loads_a_number_again_with_other_weights() -> None:
    """A queue that forgot a version gives its number out again; a trainer that restarts may move the files."""
    server = Server()
    await server.pull(3)
    assert server.queue.announced is not None
    manifest = server.queue.announced.manifest
    server.queue.announced = Announcement(3, {**manifest, "path": "/elsewhere"})
    assert await server.pull() is True
    assert server.engine.asked == [3]
    other = {**manifest["tensors"][0], "xxh3": "0" * 16}
    server.queue.announced = Announcement(3, {**manifest, "tensors": [other]})
    assert await server.pull() is True
    assert server.engine.asked == [3, 3]
    server.queue.announce(1)
    assert await server.pull() is True
    server.queue.announce(2, weights=f"{1:016x}")  # a step that changed nothing
    assert await server.pull() is True
    assert (server.engine.asked, server.updater.version) == ([3, 3, 1, 2], 2)


async def test_updater_reads_a_manifest_only_where_its_mark_changed() -> None:
    server = Server()
    for _ in range(3):
        await server.pull()
    assert server.queue.manifests_read == 0, "nothing is announced"
    await server.pull(3)
    for _ in range(5):
        assert await server.pull() is True
    assert server.queue.manifests_read == 1
    assert server.queue.announced is not None
    manifest = server.queue.announced.manifest
    server.queue.announced = Announcement(3, {**manifest, "path": "/elsewhere"})
    for _ in range(2):
        assert await server.pull() is True
    assert (server.queue.manifests_read, server.engine.asked) == (2, [3])
    server.queue.announced = None  # a queue that has forgotten everything
    assert await server.pull() is True
    server.queue.announced = Announcement(3, {**manifest, "path": "/elsewhere"})
    assert await server.pull() is True
    assert server.queue.manifests_read == 3
    server.queue.announce(2)
    assert await server.pull() is True
    assert (server.queue.manifests_read, server.engine.asked) == (4, [3, 2])


async def test_updater_reads_what_was_published_between_mark_and_manifest() -> None:
    server = Server()
    server.queue.announce(1)
    read_mark = server.queue.latest_mark

    async def then_publish() -> Any:
        mark = await read_mark()
        server.queue.announce(2)
        return mark

    server.queue.latest_mark = then_publish  # type: ignore[method-assign]
    assert await server.pull() is True
    server.queue.latest_mark = read_mark  # type: ignore[method-assign]
    assert await server.pull() is True
    assert (server.engine.asked, server.updater.version) == ([2], 2)


async def test_updater_holds_weights_that_it_could_not_report() -> None:
    server = Server()

    async def fail(_update: object) -> None:
        raise QueueUnavailable("down")

    server.queue.report_update = fail  # type: ignore[method-assign]
    assert await server.pull(2) is True
    assert (server.updater.version, server.updater.cause) == (2, "")


async def test_updater_says_what_it_refused_and_tries_it_once() -> None:
    server = Server(WeightsRefused("tensor 'w'"))
    for _ in range(2):
        assert await server.pull(2) is False
    assert (server.engine.asked, server.metrics.refusals, server.metrics.lags) == ([2], 1, [2, 2])
    status = server.updater.status()
    assert (status.version, status.newest, status.behind_versions, status.refused) == (0, 2, 2, 2)
    assert (status.last, [load.outcome for load in status.history]) == (None, ["refused"])
    assert "tensor 'w'" in status.cause == status.history[0].cause
    server.updater.try_again()
    server.engine.problem = None
    assert await server.pull() is True
    status = server.updater.status()
    assert (status.version, status.refused, status.cause) == (2, None, "")
    assert [load.outcome for load in status.history] == ["refused", "loaded"]


async def test_updater_asks_a_second_later_for_what_it_did_not_reach(clock: VirtualClock) -> None:
    server = Server(WeightsUnreachable("no route"))
    assert await server.pull(1) is False
    clock.now += 0.75
    assert await server.pull() is False
    assert server.engine.asked == [1]
    clock.now += 0.25
    await server.pull()
    assert server.engine.asked == [1, 1]
    server.updater.try_again()
    await server.pull()
    server.updater.begin(0)
    await server.pull()
    assert server.engine.asked == [1, 1, 1, 1]
    status = server.updater.status()
    assert (status.refused, server.metrics.refusals) == (None, 0)
    assert [load.outcome for load in status.history] == ["unreachable"] * 2, "once per engine and cause"
    assert "no route" in status.cause


async def test_updater_stays_while_it_may_not_move() -> None:
    allowed = False

    async def may_move() -> bool:
        return allowed

    server = Server(may_move=may_move)
    assert await server.pull(2) is False
    assert (server.engine.asked, server.updater.behind_versions) == ([], 2)
    assert server.updater.behind_s == 0.0, "it is not late: it waits for an evaluation"
    allowed = True
    assert await server.pull() is True
    assert server.engine.asked == [2]


async def test_updater_that_others_outrun_is_a_straggler() -> None:
    """Three refusals in a row while another server has newer weights."""
    server = Server(WeightsRefused("no"))
    for version in range(1, 4):
        await server.pull(version)
    server.queue.registered["s0"] = ServerInfo("s0", "http://127.0.0.1:9", 3)
    assert await server.updater.straggles() == "", "no other server has them: it is the trainer's fault"
    server.queue.registered["s1"] = ServerInfo("s1", "http://127.0.0.1:9", 0)
    assert await server.updater.straggles() == "", "others do no better"
    server.queue.registered["s1"] = ServerInfo("s1", "http://127.0.0.1:9", 3)
    assert "3 loads refused" in await server.updater.straggles()
    server.queue.down = True
    assert await server.updater.straggles() == ""


async def test_updater_counts_the_refusals_of_one_engine() -> None:
    server = Server(WeightsRefused("no"))
    server.queue.registered["s1"] = ServerInfo("s1", "http://127.0.0.1:9", 9)
    for _ in range(2):
        for version in range(1, 4):
            assert await server.updater.straggles() == ""
            await server.pull(version)
        assert "3 loads refused" in await server.updater.straggles()
        server.updater.begin(0)
    server.engine.problem = None
    for version in range(4, 7):
        await server.pull(version)
        server.engine.problem = WeightsRefused("no")
    assert await server.updater.straggles() == "", "two refusals after a load"


async def test_updater_is_behind_until_it_has_the_newest() -> None:
    server = Server(WeightsRefused("no"))
    assert server.updater.behind_s == 0.0
    await server.pull(1)
    assert server.updater.behind_s > 0
    server.updater.begin(0)
    assert server.updater.behind_s == 0.0
    await server.pull(2)
    assert server.updater.behind_s > 0
    server.engine.problem = None
    await server.pull(3)
    assert server.updater.behind_s == 0.0
    server.queue.announce(1)  # a queue that went back
    server.engine.problem = WeightsRefused("no")
    await server.pull()
    assert server.updater.behind_versions == 0


async def test_updater_keeps_what_it_has_while_the_queue_is_down() -> None:
    server = Server()
    await server.pull(1)
    server.queue.down = True
    assert await server.pull(2) is False
    assert (server.engine.asked, server.updater.pulls, server.updater.status().newest) == ([1], 1, 1)
    server.queue.down = False
    assert await server.pull() is True


async def test_updater_keeps_the_newest_twenty_attempts() -> None:
    server = Server()
    for version in range(1, 23):
        await server.pull(version)
    assert [load.version for load in server.updater.status().history] == list(range(3, 23))
