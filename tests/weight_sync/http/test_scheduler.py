"""Who fetches from whom: about one copy leaves the trainer, and nobody who died holds others up."""

from __future__ import annotations

import pytest
from tests.virtual_clock import VirtualClock

from penstock.weight_sync.http.scheduler import FAN_OUT, TRAINER, TURN_S, TransferScheduler

FILE = "weights-00000001.safetensors"


def ask(turns: TransferScheduler, server: str, *avoid: str) -> str | None:
    return turns.ask(FILE, 1000, server, set(avoid))


def test_one_copy_leaves_the_trainer_however_many_ask() -> None:
    turns = TransferScheduler()
    waiting, fetching, copies = {f"s{n}" for n in range(64)}, dict[str, str](), 0
    rounds = 0
    while waiting or fetching:
        for server in sorted(waiting):
            if (source := ask(turns, server)) is not None:
                fetching[server] = source
        waiting -= fetching.keys()
        copies += list(fetching.values()).count(TRAINER)
        assert all(list(fetching.values()).count(source) <= FAN_OUT for source in fetching.values())
        for server in fetching:
            turns.has(FILE, server)
        fetching = {}
        rounds += 1
    assert (copies, rounds) == (1, 5), "1, 1 + 2, 3 + 6, 9 + 18, 27 + 36"


def test_a_broken_upload_and_a_silent_server_give_up_their_turn() -> None:
    clock = VirtualClock()
    turns = TransferScheduler(clock)
    assert ask(turns, "s0") == TRAINER
    assert ask(turns, "s1") is None
    turns.gave_up(FILE, "s0")
    assert ask(turns, "s1") == TRAINER
    assert ask(turns, "s2") is None
    clock.now += TURN_S + 1  # s1 was killed
    assert ask(turns, "s2") == TRAINER


@pytest.mark.parametrize(("size", "more_s"), [(0, 0.0), (10**9, 50.0)])
def test_a_turn_ends_with_the_time_that_its_file_takes(size: int, more_s: float) -> None:
    """At 20 MB/s, beside `TURN_S`."""
    clock = VirtualClock()
    turns = TransferScheduler(clock)
    assert turns.ask(FILE, size, "killed") == TRAINER
    clock.now = TURN_S + more_s - 1
    assert turns.ask(FILE, size, "s1") is None
    clock.now = TURN_S + more_s
    assert turns.ask(FILE, size, "s1") == TRAINER


def test_who_asks_again_has_lost_nothing() -> None:
    turns = TransferScheduler()
    assert ask(turns, "s0") == TRAINER
    assert ask(turns, "s0") == TRAINER, "its connection was cut: the turn is still its own"


def test_a_peer_that_failed_somebody_is_no_holder_any_more() -> None:
    turns = TransferScheduler()
    turns.has(FILE, "dead")
    turns.has(FILE, "s1")
    assert ask(turns, "s2", "dead") == "s1"
    assert ask(turns, "s3") == "s1"
    assert ask(turns, "s4", "s1") == TRAINER
    assert turns.ask("another", 1, "s5") == TRAINER


def test_scheduler_remembers_the_newest_64_files() -> None:
    turns = TransferScheduler()
    for number in range(64):
        turns.has(f"f{number}", "holder")
    assert turns.ask("f0", 1, "asking") == "holder"
    turns.has("f64", "holder")
    assert turns.ask("f1", 1, "asking") == "holder"
    assert turns.ask("f0", 1, "asking") == TRAINER
