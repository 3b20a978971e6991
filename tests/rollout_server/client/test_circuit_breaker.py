"""The states of a circuit breaker, by a clock of the test's own."""

from __future__ import annotations

import pytest

from penstock.rollout_server.client.routing import MAX_REST_S, OPEN_AFTER, REST_S, CircuitBreaker


def lose(breaker: CircuitBreaker, now: float, *, gone: bool = True) -> None:
    request = object()
    breaker.begin(request)
    breaker.failed(now, request, "a test", gone=gone)
    breaker.end(request)


def test_answers_that_broke_off_open_it_only_in_a_row() -> None:
    breaker = CircuitBreaker()
    for _ in range(OPEN_AFTER - 1):
        lose(breaker, 0.0, gone=False)
    breaker.succeeded()
    for _ in range(OPEN_AFTER - 1):
        lose(breaker, 0.0, gone=False)
        assert breaker.allows(0.0)
    lose(breaker, 0.0, gone=False)
    assert not breaker.allows(0.0)


def test_a_server_that_is_gone_rests_ever_longer_and_a_whole_answer_forgets_it() -> None:
    breaker, now, rests = CircuitBreaker(), 100.0, []
    for _ in range(6):
        lose(breaker, now)
        started = now
        while not breaker.allows(now):
            now += 0.01
        rests.append(now - started)
    assert rests == pytest.approx([REST_S, 0.5, 1.0, 2.0, MAX_REST_S, MAX_REST_S], abs=0.02)
    breaker.succeeded()
    lose(breaker, now)
    assert breaker.allows(now + REST_S)


def test_a_trial_that_fails_opens_it_again_for_longer() -> None:
    breaker = CircuitBreaker()
    lose(breaker, 0.0)
    lose(breaker, 1.0, gone=False)
    assert not breaker.allows(1.0 + REST_S)
    assert breaker.allows(1.0 + 2 * REST_S)


def test_a_trial_that_is_given_up_lets_the_next_one_try() -> None:
    breaker = CircuitBreaker()
    lose(breaker, 0.0)
    trial = object()
    breaker.begin(trial)
    breaker.end(trial)
    assert breaker.allows(1.0)


def test_requests_that_were_under_way_when_it_opened_change_nothing() -> None:
    breaker, older = CircuitBreaker(), object()
    breaker.begin(older)
    lose(breaker, 0.0)
    breaker.first_tokens(older)
    assert not breaker.allows(0.1)
    breaker.failed(0.2, older, "late", gone=True)
    assert breaker.allows(REST_S)
    assert breaker.cause == "a test"
