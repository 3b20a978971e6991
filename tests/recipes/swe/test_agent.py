"""The loop of recipes/swe/agent.py: what it does with answers that call nothing, and when it ends."""

from __future__ import annotations

import pytest
from tests.recipes.swe.conftest import RECIPE

from penstock.testing import try_loop
from penstock.tools import ToolConfig
from penstock.transfer_queue import Task

pytestmark = pytest.mark.recipes
MODEL = str(RECIPE.parent / "calculator" / "model")
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'
TOOLS = """
from penstock.tools import BaseTool, ToolResult

class Shell(BaseTool):
    name, description = "shell", "Runs a command."
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

    async def execute(self, state, arguments):
        return ToolResult(f"ran {arguments['command']}")

class Submit(BaseTool):
    name, description = "submit", "Hands in."
    parameters = {"type": "object", "properties": {}}

    async def execute(self, state, arguments):
        return ToolResult("submitted", final=True)

def nothing(data_source, solution_str, ground_truth, extra_info):
    return 0.0
"""


@pytest.fixture
def play(tmp_path):
    (tmp_path / "swe_fake_tools.py").write_text(TOOLS)

    async def go(*says: str, max_turns: int = 8, **settings):
        task = Task("eval/0/0", "eval/0", [{"role": "user", "content": "Mend it."}], "swe", "")
        tools = [ToolConfig(name=f"swe_fake_tools:{name}") for name in ("Shell", "Submit")]
        budget = {"max_turns": max_turns, "max_response_tokens": 20000, "max_new_tokens": 2000, "settings": settings}
        reward = "swe_fake_tools:nothing"
        loop = f"{RECIPE / 'agent.py'}:MiniSweAgent"
        return await try_loop(
            loop, task, model=MODEL, says=list(says), tools=tools, recipe_dir=tmp_path, **budget, reward=reward
        )

    return go


def prompt_and_answers(trajectory) -> str:
    from penstock.agent_loops.chat import load_tokenizer

    tokenizer = load_tokenizer(MODEL)
    (segment,) = trajectory.segments
    return tokenizer.decode([*segment.prompt_ids.tolist(), *segment.response_ids.tolist()])


async def test_it_looks_around_before_the_model_speaks(play):
    trajectory = await play(SUBMIT)
    assert "Mend it.\n\n$ git ls-files | head -n 60\nran git ls-files | head -n 60" in prompt_and_answers(trajectory)
    assert trajectory.extra["tool_results"] == ["ran git ls-files | head -n 60", "submitted"]
    assert trajectory.num_turns == 1


async def test_it_need_not_look(play):
    trajectory = await play(CALL, SUBMIT, look="")
    assert trajectory.extra["tool_results"] == ["ran ls", "submitted"]
    assert trajectory.num_turns == 2


async def test_an_answer_without_a_call_is_answered_a_few_times(play):
    trajectory = await play("Hm.", CALL, "Well.", "That is all.", "never said", reminders=2)
    assert trajectory.num_turns == 4
    assert prompt_and_answers(trajectory).count("Call one of your tools") == 2
    assert "never said" not in prompt_and_answers(trajectory)


async def test_it_ends_with_its_turns(play):
    trajectory = await play(CALL, max_turns=3)
    assert (trajectory.num_turns, trajectory.outcome.reason) == (3, "turns")


async def test_nothing_comes_after_submit(play):
    trajectory = await play(CALL, SUBMIT, "never said")
    assert trajectory.num_turns == 2
    assert trajectory.extra["tool_results"][-1] == "submitted"
