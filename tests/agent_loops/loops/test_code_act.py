from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from tests.agent_loops.loops.conftest import check_fed

from penstock.agent_loops.loops.code_act import CodeActLoop, code_blocks
from penstock.tools import BaseTool, ToolResult
from penstock.transfer_queue import Outcome, OutcomeKind

BLOCK = "Let me see.\n```python\nx = 46\n```\nand\n```py\nprint(x)\n```"


class Interpreter(BaseTool):
    name, description = "python", "runs code"
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    async def create(self, task):
        return SimpleNamespace()

    async def execute(self, state, arguments):
        self.ran.append(arguments["code"])
        return ToolResult(f"ran {len(self.ran)}", reward=0.5)


async def test_blocks_are_run_in_order_and_observed_once(run_loop, saying, chat_for):
    tool = Interpreter()
    client = saying(lambda text: "It is 46." if "ran 2" in text else BLOCK)
    outcome, trajectory = await run_loop(CodeActLoop, client, tool)
    assert tool.ran == ["x = 46", "print(x)"]
    (segment,) = trajectory.segments
    text = chat_for().decode(segment.response_ids)
    assert "Output of block 1:\nran 1\nOutput of block 2:\nran 2" in text
    assert (outcome.kind, trajectory.num_turns) == (OutcomeKind.COMPLETED, 2)
    assert trajectory.turn_rewards == (1.0, 0.0)
    check_fed(client, trajectory)


async def test_a_block_that_nobody_would_read_is_not_run(run_loop, saying):
    tool = Interpreter()
    outcome, _ = await run_loop(CodeActLoop, saying(lambda text: BLOCK), tool, max_turns=2)
    assert outcome == Outcome(OutcomeKind.TRUNCATED, "turns")
    assert len(tool.ran) == 2


async def test_without_its_tool_it_says_what_is_missing(run_loop, saying):
    outcome, _ = await run_loop(CodeActLoop, saying(str))
    assert (outcome.kind, outcome.component) == (OutcomeKind.INFRA_ERROR, "loop")
    assert "'python'" in outcome.reason


async def test_a_wrong_setting_is_named(run_loop, saying):
    outcome, _ = await run_loop(CodeActLoop, saying(str), Interpreter(), settings={"tol": "x"})
    assert "agent.settings.tol" in outcome.reason


def test_what_is_a_block_and_what_is_not():
    assert code_blocks("```bash\nls\n```\n```python\n```\n```python\nopen", {"python"}) == []
    assert code_blocks("```Python\na\n```x\n```\nb", {"python"}) == ["a\n```x"]


@given(st.lists(st.sampled_from(["```", "```python", "```py ", "x", "", "`` `"]), max_size=40))
def test_every_block_stands_in_the_text(lines):
    text = "\n".join(lines)
    for block in code_blocks(text, {"python", "py"}):
        assert f"\n{block}\n```" in text
