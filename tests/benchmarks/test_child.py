"""The processes of a benchmark: their last words, their end, their memory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.support.child import ROOT, Child, ChildError
from benchmarks.support.measure import can_reset, family, median_of, peaks_mb, quantile, reset_peaks

ECHO = """
import subprocess, sys
from benchmarks.support.child import answer_questions, own_stdout
replies = own_stdout()
grandchild = subprocess.Popen(["sleep", "600"])
held = []
def answer(question):
    print("a line for people")
    if "grow" in question:
        held.append(b"x" * question["grow"])
    if "free" in question:
        held.clear()
    if "fail" in question:
        raise ValueError(question["fail"])
    return {"echo": question, "grandchild": grandchild.pid}
answer_questions(replies, answer)
"""


@pytest.fixture
async def child(tmp_path: Path):
    program = tmp_path / "echo_child.py"
    program.write_text(ECHO)
    child = await Child.start(sys.executable, str(program), env={"PYTHONPATH": f"{ROOT}:{ROOT}/src"})
    yield child
    await child.stop(timeout_s=10)


async def test_answers_are_json_whatever_the_child_prints(child: Child) -> None:
    assert (await child.ask({"one": 1}))["echo"] == {"one": 1}
    assert (await child.ask({"two": [2]}))["echo"] == {"two": [2]}


async def test_its_last_words_are_in_the_error(child: Child) -> None:
    with pytest.raises(ChildError, match=r"ended over .*\n(.|\n)*ValueError: no room left"):
        await child.ask({"fail": "no room left"})


async def test_stopping_ends_what_it_started(child: Child) -> None:
    grandchild = (await child.ask({}))["grandchild"]
    assert family(child.pid) == [child.pid, grandchild]
    await child.stop(timeout_s=10)
    async with asyncio.timeout(60):
        while peaks_mb([grandchild]):  # a zombie has no resident memory
            await asyncio.sleep(0.01)


async def test_peaks_are_of_the_process_that_grew(child: Child) -> None:
    await child.ask({})
    async with asyncio.timeout(60):
        while set(small := peaks_mb(family(child.pid))) != {"echo_child", "sleep"}:  # not yet what it is to become
            await asyncio.sleep(0.01)
    await child.ask({"grow": 200_000_000})
    await child.ask({"free": True})
    grown = peaks_mb(family(child.pid))
    assert grown["echo_child"] > small["echo_child"] + 190
    assert grown["sleep"] < small["sleep"] + 10  # it may not have loaded its libraries at the first look


@pytest.mark.skipif(not can_reset(), reason="the kernel does not let peaks be reset")
async def test_a_peak_starts_anew(child: Child) -> None:
    await child.ask({"grow": 200_000_000})
    await child.ask({"free": True})
    before = peaks_mb([child.pid])["echo_child"]
    reset_peaks([child.pid])
    assert peaks_mb([child.pid])["echo_child"] < before - 190


def test_quantiles_are_samples_and_medians_are_of_rounds() -> None:
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile(list(range(1, 101)), 0.99) == 99
    assert quantile([7.0], 0.99) == 7.0
    assert median_of([[1, 9], [2, 5], [3, 7]], 0.99) == 7
