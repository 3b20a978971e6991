"""Where requests go: sticky, home, a group's server, the less loaded of two; simulated for 64 servers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout_server.conftest import StubQueue

from penstock.rollout_server.client.routing import BOUNDED_LOAD, CACHE_S, PendingRequest, Router
from penstock.transfer_queue import ServerInfo


@pytest.fixture
def queue() -> StubQueue:
    return StubQueue()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def register(queue: StubQueue, *names: str, **fields: Any) -> None:
    for name in names:
        queue.registered[name] = ServerInfo(name, f"http://{name}", 0, **fields)


async def url_of(router: Router, episode: str, min_version: int = 0, avoid: tuple[str, ...] = ()) -> str | None:
    server = await router.pick(episode, min_version, avoid)
    return server.url if server else None


async def test_new_episodes_go_home_while_home_is_able(queue: StubQueue) -> None:
    register(queue, "a", in_flight_tokens=9000)
    register(queue, "b")
    router = Router(queue, home="http://a")
    assert await url_of(router, "e0") == "http://a"
    sent = router.begin("http://a")
    router.failed(sent, "a test", gone=True)
    router.end(sent)
    assert [await url_of(router, episode) for episode in ("e0", "e1")] == ["http://b"] * 2
    router.succeeded(sent)
    assert [await url_of(router, episode) for episode in ("e0", "e2")] == ["http://b", "http://a"]


async def test_of_two_servers_the_one_with_fewer_tokens_in_flight(queue: StubQueue) -> None:
    register(queue, "a", in_flight=1, in_flight_tokens=5000)
    register(queue, "b", in_flight=9, in_flight_tokens=3000)
    router = Router(queue)
    chosen = ""
    for episode in range(6):
        url = await url_of(router, f"e{episode}")
        assert url is not None
        router.begin(url, 1000)
        chosen += url[-1]
    assert chosen == "bbabab"  # equal tokens: fewer requests


async def test_what_was_sent_counts_until_a_heartbeat_has_it(queue: StubQueue, clock: list[float]) -> None:
    register(queue, "a", "b")
    router = Router(queue)
    sent = router.begin("http://a", 1000)
    assert {await url_of(router, f"e{i}") for i in range(20)} == {"http://b"}
    clock[0] += 2.0
    register(queue, "b", in_flight_tokens=1)
    router._servers = await queue.servers()
    assert {await url_of(router, f"f{i}") for i in range(20)} == {"http://a"}
    router.end(sent)
    assert not router._states["http://a"].pending


async def test_a_full_server_is_left_alone_for_as_long_as_it_asked(queue: StubQueue, clock: list[float]) -> None:
    register(queue, "a")
    router = Router(queue)
    router.full(router.begin("http://a"), 1.0)
    assert await url_of(router, "e") is None
    assert router.describe() == "a v0 has a long queue"
    clock[0] += 1.0
    assert await url_of(router, "e") == "http://a"


async def test_a_half_open_server_gets_one_request(queue: StubQueue, clock: list[float]) -> None:
    register(queue, "a")
    router = Router(queue)
    router.failed(router.begin("http://a"), "a test", gone=True)
    assert await url_of(router, "e0") is None
    assert router.describe() == "a v0 rests after: a test"
    clock[0] += 0.3
    assert await url_of(router, "e1") == "http://a"
    trial = router.begin("http://a")
    assert await url_of(router, "e2") is None
    router.first_tokens(trial)
    assert await url_of(router, "e2") == "http://a"


async def test_what_is_to_be_avoided_is_asked_where_there_is_no_other(queue: StubQueue) -> None:
    register(queue, "a")
    router = Router(queue)
    assert await url_of(router, "e", avoid=("http://a",)) == "http://a"
    register(queue, "b")
    router._servers = await queue.servers()
    assert await url_of(router, "e", avoid=("http://a",)) == "http://b"


async def test_servers_that_left_are_forgotten(queue: StubQueue, clock: list[float]) -> None:
    register(queue, "a", "b")
    router = Router(queue)
    under_way = router.begin("http://a")
    router.failed(router.begin("http://b"), "a test", gone=True)
    router._states["http://b"].pending.clear()
    queue.registered.clear()
    clock[0] += 2 * CACHE_S
    await router.servers()
    assert list(router._states) == ["http://a"]
    router.end(under_way)


def beat(queue: StubQueue, truth: Counter[str], requests: Counter[str]) -> None:
    for name, server in queue.registered.items():
        tokens = truth[server.url]
        queue.registered[name] = replace(server, in_flight_tokens=tokens, in_flight=requests[server.url])


async def simulate(
    queue: StubQueue, clock: list[float], servers: int, clients: int, episodes: int, seed: int
) -> tuple[Counter[str], list[tuple[Router, str, str]]]:
    """`episodes` start within 10 s, 100 at a time, from `clients` that know what heartbeats said a second ago."""
    register(queue, *(f"s{i:02d}" for i in range(servers)))
    routers = [Router(queue, seed=seed + i) for i in range(clients)]
    truth, requests = Counter[str](), Counter[str]()
    placed = []
    for number in range(episodes):
        if number % 100 == 0:
            clock[0] += 1.0
            beat(queue, truth, requests)
        router, tokens = routers[number % clients], 500 + 97 * (number % 11)
        url = await url_of(router, f"e{number}")
        assert url is not None
        router.begin(url, tokens)
        truth[url] += tokens
        requests[url] += 1
        placed.append((router, f"e{number}", url))
    return truth, placed


@pytest.mark.parametrize(("clients", "bound"), [(1, 1.35), (16, 1.5)])
async def test_a_thousand_episodes_over_64_servers_are_balanced_and_sticky(
    queue: StubQueue, clock: list[float], clients: int, bound: float
) -> None:
    for seed in range(3):
        truth, placed = await simulate(queue, clock, 64, clients, 1000, 100 * seed)
        mean = sum(truth.values()) / 64
        assert len(truth) == 64
        assert max(truth.values()) / mean < bound
        beat(queue, truth, truth)
        clock[0] += 1.0
        assert [await url_of(router, episode) for router, episode, _ in placed] == [url for _, _, url in placed]


async def test_one_server_gets_all(queue: StubQueue, clock: list[float]) -> None:
    truth, _ = await simulate(queue, clock, 1, 4, 50, 0)
    assert list(truth) == ["http://s00"]


Step = st.tuples(st.sampled_from(["ask", "fail", "full", "work", "close", "wait", "leave", "join"]), st.integers(0, 7))


@settings(max_examples=60)
@given(steps=st.lists(Step, max_size=40))
async def test_whatever_happens_only_able_servers_are_picked(steps: list[tuple[str, int]]) -> None:
    """Registered, accepting, not resting, not full; and what is open is what was opened and not closed."""
    queue, now = StubQueue(), [0.0]
    register(queue, *(f"s{i}" for i in range(4)))
    router = Router(queue, seed=1)
    under_way: list[PendingRequest] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        for what, number in steps:
            await act(router, queue, now, under_way, what, number)
    assert sorted(id(sent) for state in router._states.values() for sent in state.pending) == sorted(map(id, under_way))


async def act(
    router: Router, queue: StubQueue, now: list[float], under_way: list[PendingRequest], what: str, number: int
) -> None:
    one = under_way[number % len(under_way)] if under_way else None
    match what:
        case "ask":
            await ask_one(router, now[0], under_way, number)
        case "wait":
            now[0] += 0.4 * number
        case "leave":
            queue.registered.pop(f"s{number % 4}", None)
        case "join":
            register(queue, f"s{number % 4}")
        case _ if one is not None:
            settle(router, under_way, one, what, number)


def settle(router: Router, under_way: list[PendingRequest], one: PendingRequest, what: str, number: int) -> None:
    match what:
        case "fail":
            router.failed(one, "a test", gone=number % 2 == 0)
        case "full":
            router.full(one, 1.0)
        case "work":
            router.succeeded(one)
        case "close":
            router.end(one)
            under_way.remove(one)


async def ask_one(router: Router, now: float, under_way: list[PendingRequest], number: int) -> None:
    server = await router.pick(f"e{number}", 0)
    if server is not None:
        known = router._states[server.url]
        assert server.accepting
        assert known.breaker.allows(now)
        assert now >= known.full_until
        under_way.append(router.begin(server.url, 100))


async def test_short_answers_do_not_all_follow_one_old_heartbeat(queue: StubQueue, clock: list[float]) -> None:
    """Each is answered before the next is sent, and the registry says the same all the time."""
    register(queue, "busy", in_flight=1, in_flight_tokens=100)
    register(queue, "idle")
    router, chosen = Router(queue, seed=0), Counter[str]()
    for number in range(16):
        url = await url_of(router, f"e{number}")
        assert url is not None
        router.end(router.begin(url, 100))
        chosen[url] += 1
        clock[0] += 0.01
    assert abs(chosen["http://busy"] - chosen["http://idle"]) <= 2


async def sixteen_new_episodes(router: Router) -> Counter[str]:
    """Where they go when all begin at once."""
    chosen = Counter[str]()
    for number in range(16):
        url = await url_of(router, f"e{number}")
        assert url is not None
        router.begin(url, 128)
        chosen[url] += 1
    return chosen


async def test_what_is_over_since_an_old_heartbeat_no_longer_counts(queue: StubQueue, clock: list[float]) -> None:
    """A busy machine's heartbeat is late: it tells of answers that this client has had long since."""
    router = Router(queue, seed=0)
    earlier = [router.begin("http://a", 448) for _ in range(5)]
    clock[0] += 0.5
    for sent in earlier:
        router.end(sent)
    clock[0] += 2.0
    register(queue, "a", in_flight=5, in_flight_tokens=5 * 448, age_s=2.2)
    register(queue, "b", age_s=0.1)
    assert await sixteen_new_episodes(router) == {"http://a": 8, "http://b": 8}


async def test_what_is_over_and_does_not_come_back_keeps_no_episodes_away(queue: StubQueue, clock: list[float]) -> None:
    """Requests of no episode, some sent right before the heartbeat, some after it, all answered."""
    router = Router(queue, seed=0)
    earlier = [router.begin("http://a", 448, sticky=False) for _ in range(5)]
    clock[0] += 0.03
    register(queue, "a", in_flight=5, in_flight_tokens=5 * 448)
    register(queue, "b")
    await router.servers()
    earlier += [router.begin("http://a", 448, sticky=False) for _ in range(5)]
    clock[0] += 0.1
    for sent in earlier:
        router.end(sent)
    assert await sixteen_new_episodes(router) == {"http://a": 8, "http://b": 8}


async def test_what_others_have_in_flight_counts_however_old_the_heartbeat(
    queue: StubQueue, clock: list[float]
) -> None:
    register(queue, "a", in_flight=5, in_flight_tokens=5000, age_s=4.0)
    register(queue, "b", age_s=4.0)
    router = Router(queue, seed=0)
    sent = router.begin("http://a", 448)
    router.end(sent)
    assert {await url_of(router, f"e{number}") for number in range(8)} == {"http://b"}


# prefixes: members of a group share their prompt -------------------------------------------------------------------
async def placed_group(router: Router, prefix: str, members: int, tokens: int = 1000) -> Counter[str]:
    """Where the members of one group go when all begin at once."""
    chosen = Counter[str]()
    for number in range(members):
        server = await router.pick(f"{prefix}#{number}", 0, prefix=prefix, tokens=tokens)
        assert server is not None
        router.begin(server.url, tokens)
        chosen[server.url] += 1
    return chosen


async def first_of(router: Router, prefix: str) -> str | None:
    server = await router.pick("", 0, prefix=prefix)
    return server.url if server else None


async def test_a_group_goes_to_one_server_whichever_client_asks(queue: StubQueue, clock: list[float]) -> None:
    """Beside a load of others, as in a run: 16 episodes at each server."""
    register(queue, *(f"s{i}" for i in range(8)), in_flight=16, in_flight_tokens=16_000)
    routers = [Router(queue, seed=seed) for seed in range(4)]
    for number in range(20):
        chosen = [await placed_group(router, f"train/{number}", 1) for router in routers]
        assert len(Counter(url for one in chosen for url in one)) == 1


async def test_a_large_group_overloads_no_server(queue: StubQueue) -> None:
    register(queue, *(f"s{i}" for i in range(4)))
    chosen = await placed_group(Router(queue, seed=1), "train/1", 64)
    assert max(chosen.values()) <= BOUNDED_LOAD * 64 / 4 + 1
    small = await placed_group(Router(queue, seed=1), "train/1", 4)
    assert len(small) < 4


@settings(max_examples=40)
@given(servers=st.integers(2, 12), gone=st.integers(0, 11))
async def test_where_a_server_disappears_only_its_groups_move(servers: int, gone: int) -> None:
    queue = StubQueue()
    register(queue, *(f"s{i}" for i in range(servers)))
    before = {f"t{n}": await first_of(Router(queue), f"t{n}") for n in range(60)}
    lost = queue.registered.pop(f"s{gone % servers}")
    after = {prefix: await first_of(Router(queue), prefix) for prefix in before}
    assert {prefix for prefix in before if before[prefix] != after[prefix]} == {
        prefix for prefix, url in before.items() if url == lost.url
    }
    assert len(set(before.values())) > 1


async def test_groups_spread_over_the_servers_evenly(queue: StubQueue) -> None:
    register(queue, *(f"s{i}" for i in range(8)))
    chosen = Counter([await first_of(Router(queue), f"train/{number:08d}") for number in range(800)])
    assert set(chosen) == {f"http://s{i}" for i in range(8)}
    assert max(chosen.values()) < 140


async def test_an_episode_stays_where_it_is_whatever_its_group(queue: StubQueue) -> None:
    register(queue, "a", "b")
    router = Router(queue)
    for episode, url in (("e0", "http://a"), ("e1", "http://b")):
        router.stick(episode, url)
    for prefix in ("g0", "g1", "g2"):
        for episode, url in (("e0", "http://a"), ("e1", "http://b")):
            server = await router.pick(episode, 0, prefix=prefix)
            assert server is not None
            assert server.url == url


async def test_a_group_keeps_to_home_versions_breakers_and_evaluations(queue: StubQueue) -> None:
    """What keeps a server from an episode keeps it from a group."""
    register(queue, "a", "b", "c")
    first = {f"g{n}": await first_of(Router(queue), f"g{n}") for n in range(20)}
    prefix = next(prefix for prefix, url in first.items() if url == "http://a")
    assert await first_of(Router(queue, home="http://b"), prefix) == "http://b"
    broken = Router(queue)
    broken.failed(broken.begin("http://a"), "a test", gone=True)
    assert (moved := await first_of(broken, prefix)) in ("http://b", "http://c")
    assert await url_of(Router(queue), "", avoid=("http://a",)) != "http://a"
    for fields in ({"accepting": False}, {"asleep": True, "accepting": False}, {"evaluates": True}):
        queue.registered["a"] = replace(queue.registered["a"], evaluates=False, accepting=True)
        queue.registered["a"] = replace(queue.registered["a"], **fields)
        assert await first_of(Router(queue), prefix) == moved
    evaluated = await Router(queue).pick("", 0, split="eval/1", prefix=prefix)
    assert evaluated is not None
    assert evaluated.url == "http://a"
    register(queue, "a")
    queue.registered["c"] = replace(queue.registered["c"], version=3)
    newer = await Router(queue).pick("", 3, prefix=prefix)
    assert newer is not None
    assert newer.url == "http://c"


@pytest.mark.parametrize("busy", [0, 16_000])
@pytest.mark.parametrize(("clients", "together"), [(1, True), (16, True), (16, False)])
async def test_groups_over_64_servers_are_balanced_and_in_few_places(
    queue: StubQueue, clock: list[float], clients: int, together: bool, busy: int
) -> None:
    """64 groups of 16 begin in 8 s, each at one client or, `together` false, each member at another: clients share
    heartbeats a second old, and nothing else. Eight members have one prefix, as `agent_loops` names them."""
    register(queue, *(f"s{i:02d}" for i in range(64)), in_flight_tokens=busy)
    routers = [Router(queue, seed=i) for i in range(clients)]
    truth, places = Counter({f"http://s{i:02d}": busy for i in range(64)}), set[tuple[int, str]]()
    for group in range(64):
        if group % 8 == 0:
            clock[0] += 1.0
            beat(queue, truth, Counter())
        for member in range(16):
            router, tokens = routers[(group if together else member) % clients], 500 + 97 * (member % 11)
            server = await router.pick(f"{group}#{member}", 0, prefix=f"t{group}/{member // 8}", tokens=tokens)
            assert server is not None
            router.begin(server.url, tokens)
            truth[server.url] += tokens
            places.add((group, server.url))
    bound, most_places = (1.5, 4) if busy else (2.2, 6)
    assert max(truth.values()) / (sum(truth.values()) / 64) < bound
    assert len(places) / 64 < most_places, "two choices find about 14"
