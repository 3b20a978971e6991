from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from penstock.agent_loops import AgentConfig, WorkerJob
from penstock.agent_loops.concurrency import HOLD_S, Concurrency, WatchedClient
from penstock.rollout_server import RolloutClient
from penstock.transfer_queue import RunContext, ServerInfo

MOST, REQUESTS = 64, 10


def server(in_flight: int = 0, *, accepting: bool = True) -> ServerInfo:
    return ServerInfo("s", "http://s", 1, in_flight, accepting)


def test_concurrency_decreases_once_per_hold():
    limit = Concurrency(MOST, REQUESTS)
    assert limit.saw([server()], 0, 64, 0.0) == 64
    assert limit.saw([server()], 3, 64, 1.0) == 48
    assert limit.saw([server()], 9, 64, 2.0) == 48
    assert limit.saw([server()], 12, 64, 1.0 + HOLD_S) == 36


def test_concurrency_after_restarts_begins_with_few_episodes():
    assert [Concurrency(MOST, REQUESTS, restarts).limit for restarts in range(5)] == [64, 16, 4, 1, 1]


def test_concurrency_grows_by_equal_steps_at_limit():
    limit = Concurrency(MOST, REQUESTS)
    limit.saw([server()], 1, 40, 0.0)
    assert limit.limit == 30  # of what ran
    assert [limit.saw([server()], 1, 30, t) for t in (1.0, 2.0)] == [32, 32]
    assert limit.saw([server()], 1, 32, 3.0) == 34


def test_requests_press_only_where_no_server_is_free():
    assert Concurrency(MOST, REQUESTS).saw([server(11), server(3)], 0, 64, 0.0) == 64
    assert Concurrency(MOST, REQUESTS).saw([server(10)], 0, 64, 0.0) == 64
    assert Concurrency(MOST, REQUESTS).saw([server(11), server(0, accepting=False)], 0, 64, 0.0) == 48
    assert Concurrency(MOST, REQUESTS).saw([], 0, 64, 0.0) == 64
    assert Concurrency(64, 0).saw([server(999)], 0, 64, 0.0) == 64


looks = st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 80))


@given(st.lists(looks, max_size=60), st.integers(1, 70))
def test_it_stays_in_its_bounds(seen, most):
    limit, refused = Concurrency(most, 10), 0
    for at, (in_flight, new, running) in enumerate(seen):
        refused += new
        assert 1 <= limit.saw([server(in_flight)], refused, running, float(at)) <= most


def test_it_recovers_fully_once_the_pressure_is_gone():
    limit = Concurrency(MOST, REQUESTS)
    for at in range(0, 100, 5):
        limit.saw([server()], at + 1, limit.limit, float(at))
    assert limit.limit == 1
    for at in range(200, 240):
        limit.saw([server()], 96, limit.limit, float(at))
    assert limit.limit == 64


def test_server_requests_default_to_twice_the_server_slots():
    job = WorkerJob("w", RunContext(None, ""), AgentConfig(), None, server_slots=64)
    assert job.server_requests == 128
    assert dataclasses.replace(job, config=AgentConfig(server_requests=0)).server_requests == 0


def test_the_rollout_client_is_one_that_can_be_watched():
    assert isinstance(RolloutClient(None, "token"), WatchedClient)
