"""reasoning-gym's own scorers: text in a process, evaluated answers in a box."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.agent_loops.environments.conftest import HUBS, hub

from penstock.agent_loops import InfraFailure
from penstock.agent_loops.rewards import Answer, choice_for
from penstock.agent_loops.rewards.reasoning_gym import ReasoningGym
from penstock.datasets import materialise
from penstock.sandbox import Sandbox, SandboxConfig, make_sandbox
from penstock.testing import FakeSandbox
from penstock.trainer import load_rows

PATH = HUBS / "reasoning_gym"
PACKAGE = """
class ProceduralDataset:
    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])
"""
TASKS = """
from reasoning_gym.dataset import ProceduralDataset
class Plain(ProceduralDataset):
    def __getitem__(self, number):
        return {"question": f"{number}?", "answer": str(number)}
class Evaluating(Plain):
    def score_answer(self, answer, entry):
        return float(eval(answer) == int(entry["answer"]))
def create_dataset(task, **config):
    return {"plain": Plain, "evaluating": Evaluating}[task]()
"""


@pytest.fixture
def small_package(tmp_path: Path) -> str:
    """The part of the package's shape that scorers need."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text(TASKS)
    (tmp_path / "reasoning_gym/dataset.py").write_text(PACKAGE)
    return str(tmp_path)


def answer_of(task: str, said: str, number: int = 3, question: str = "3?", **row: Any) -> Answer:
    extra = {"task": task, "config": "{}", "number": number, **row}
    return Answer(f"reasoning_gym/{task}", said, "3", extra, [{"role": "user", "content": question}])


async def test_text_is_compared_in_a_process(small_package: str) -> None:
    reward = ReasoningGym(None, path=small_package, processes=1)
    try:
        said = [
            "<answer>2</answer> no, <answer> 3 </answer>",
            "3",
            "<think><answer>3</answer></think>4",
            "<answer>4</answer>",
        ]
        scores = [(await reward.score(answer_of("plain", one)))["score"] for one in said]
        assert scores == [1.0, 1.0, 0.0, 0.0]
        with pytest.raises(InfraFailure, match="another version"):
            await reward.score(answer_of("plain", "3", question="4?"))
        with pytest.raises(InfraFailure, match="nothing_like_it"):
            await reward.score(answer_of("nothing_like_it", "3"))
        with pytest.raises(InfraFailure, match="no task, config and number"):
            await reward.score(Answer("reasoning_gym/plain", "3", "3", {}))
    finally:
        await reward.close()


async def test_a_scorer_of_its_own_never_runs_outside_a_box(small_package: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"<answer>open({str(marker)!r}, 'w').write('x') or 3</answer>"
    for sandbox in (None, FakeSandbox()):
        reward = ReasoningGym(sandbox, path=small_package, processes=1)
        try:
            named = "needs a sandbox" if sandbox is None else "box ended before"
            with pytest.raises(InfraFailure, match=named):
                await reward.score(answer_of("evaluating", code))
        finally:
            await reward.close()
        assert not marker.exists()


async def test_answers_may_have_to_be_tagged(small_package: str) -> None:
    reward = ReasoningGym(None, path=small_package, processes=1, needs_tag=True)
    assert await reward.score(answer_of("plain", "3")) == {"score": 0.0, "raised": 0}
    await reward.close()


def test_rows_of_the_source_are_scored_by_it() -> None:
    assert choice_for("reasoning_gym/chain_sum", {}).name == "reasoning_gym"


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    config = SandboxConfig(max_boxes=2, memory_mb=512, cpu_s=60, run_timeout_s=100.0, folders={"/hubs": str(PATH)})
    made = make_sandbox(config, f"tests-{os.getpid()}")
    yield made
    await made.close()


@pytest.mark.hubs
@pytest.mark.bwrap
@pytest.mark.deep
@hub("reasoning_gym", "reasoning_gym")
async def test_the_packages_own_answers_earn_everything(sandbox: Sandbox, tmp_path: Path) -> None:
    """Of tasks that compare text, that have a scorer, and that evaluate the answer."""
    spec = f"reasoning_gym:gcd,chain_sum,spiral_matrix,countdown?size=1&seed=4&path={PATH}"
    rows = load_rows(materialise(spec, tmp_path))
    reward = ReasoningGym(sandbox, path=str(PATH), box_path="/hubs", processes=1)
    marker = tmp_path / "ran"
    attack = f"[__import__('os').system('touch {marker}')]"
    try:
        for row in rows:
            right = Answer(
                row.data_source, f"<answer>{row.ground_truth}</answer>", row.ground_truth, row.extra_info, row.messages
            )
            assert (await reward.score(right))["score"] == 1.0, row.data_source
        spiral = next(row for row in rows if row.extra_info["task"] == "spiral_matrix")
        hostile = Answer(spiral.data_source, f"<answer>{attack}</answer>", "", spiral.extra_info, spiral.messages)
        assert (await reward.score(hostile))["score"] < 1.0
        endless = replace(hostile, solution="<answer>[0 for _ in iter(int, 1)]</answer>")
        short = ReasoningGym(sandbox, path=str(PATH), box_path="/hubs", processes=1, timeout_s=15.0)
        try:
            assert (await short.score(endless))["score"] == 0.0
        finally:
            await short.close()
    finally:
        await reward.close()
    assert not marker.exists()
