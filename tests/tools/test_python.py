from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock.sandbox import Sandbox, SandboxConfig, SandboxError, make_sandbox
from penstock.tools import PythonTool, ToolConfig, ToolInfraError, make_tools
from penstock.tools.python import STATE_LOST
from penstock.transfer_queue import Task

pytestmark = pytest.mark.bwrap
TASK = Task("train/00000001", "train", [], "tests", None)


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxConfig(max_boxes=2, run_timeout_s=60.0), "tests-tools")
    yield made
    await made.close()


@pytest.fixture
def tool(sandbox: Sandbox) -> PythonTool:
    made = make_tools([ToolConfig(name="python")], sandbox)["python"]
    assert isinstance(made, PythonTool)
    return made


async def run(tool: PythonTool, state: object, code: str) -> tuple[str, bool]:
    result = await tool.execute(state, {"code": code})  # type: ignore[arg-type]
    return result.text, result.is_error


async def test_python_tool_keeps_its_box_until_release(tool: PythonTool) -> None:
    state = await tool.create(TASK)
    session_id = state.session_id
    assert session_id is not None
    assert await run(tool, state, "x = 6") == ("(no output)", False)
    assert await run(tool, state, "print(x * 7)") == ("42", False)
    assert (state.session_id, state.python_calls) == (session_id, ["x = 6", "print(x * 7)"])
    await tool.release(state)
    await tool.release(state)
    assert state.session_id is None


async def test_python_tool_what_the_model_reads_when_its_code_fails(tool: PythonTool, sandbox: Sandbox) -> None:
    state = await tool.create(TASK)
    text, is_error = await run(tool, state, "print('so far')\nundefined")
    assert is_error
    assert text.splitlines()[0] == "so far"
    assert text.splitlines()[-1] == "NameError: name 'undefined' is not defined"
    assert await run(tool, state, "exit(3)") == ("Error: exit code 3", True)
    await tool.release(state)
    sandbox.config = sandbox.config.model_copy(update={"run_timeout_s": 5.0})  # type: ignore[attr-defined]
    state = await tool.create(TASK)
    text, is_error = await run(tool, state, "y = 1\nwhile True: pass")
    assert (text, is_error) == ("Error: the code ran longer than it may and was stopped.\n" + STATE_LOST, True)
    assert state.python_calls == []
    await tool.release(state)


async def test_python_tool_another_worker_attaches_by_session_id(tool: PythonTool) -> None:
    state = await tool.create(TASK)
    await run(tool, state, "x = 5")
    attached = await tool.attach(TASK, state.session_id or "")
    assert await run(tool, attached, "x") == ("5", False)
    await tool.release(attached)


async def test_python_tool_replays_code_after_a_lost_box(tool: PythonTool) -> None:
    state = await tool.create(TASK)
    await run(tool, state, "x = 5; print('only once')")
    await (await state.session()).close()
    assert await run(tool, state, "x + 1") == ("6", False)
    await tool.release(state)


async def test_python_tool_failures_of_the_sandbox_are_infra(sandbox: Sandbox) -> None:
    tool = PythonTool(sandbox)
    state = await tool.create(TASK)
    state.take()  # another tool works in the box: the code alone does not bring it back
    await run(tool, state, "1")
    await (await state.session()).close()
    with pytest.raises(ToolInfraError, match="closed") as raised:
        await run(tool, state, "1")
    assert raised.value.component == "sandbox"

    async def fail(_: str, **__: object) -> None:
        raise SandboxError("no room")

    other = PythonTool(sandbox)
    state = await other.create(TASK)
    await (await state.session()).close()
    sandbox.start = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(ToolInfraError, match="sandbox: no room"):
        await run(other, state, "1")
    with pytest.raises(SandboxError, match="no room"):
        await other.create(TASK)
