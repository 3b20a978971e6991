"""A rank that is gone, stopped or stuck is named and ends all ranks; one that is slow is named, and waited for."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trainer_support import ENVIRONMENT, HERE
from watched_ranks import FAULTS, ODD, WORLD

from penstock.trainer.ranks.jury import Jury, Verdict, Watched, likelier
from penstock.trainer.ranks.observer import NOTES_BYTES, Notes, Observer, usage_of, write_notes
from penstock.trainer.ranks.watch import RankWatch, hub_binding

pytestmark = pytest.mark.torch
TIMEOUT_S = 10.0
WITHIN_S = 60.0
"""Of the fault, all ranks have ended."""
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(HERE / "watched_ranks.py"), str(folder), str(TIMEOUT_S), *FAULTS]
    with subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True) as process:
        try:
            assert process.wait(300) == 0
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    return folder


def ended(folder: Path) -> dict[int, tuple[int, float]]:
    """By rank: exit status, seconds after the fault."""
    return {int(rank): tuple(how) for rank, how in json.loads((folder / "ended.json").read_text()).items()}


def named(folder: Path) -> str:
    """As messages name the odd rank."""
    return f"rank {ODD} (host {socket.gethostname()}, pid {json.loads((folder / 'fault.json').read_text())['pid']})"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("stopped", "has been stopped (SIGSTOP or a debugger)"),
        ("stuck", "it is stuck: for "),
        ("loop", "its event loop stands still"),
        ("killed", "has ended without a report"),
        ("failed", "it ended with ValueError: an error of one rank"),
    ],
)
def test_a_rank_that_is_lost_is_named_and_ends_all(runs: Path, case: str, why: str) -> None:
    folder = runs / case
    log, statuses = (folder / "log").read_text(), ended(folder)
    (verdict,) = [line for line in log.splitlines() if "all ranks are ended" in line]
    assert named(folder) in verdict
    assert why in verdict
    assert len(statuses) == WORLD
    assert all(status for status, _ in statuses.values()), "none ended as if all were well"
    assert max(after_s for _, after_s in statuses.values()) < WITHIN_S


def test_what_a_stuck_rank_did_is_told(runs: Path) -> None:
    for case in ("stuck", "loop"):
        log = (runs / case / "log").read_text()
        assert "hang_in_torch_thread" in log
        assert "have waited" not in log, "it is not taken for a slow one"
        assert all(status == KILLED for status, _ in ended(runs / case).values())
    assert "step (" in (runs / "stuck" / "log").read_text()
    assert "after step" in (runs / "stopped" / "log").read_text() + (runs / "loop" / "log").read_text()


def test_a_slow_rank_is_named_and_not_ended(runs: Path) -> None:
    folder = runs / "slow"
    log = (folder / "log").read_text()
    assert {status for status, _ in ended(folder).values()} == {0}, log
    (warning,) = [line for line in log.splitlines() if "have waited" in line]
    assert f"{named(folder)} is at work" in warning
    assert "trainer.collective_timeout_s" in warning


def test_no_monitor_is_left(runs: Path) -> None:
    """They end with their ranks, some seconds later."""
    deadline = time.monotonic() + 60
    while left := _monitors_of(runs):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _monitors_of(runs: Path) -> list[str]:
    """Processes whose stderr is a log of these runs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            target = os.readlink(process / "fd/2")
        except OSError:
            continue
        found += [process.name] if target.startswith(str(runs)) else []
    return found


# one process, looked at ---------------------------------------------------------------------------------------------
def looked_at(command: list[str], seconds: int, **notes: Any) -> list[str]:
    """The state of each look at that process, which says that its torch thread has had work since the beginning."""
    memory = mmap.mmap(-1, NOTES_BYTES)
    began, states = time.monotonic(), []
    with subprocess.Popen(command, start_new_session=True) as process:
        observer = Observer(process.pid, memory, set(), 7.0)
        try:
            while time.monotonic() < began + seconds:
                now = time.monotonic()
                given = {"busy_since": began, "waits": False, "doing": "compile", "loop_at": now, **notes}
                write_notes(memory, Notes(**{"written_at": now, **given}))
                states.append(observer.look()["state"])
                time.sleep(1.0)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    return states


def test_a_rank_that_does_nothing_is_stuck_unless_it_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.ranks.observer.WINDOW_S", 1.0)
    assert "it is stuck" in looked_at(["sleep", "100"], 12)[-1]
    assert not any(looked_at(["sleep", "100"], 12, waits=True))


def test_a_rank_is_not_stuck_whose_compiler_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.ranks.observer.WINDOW_S", 1.0)
    states = looked_at(["sh", "-c", "sh -c 'while :; do :; done' & wait"], 12)
    assert not any(states), states


def test_what_a_child_used_stays_in_the_sum_when_it_ends(tmp_path: Path) -> None:
    child = f"while [ ! -e {tmp_path}/end ]; do :; done"
    command = ["sh", "-c", f"sh -c '{child}'; echo ended; exec sleep 100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            while (before := usage_of(process.pid, without=set())).cpu_s < 0.1:
                time.sleep(0.05)
            (tmp_path / "end").touch()
            assert process.stdout is not None
            process.stdout.readline()
            after = usage_of(process.pid, without=set())
        finally:
            process.kill()
    assert after.cpu_s >= before.cpu_s
    assert not replace(before, cpu_s=0.05).is_idle_since(before, 5.0), "a thread that ended"


@pytest.mark.deep
def test_a_call_that_keeps_pythons_lock_is_not_stuck_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the main thread, whose use counts for nothing where the concern is the torch thread's work."""
    monkeypatch.setattr("penstock.trainer.ranks.observer.WINDOW_S", 1.0)
    long_ago = {"written_at": time.monotonic() - 1000}
    assert not any(looked_at(["sh", "-c", "while :; do :; done"], 12, **long_ago))
    assert "keeps Python's lock" in looked_at(["sleep", "100"], 12, **long_ago)[-1]


def test_a_text_too_long_for_the_notes_is_cut() -> None:
    memory = mmap.mmap(-1, NOTES_BYTES)
    write_notes(memory, Notes(1.0, 2.0, 3.0, True, "x" * 2 * NOTES_BYTES))
    observer = Observer(os.getpid(), memory, set(), 30.0)
    assert observer.look()["doing"].count("x") > NOTES_BYTES / 2


# the jury, by hand --------------------------------------------------------------------------------------------------
def jury(*reports: tuple[float, int, dict[str, Any]], at: float) -> tuple[Verdict | None, str]:
    """What it decides of two ranks: (time, rank, report)…, then at a time."""
    made = Jury(30.0)
    made.ranks = {rank: Watched(rank, "h", 100 + rank, 0.0) for rank in range(2)}
    verdict, warning = None, ""
    for now in range(int(at) + 1):
        for moment, rank, report in reports:
            if moment == now:
                verdict = verdict or made.report(made.ranks[rank], report, now)
        verdict = verdict or made.judge(now)
        warning = made.slow(now) or warning
    return verdict, warning


def every_second(rank: int, until: int, report: dict[str, Any]) -> list[tuple[float, int, dict[str, Any]]]:
    return [(float(second), rank, report) for second in range(until)]


WORKS = {"state": "", "doing": "update", "waits": False, "works": True}
WAITS = {"state": "", "doing": "update", "waits": True, "works": False}


def test_a_silent_rank_is_named_with_what_it_last_did() -> None:
    verdict, _ = jury(*every_second(0, 40, WORKS), *every_second(1, 5, WORKS), at=40)
    assert verdict is not None
    assert verdict.text.startswith("rank 1 (host h, pid 101): nothing was heard of it for ")
    assert verdict.text.endswith("It last did this: update")
    assert not verdict.grace_s


def test_time_in_which_the_hub_stood_still_is_nobodys_silence() -> None:
    made = Jury(30.0)
    made.ranks = {0: Watched(0, "h", 1, 0.0)}
    assert made.judge(1.0) is None
    assert made.judge(500.0) is None, "the hub was stopped for 499 s"
    assert made.judge(501.0) is None
    made.report(made.ranks[0], WORKS, 999.0)
    assert not any(made.judge(float(now)) for now in range(1000, 1031))
    verdict = made.judge(1031.0)
    assert verdict is not None, "a report at the end of a pause does not count for the time after it"
    assert "nothing was heard of it for 31 s" in verdict.text


def test_a_rank_that_left_is_not_missed() -> None:
    verdict, _ = jury(*every_second(0, 60, WORKS), (3.0, 1, {"left": ""}), at=60)
    assert verdict is None


def test_others_get_time_for_an_error_of_their_own() -> None:
    verdict, _ = jury((1.0, 1, {"left": "BadBatch: no reward"}), at=2)
    assert verdict is not None
    assert "BadBatch: no reward" in verdict.text
    assert verdict.grace_s > 0
    assert verdict.may_be_echo, "a rank that is gone without a word may be its cause, and is reported a moment later"


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:53895"
OWN = "ValueError: an error of one rank"


@pytest.mark.parametrize(("heard", "named"), [((GLOO, OWN), OWN), ((OWN, GLOO), OWN), ((GLOO, GLOO), GLOO)])
def test_an_error_of_its_own_is_named_before_one_of_a_lost_peer(heard: tuple[str, str], named: str) -> None:
    made = Jury(30.0)
    first, then = (made.report(Watched(rank, "h", rank, 0.0), {"left": text}, 1.0) for rank, text in enumerate(heard))
    assert first is not None
    assert then is not None
    found = likelier(first, then)
    assert named in found.text
    assert found is (then if named != heard[0] else first)


def test_only_a_rank_that_others_wait_for_is_slow() -> None:
    working, waiting = every_second(1, 40, WORKS), every_second(0, 40, WAITS)
    assert "rank 1 (host h, pid 101) is at work update" in jury(*working, *waiting, at=31)[1]
    assert not jury(*working, *every_second(0, 40, WORKS), at=31)[1]
    assert not jury(*working, *waiting, at=20)[1]


@pytest.mark.parametrize(
    ("announced", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("node-0", "0.0.0.0"), ("203.0.113.7", "0.0.0.0"), ("fd00::7", "::")],
)
def test_the_hub_is_reached_under_a_name_that_means_loopback_here(announced: str, bound: str) -> None:
    assert hub_binding(announced) == bound


async def test_one_rank_alone_has_no_watch(ranks: Any) -> None:
    assert await RankWatch.start(ranks, None, 30.0) is None  # type: ignore[arg-type]
