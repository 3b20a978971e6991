"""The interpreter of sums in parts: what it tells beside what was printed, in real boxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.recipes.conftest import RECIPES

from penstock.agent_loops import load_object
from penstock.sandbox import SandboxConfig, make_sandbox
from penstock.tools import BaseTool, ToolConfig, ToolInfraError, make_tools
from penstock.transfer_queue import Task

pytestmark = [pytest.mark.recipes, pytest.mark.bwrap]
SUM = {"parts": "48+17 *3 -20", "results": "65 195 175"}
TASK = Task("train/00000001", "train", [], "retool/steps", "175", extra_info=SUM)


@pytest_asyncio.fixture
async def tool() -> AsyncIterator[BaseTool]:
    sandbox = make_sandbox(SandboxConfig(max_boxes=2, run_timeout_s=60.0), "tests-worksheet")
    config = ToolConfig(name=f"{RECIPES / 'retool/worksheet.py'}:Worksheet")
    (made,) = make_tools([config], sandbox, lambda name: load_object(name, Path.cwd())).values()
    yield made
    await sandbox.close()


async def told(tool: BaseTool, state: Any, *codes: str) -> list[str]:
    return [(await tool.execute(state, {"code": code})).text for code in codes]


async def test_each_result_is_told_with_the_part_that_follows(tool: BaseTool) -> None:
    state = await tool.create(TASK)
    assert await told(tool, state, "print(48+17)") == ["65\nthen *3"]
    assert await told(tool, state, "x = 65*3", "x", "print(x-20)") == ["(no output)", "195\nthen -20", "175"]
    await tool.release(state)


async def test_one_call_is_told_one_part_at_most(tool: BaseTool) -> None:
    """Whatever it prints before its last line; errors and other results are told nothing."""
    state = await tool.create(TASK)
    every = "for guess in range(300): print(guess)\nprint(65)\nprint(195)"
    assert (await told(tool, state, every))[0].endswith("\n65\n195\nthen -20")
    assert await told(tool, state, "print(64)", "print('65 195')") == ["64", "65 195"]
    assert "then" not in (await told(tool, state, "print(65)\nraise SystemExit(3)"))[0]
    await tool.release(state)


async def test_another_worker_is_told_the_same(tool: BaseTool) -> None:
    """It attaches to the box of an episode whose first calls it did not make."""
    first = await tool.create(TASK)
    await told(tool, first, "x = 48+17")
    second = await tool.attach(TASK, str(first.session_id))
    assert await told(tool, second, "print(x)", "print(x*3)") == ["65\nthen *3", "195\nthen -20"]
    await tool.release(second)


@pytest.mark.parametrize("extra_info", [{}, {"parts": "1+1 *2", "results": "2"}, {"parts": "2*1 *1", "results": "2 2"}])
async def test_a_row_that_is_no_sum_is_named(tool: BaseTool, extra_info: dict[str, str]) -> None:
    with pytest.raises(ToolInfraError, match=r"row train/00000001.*`parts`.*`results`"):
        await tool.create(replace(TASK, extra_info=extra_info))
