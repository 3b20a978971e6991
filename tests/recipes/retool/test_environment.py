"""ReTool's environment without a model: who computes with the tool earns everything, who does not earns nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.recipes.conftest import RECIPES, played, script

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")

from penstock.agent_loops import segments_of
from penstock.agent_loops.chat import chat_of
from penstock.deploy import load_config, tools_of
from penstock.testing import EnvCheck

pytestmark = [pytest.mark.deep, pytest.mark.recipes, pytest.mark.bwrap]
FOLDER = os.environ.get("PENSTOCK_GSM8K", "")
ROWS = 24
BUSY = ("tools=[{name: python, timeout_s: 120}]", "agent.rewards.settings.processes=1")
"""For a busy machine."""
WORKSHEET = "tools=[{name: worksheet.py:Worksheet, timeout_s: 120}]"
ROOM = ("agent.max_new_tokens=4000", "agent.max_response_tokens=12000", *BUSY)
"""The tiny model's tokenizer spells most words letter by letter."""
OWN = [
    ("Ann has {a} boxes with {b} pears each and eats {c}. How many are left?", "{a}*{b}", "{a}*{b}-{c}"),
    ("A train has {a} cars with {b} seats; {c} seats are taken. How many are free?", "{a}*{b}", "{a}*{b}-{c}"),
    ("Tom buys {a} pens at {b} cents and a book for {c} cents. What does he pay?", "{a}*{b}", "{a}*{b}+{c}"),
]
"""Question, first step, result: GSM8K's shape, where GSM8K itself is not there."""


def own_problems() -> list[dict[str, str]]:
    rows = []
    for number in range(ROWS):
        question, step, result = (text.format(a=number + 3, b=2 * number + 5, c=7) for text in OWN[number % len(OWN)])
        first, last = eval(step), eval(result)
        answer = f"First <<{step}={first}>>{first:,}. Then <<{result}={last}>>{last:,}.\n#### {last:,}"
        rows.append({"question": question, "answer": answer})
    return rows


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("arithmetic")
    script("retool/data.py").main(["arithmetic", "--out", str(out), "--train", str(ROWS), "--eval", "8"])
    return f"data.train={out / 'train.parquet'}"


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real one where PENSTOCK_GSM8K names its folder."""
    folder, out = Path(FOLDER or tmp_path_factory.mktemp("gsm8k")), tmp_path_factory.mktemp("rows")
    if not FOLDER:
        for split in ("train", "test"):
            lines = "".join(json.dumps(row) + "\n" for row in own_problems())
            (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    script("retool/data.py").main(["gsm8k", "--input", str(folder), "--out", str(out)])
    return f"data.train={out / 'test.parquet'}"


async def test_the_oracle_earns_everything_on_arithmetic(arithmetic: str) -> None:
    found = await played("retool/cpu.yaml", "oracle", arithmetic, *BUSY)
    assert (found.rewards, found.failures) == ([1.0] * ROWS, [])
    assert [one.metrics["tool_calls"] for one in found.trajectories] == [1.0] * ROWS
    assert [one.metrics["tool_errors"] for one in found.trajectories] == [0.0] * ROWS


async def test_the_oracle_earns_everything_on_word_problems(gsm8k: str) -> None:
    found = await played("retool/cpu.yaml", "oracle", gsm8k, *ROOM, "agent.rewards.settings.boxed=true", rows=ROWS)
    assert (found.rewards, found.failures) == ([1.0] * ROWS, [])


@pytest.mark.skipif(bool(FOLDER), reason="GSM8K's solutions have more than two calculations, and some lack the last")
async def test_a_call_for_each_calculation_earns_everything(gsm8k: str) -> None:
    found = await played("retool/cpu.yaml", "stepwise", gsm8k, *ROOM, "agent.rewards.settings.boxed=true", rows=ROWS)
    assert (found.rewards, found.failures) == ([1.0] * ROWS, [])
    assert {one.metrics["tool_calls"] for one in found.trajectories} == {2.0}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("steps")
    small = ("--train", str(ROWS), "--eval", "8", "--conversations", "8")
    script("retool/data.py").main(["steps", "--out", str(out), *small])
    return out


async def played_sums(policy: str, sums: Path, rows: int = ROWS) -> EnvCheck:
    data = (f"model={RECIPES / 'calculator/model'}", f"data.train={sums / 'train.parquet'}", WORKSHEET)
    return await played("retool/learn.yaml", policy, *data, "agent.rewards.settings.processes=1", rows=rows)


@pytest.mark.parametrize(("policy", "reward"), [("patient", 1.0), ("hasty", 0.0)])
async def test_a_call_for_each_part_earns_everything_and_one_nothing(sums: Path, policy: str, reward: float) -> None:
    found = await played_sums(policy, sums)
    assert (found.rewards, found.failures) == ([reward] * ROWS, [])
    parts = [len(row["extra_info"]["parts"].split()) for row in rows_in(sums / "train.parquet")]
    assert set(parts) == {3, 4}
    assert [one.metrics["tool_calls"] for one in found.trajectories] == (parts if reward else [1.0] * ROWS)


async def test_the_cold_start_shows_what_an_episode_holds(sums: Path) -> None:
    """A sum that is solved to its end, as messages and as it was played: the same ids with the same mask."""
    config = load_config(RECIPES / "retool/learn.yaml", [f"model={RECIPES / 'calculator/model'}"])
    (trajectory,) = (await played_sums("patient", sums, rows=1)).trajectories
    row = rows_in(sums / "train.parquet")[0]["extra_info"]
    data, never_stops = script("retool/data.py"), SimpleNamespace(random=lambda: 1.0)
    made = data.PartedSum(tuple(row["parts"].split()), tuple(map(int, row["results"].split())))
    messages = data.worked(made, never_stops)
    chat = chat_of(config.model, config.agent)
    (shown,), (segment,) = segments_of(chat, messages, await tools_of(config)), trajectory.segments
    for name in ("prompt_ids", "response_ids", "response_mask", "turn_starts"):
        np.testing.assert_array_equal(getattr(shown, name), getattr(segment, name), err_msg=name)


def rows_in(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


@pytest.mark.parametrize("boxed", ["true", "false"])
@pytest.mark.parametrize("policy", ["null", "parrot"])
async def test_who_does_not_answer_earns_nothing(policy: str, boxed: str, arithmetic: str) -> None:
    """The parrot has the right result printed in every turn, in its calls too: neither is an answer."""
    found = await played("retool/cpu.yaml", policy, *ROOM, arithmetic, f"agent.rewards.settings.boxed={boxed}", rows=8)
    assert (found.rewards, found.failures) == ([0.0] * 8, [])
    calls = {one.metrics["tool_calls"] for one in found.trajectories}
    assert calls == ({0.0} if policy == "null" else {2.0})
