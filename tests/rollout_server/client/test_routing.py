"""Where requests go: sticky, home, a group's server, the less loaded of two; simulated for 64 servers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout_server.conftest import RunQueue

from penstock.rollout_server.client.routing import BOUNDED_LOAD, CACHE_S, PendingRequest, Router
from penstock.transfer_queue import ServerInfo


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def register(queue: RunQueue, *names: str, **fields: Any) -> None:
    for name in names:
        queue.registered[name] = ServerInfo(name, f"http://{name}", 0, **fields)


async def pick(router: Router, episode: str, min_version: int = 0, avoid: Collection[str] = (), **more: Any) -> str:
    """Name of the server; empty: there is none."""
    server = await router.pick(episode, min_version, avoid, **more)
    return server.server_id if server else ""


async def begin_new(router: Router, count: int = 16, prefix: str = "", tokens: int = 128) -> Counter[str]:
    """Where new episodes go when all begin at once."""
    chosen = Counter[str]()
    for number in range(count):
        name = await pick(router, f"{prefix}#{number}", prefix=prefix, tokens=tokens)
        router.begin(f"http://{name}", tokens)
        chosen[name] += 1
    return chosen


async def test_new_episodes_go_home_while_home_is_able(queue: RunQueue, clock: list[float]) -> None:
    register(queue, "a", in_flight_tokens=9000)
    register(queue, "b")
    router = Router(queue, home="http://a")
    assert await pick(router, "e0") == "a"
    sent = router.begin("http://a")
    router.failed(sent, "a test", gone=True)
    router.end(sent)
    assert [await pick(router, episode) for episode in ("e0", "e1")] == ["b", "b"]
    router.succeeded(sent)
    assert [await pick(router, episode) for episode in ("e0", "e2")] == ["b", "a"]


async def test_of_two_servers_the_one_with_fewer_tokens_in_flight(queue: RunQueue, clock: list[float]) -> None:
    register(queue, "a", in_flight=1, in_flight_tokens=5000)
    register(queue, "b", in_flight=9, in_flight_tokens=3000)
    router, chosen = Router(queue), ""
    for episode in range(6):
        chosen += await pick(router, f"e{episode}")
        router.begin(f"http://{chosen[-1]}", 1000)
    assert chosen == "bbabab"  # equal tokens: fewer requests


async def test_what_was_sent_counts_until_a_heartbeat_has_it(queue: RunQueue, clock: list[float]) -> None:
    register(queue, "a", "b")
    router = Router(queue)
    sent = router.begin("http://a", 1000)
    assert {await pick(router, f"e{i}") for i in range(20)} == {"b"}
    clock[0] += 2.0
    register(queue, "b", in_flight_tokens=1)
    router._servers = await queue.servers()
    assert {await pick(router, f"f{i}") for i in range(20)} == {"a"}
    router.end(sent)
    assert not router._states["http://a"].pending


async def test_full_server_is_left_alone_for_as_long_as_it_asked(queue: RunQueue, clock: list[float]) -> None:
    register(queue, "a")
    router = Router(queue)
    router.full(router.begin("http://a"), 1.0)
    assert await pick(router, "e") == ""
    assert router.describe() == "a v0 has a long queue"
    clock[0] += 1.0
    assert await pick(router, "e") == "a"


async def test_half_open_server_gets_one_request(queue: RunQueue, clock: list[float]) -> None:
    register(queue, "a")
    router = Router(queue)
    router.failed(router.begin("http://a"), "a test", gone=True)
    assert await pick(router, "e0") == ""
    assert router.describe() == "a v0 rests after: a test"
    clock[0] += 0.3
    assert await pick(router, "e1") == "a"
    trial = router.begin("http://a")
    assert await pick(router, "e2") == ""
    router.first_tokens(trial)
    assert await pick(router, "e2") == "a"


async def test_server_to_be_avoided_is_asked_if_there_is_no_other(queue: RunQueue) -> None:
    register(queue, "a")
    router = Router(queue)
    assert await pick(router, "e", avoid=("http://a",)) == "a"
    register(queue, "b")
    router._servers = await queue.servers()
    assert await pick(router, "e", avoid=("http://a",)) == "b"


async def test_servers_that_left_are_forgotten(queue: RunQueue, clock: list[float]) -> None:
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


Step = st.tuples(st.sampled_from(["ask", "fail", "full", "work", "close", "wait", "leave", "join"]), st.integers(0, 7))


@settings(max_examples=60)
@given(steps=st.lists(Step, max_size=40))
async def test_whatever_happens_only_able_servers_are_picked(steps: list[tuple[str, int]]) -> None:
    """Registered, accepting, not resting, not full; and what is open is what was opened and not closed."""
    queue, now = RunQueue(), [0.0]
    register(queue, *(f"s{i}" for i in range(4)))
    router = Router(queue, seed=1)
    under_way: list[PendingRequest] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        for what, number in steps:
            await act(router, queue, now, under_way, what, number)
    assert sorted(id(sent) for state in router._states.values() for sent in state.pending) == sorted(map(id, under_way))


async def act(
    router: Router, queue: RunQueue, now: list[float], under_way: list[PendingRequest], what: str, number: int
) -> None:
    one = under_way[number % len(under_way)] if under_way else None
    match what:
        case "ask":
            server = await router.pick(f"e{number}", 0)
            if server is not None:
                known = router._states[server.url]
                assert server.accepting
                assert known.breaker.allows(now[0])
                assert now[0] >= known.full_until
                under_way.append(router.begin(server.url, 100))
        case "wait":
            now[0] += 0.4 * number
        case "leave":
            queue.registered.pop(f"s{number % 4}", None)
        case "join":
            register(queue, f"s{number % 4}")
        case "fail" if one is not None:
            router.failed(one, "a test", gone=number % 2 == 0)
        case "full" if one is not None:
            router.full(one, 1.0)
        case "work" if one is not None:
            router.succeeded(one)
        case "close" if one is not None:
            router.end(one)
            under_way.remove(one)


# load ----------------------------------------------------------------------------------------------------------------
async def test_short_answers_do_not_all_follow_one_old_heartbeat(queue: RunQueue, clock: list[float]) -> None:
    """Each is answered before the next is sent, and the registry says the same all the time."""
    register(queue, "busy", in_flight=1, in_flight_tokens=100)
    register(queue, "idle")
    router, chosen = Router(queue, seed=0), Counter[str]()
    for number in range(16):
        name = await pick(router, f"e{number}")
        router.end(router.begin(f"http://{name}", 100))
        chosen[name] += 1
        clock[0] += 0.01
    assert abs(chosen["busy"] - chosen["idle"]) <= 2


async def test_what_ended_after_an_old_heartbeat_no_longer_counts(queue: RunQueue, clock: list[float]) -> None:
    """A busy machine's heartbeat is late: it tells of answers that this client has had long since."""
    router = Router(queue, seed=0)
    earlier = [router.begin("http://a", 448) for _ in range(5)]
    clock[0] += 0.5
    for sent in earlier:
        router.end(sent)
    clock[0] += 2.0
    register(queue, "a", in_flight=5, in_flight_tokens=5 * 448, age_s=2.2)
    register(queue, "b", age_s=0.1)
    assert await begin_new(router) == {"a": 8, "b": 8}


async def test_ended_requests_of_no_episode_keep_no_episodes_away(queue: RunQueue, clock: list[float]) -> None:
    """Some were sent right before the heartbeat, some after it; all are answered."""
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
    assert await begin_new(router) == {"a": 8, "b": 8}


async def test_what_others_have_in_flight_counts_however_old_the_heartbeat(queue: RunQueue, clock: list[float]) -> None:
    register(queue, "a", in_flight=5, in_flight_tokens=5000, age_s=4.0)
    register(queue, "b", age_s=4.0)
    router = Router(queue, seed=0)
    router.end(router.begin("http://a", 448))
    assert {await pick(router, f"e{number}") for number in range(8)} == {"b"}


# prefixes: members of a group share their prompt -------------------------------------------------------------------
async def test_group_goes_to_one_server_whichever_client_asks(queue: RunQueue, clock: list[float]) -> None:
    """Beside a load of others, as in a run: 16 episodes at each server."""
    register(queue, *(f"s{i}" for i in range(8)), in_flight=16, in_flight_tokens=16_000)
    routers = [Router(queue, seed=seed) for seed in range(4)]
    for number in range(20):
        assert len({await pick(router, "", prefix=f"t{number}", tokens=1000) for router in routers}) == 1


async def test_large_group_overloads_no_server(queue: RunQueue, clock: list[float]) -> None:
    register(queue, *(f"s{i}" for i in range(4)))
    chosen = await begin_new(Router(queue, seed=1), 64, "train/1", 1000)
    assert max(chosen.values()) <= BOUNDED_LOAD * 64 / 4 + 1
    assert len(await begin_new(Router(queue, seed=1), 4, "train/1", 1000)) < 4


@settings(max_examples=40)
@given(servers=st.integers(2, 12), gone=st.integers(0, 11))
async def test_if_a_server_disappears_only_its_groups_move(servers: int, gone: int) -> None:
    queue = RunQueue()
    register(queue, *(f"s{i}" for i in range(servers)))
    before = {f"t{n}": await pick(Router(queue), "", prefix=f"t{n}") for n in range(60)}
    lost = queue.registered.pop(f"s{gone % servers}")
    after = {prefix: await pick(Router(queue), "", prefix=prefix) for prefix in before}
    assert {prefix for prefix in before if before[prefix] != after[prefix]} == {
        prefix for prefix, name in before.items() if name == lost.server_id
    }
    assert len(set(before.values())) > 1


async def test_groups_spread_over_the_servers_evenly(queue: RunQueue) -> None:
    register(queue, *(f"s{i}" for i in range(8)))
    chosen = Counter([await pick(Router(queue), "", prefix=f"train/{number:08d}") for number in range(800)])
    assert set(chosen) == set(queue.registered)
    assert max(chosen.values()) < 140


async def test_episode_stays_where_it_is_whatever_its_group(queue: RunQueue) -> None:
    register(queue, "a", "b")
    router = Router(queue)
    for name in "ab":
        router.stick(f"episode at {name}", f"http://{name}")
    for prefix in ("g0", "g1", "g2"):
        assert [await pick(router, f"episode at {name}", prefix=prefix) for name in "ab"] == ["a", "b"]


async def test_group_keeps_to_home_versions_breakers_and_evaluations(queue: RunQueue, clock: list[float]) -> None:
    """What keeps a server from an episode keeps it from a group."""
    register(queue, "a", "b", "c")
    first = {f"g{n}": await pick(Router(queue), "", prefix=f"g{n}") for n in range(20)}
    prefix = next(prefix for prefix, name in first.items() if name == "a")
    assert await pick(Router(queue, home="http://b"), "", prefix=prefix) == "b"
    broken = Router(queue)
    broken.failed(broken.begin("http://a"), "a test", gone=True)
    assert (moved := await pick(broken, "", prefix=prefix)) in ("b", "c")
    assert await pick(Router(queue), "", avoid=("http://a",)) != "a"
    for fields in ({"accepting": False}, {"asleep": True, "accepting": False}, {"evaluates": True}):
        register(queue, "a", **fields)
        assert await pick(Router(queue), "", prefix=prefix) == moved
    assert await pick(Router(queue), "", split="eval/1", prefix=prefix) == "a"
    register(queue, "a")
    queue.registered["c"] = replace(queue.registered["c"], version=3)
    assert await pick(Router(queue), "", 3, prefix=prefix) == "c"


# simulated runs ------------------------------------------------------------------------------------------------------
class Simulation:
    """`clients` share heartbeats that are a second old, and nothing else."""

    def __init__(self, queue: RunQueue, clock: list[float], clients: int, seed: int = 0, busy: int = 0) -> None:
        self.names = [f"s{i:02d}" for i in range(64)]
        register(queue, *self.names, in_flight_tokens=busy)
        self.routers = [Router(queue, seed=seed + i) for i in range(clients)]
        self.tokens, self.requests = Counter(dict.fromkeys(self.names, busy)), Counter[str]()
        self._queue, self._clock = queue, clock

    def beat(self) -> None:
        self._clock[0] += 1.0
        for name in self.names:
            register(self._queue, name, in_flight_tokens=self.tokens[name], in_flight=self.requests[name])

    async def start(self, client: int, episode: str, size: int, prefix: str = "") -> str:
        router, tokens = self.routers[client % len(self.routers)], 500 + 97 * (size % 11)
        name = await pick(router, episode, prefix=prefix, tokens=tokens)
        router.begin(f"http://{name}", tokens)
        self.tokens[name] += tokens
        self.requests[name] += 1
        return name

    def imbalance(self) -> float:
        return max(self.tokens.values()) / (sum(self.tokens.values()) / len(self.tokens))


@pytest.mark.parametrize(("clients", "bound"), [(1, 1.35), (16, 1.5)])
async def test_a_thousand_episodes_over_64_servers_are_balanced_and_sticky(
    queue: RunQueue, clock: list[float], clients: int, bound: float
) -> None:
    """They start within 10 s, 100 at a time."""
    for seed in range(3):
        run, placed = Simulation(queue, clock, clients, 100 * seed), []
        for number in range(1000):
            if number % 100 == 0:
                run.beat()
            placed.append(await run.start(number, f"e{number}", number))
        assert min(run.requests[name] for name in run.names) > 0
        assert run.imbalance() < bound
        run.beat()
        assert [await pick(run.routers[n % clients], f"e{n}") for n in range(1000)] == placed


@pytest.mark.parametrize("busy", [0, 16_000])
@pytest.mark.parametrize(("clients", "together"), [(1, True), (16, True), (16, False)])
async def test_groups_over_64_servers_are_balanced_and_in_few_places(
    queue: RunQueue, clock: list[float], clients: int, together: bool, busy: int
) -> None:
    """64 groups of 16 begin in 8 s, each at one client or, `together` false, each member at another. Eight members
    have one prefix, as `agent_loops` names them."""
    run, places = Simulation(queue, clock, clients, busy=busy), set[tuple[int, str]]()
    for group in range(64):
        if group % 8 == 0:
            run.beat()
        for member in range(16):
            client = group if together else member
            name = await run.start(client, f"{group}#{member}", member, f"t{group}/{member // 8}")
            places.add((group, name))
    bound, most_places = (1.5, 4) if busy else (2.2, 6)
    assert run.imbalance() < bound
    assert len(places) / 64 < most_places, "two choices find about 14"
