"""ReTool's reward: only what the last turn answers counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.recipes.conftest import script

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'penstock[math]'")

from penstock.agent_loops.rewards import Answer

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(72)"}}\n</tool_call>'
pytestmark = pytest.mark.recipes


@pytest.fixture(params=[True, False], ids=["boxed", "bare"])
async def reward(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    made = script("retool/reward.py").LastTurn(boxed=request.param, processes=1)
    made.boxed = request.param
    yield made
    await made.close()


async def score(reward: Any, turn: str, truth: str = "72", before: str = "") -> float:
    value = await reward.score(Answer("openai/gsm8k", before + turn, truth, {"final_text": turn}))
    return float(value["score"])


async def test_the_last_box_of_the_last_turn(reward: Any) -> None:
    assert await score(reward, r"so it is \boxed{72}") == 1.0
    assert await score(reward, r"\boxed{7}, no: \boxed{72}") == 1.0
    assert await score(reward, r"\boxed{\frac{144}{2}}") == 1.0
    assert await score(reward, r"\boxed{71}") == 0.0
    assert await score(reward, "It is 72.") == (0.0 if reward.boxed else 1.0)


async def test_tools_and_calls_answer_nothing(reward: Any) -> None:
    earlier = f"{CALL}\n<tool_response>\n72 \\boxed{{72}}\n</tool_response>\n"
    assert await score(reward, CALL, before=earlier) == 0.0
    assert await score(reward, CALL.replace("72", r"\\boxed{72}"), before=earlier) == 0.0
    assert await score(reward, "I do not know.", before=earlier) == 0.0
    assert await score(reward, "", before=earlier) == 0.0


async def test_wrong_may_have_another_number() -> None:
    reward = script("retool/reward.py").LastTurn(wrong=-1.0, processes=1)
    assert [await score(reward, turn) for turn in (r"\boxed{1}", "nothing", r"\boxed{72}")] == [-1.0, -1.0, 1.0]
    await reward.close()


def test_settings_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="boxd"):
        script("retool/reward.py").LastTurn(boxd=True)
