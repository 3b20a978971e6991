"""Mathematical answers through the real library in real processes, and what ends those."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")

from penstock.agent_loops import InfraFailure
from penstock.agent_loops.rewards import Answer, Maths


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grader that is short of processor time is waited for: loading the library takes seconds of it."""
    monkeypatch.setattr("penstock.agent_loops.rewards.maths.WALL_DEADLINE_S", 500.0)


@pytest.fixture
async def maths():
    reward = Maths(processes=1)
    yield reward
    await reward.close()


async def test_graders_get_no_secrets(maths: Maths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "run-token")
    await maths.score(answer("$1$", "1"))
    (pid,) = pids(maths)
    assert b"run-token" not in Path(f"/proc/{pid}/environ").read_bytes()


def answer(solution: str, truth: str) -> Answer:
    return Answer("lighteval/MATH", solution, truth)


def pids(reward: Maths) -> list[int]:
    return [process.pid for process in reward._graders._idle]


async def test_equal_and_unequal_answers(maths: Maths) -> None:
    cases = [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1/2}", r"\frac12", 1.0),
        (r"$x \in [2, 3)$", r"[2,3)", 1.0),
        (r"\boxed{(3, \sqrt{2})}", r"(3,\sqrt2)", 1.0),
        (r"the answer is 12,345", "12345", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2,1\}", 1.0),
        (r"\boxed{0.51}", "0.5", 0.0),
        (r"\boxed{-7}", "7", 0.0),
        (r"\boxed{7} no, \boxed{8}", "7", 0.0),
        ("I do not know", "7", 0.0),
    ]
    for solution, truth, expected in cases:
        found = await maths.score(answer(solution, truth))
        assert found["score"] == expected, (solution, truth, found)
    assert len(pids(maths)) == 1, "one process answered all"
    assert (await maths.score(answer("I do not know", "7")))["unreadable"] == 1.0


async def test_maths_too_costly_answer_is_wrong() -> None:
    maths = Maths(processes=1, cpu_s=1)
    found = await maths.score(answer(r"\boxed{9^{9^{9^{9}}} + 1}", "7"))
    assert (found["score"], found["too_costly"]) == (0.0, 1.0)
    assert (await maths.score(answer(r"\boxed{7}", "7")))["score"] == 1.0
    await maths.close()


async def test_cpu_time_ends_a_grader_and_is_the_answers_fault(maths: Maths) -> None:
    await maths.score(answer("7", "7"))
    (pid,) = pids(maths)
    scoring = asyncio.ensure_future(maths.score(answer("7", "7")))
    os.kill(pid, signal.SIGXCPU)
    assert await scoring == {"score": 0.0, "unreadable": 0.0, "too_costly": 1.0}
    assert (await maths.score(answer(r"\boxed{7}", "7")))["score"] == 1.0


async def test_maths_dead_or_late_grader_is_no_zero(maths: Maths, monkeypatch: pytest.MonkeyPatch) -> None:
    await maths.score(answer("7", "7"))
    os.kill(pids(maths)[0], signal.SIGKILL)
    with pytest.raises(InfraFailure, match="a grader ended with -9"):
        await maths.score(answer("7", "7"))
    assert (await maths.score(answer("7", "7")))["score"] == 1.0
    stopped = pids(maths)[0]
    os.kill(stopped, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.agent_loops.rewards.maths.WALL_DEADLINE_S", 0.2)
        with pytest.raises(TimeoutError):
            await maths.score(answer("7", "7"))
    assert (await maths.score(answer("7", "7")))["score"] == 1.0
    assert pids(maths) != [stopped]


async def test_maths_replaces_dead_idle_grader(maths: Maths) -> None:
    await maths.score(answer("7", "7"))
    (idle,) = maths._graders._idle
    idle.kill()
    await idle.wait()
    assert (await maths.score(answer(r"\boxed{7}", "7")))["score"] == 1.0


async def test_a_reference_without_an_answer_is_a_failure(maths: Maths) -> None:
    with pytest.raises(InfraFailure, match="no answer in the ground truth ''"):
        await maths.score(answer("7", ""))


async def test_answers_at_once_share_the_processes_and_close_ends_them() -> None:
    reward = Maths(processes=2)
    found = await asyncio.gather(*(reward.score(answer(rf"\boxed{{{n}}}", "3")) for n in range(6)))
    assert [value["score"] for value in found] == [0, 0, 0, 1, 0, 0]
    left = pids(reward)
    assert len(left) == 2
    await reward.close()
    for pid in left:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
