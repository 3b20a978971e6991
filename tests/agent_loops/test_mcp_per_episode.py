"""MCP servers that keep state: a connection, and of a stdio server a process, for each episode."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("mcp")

from penstock.agent_loops import EpisodeJournal, EpisodeRestart, InfraFailure, ToolBox
from penstock.tools import BaseTool, ToolConfig, ToolUnavailable, close_tools, configs_of, make_tools
from penstock.tools.parsers import ToolCall

SERVER = Path(__file__).parents[1] / "tools" / "mcp_server.py"
SETTINGS = {"command": sys.executable, "args": [str(SERVER)], "select": ["note", "read_notes", "process", "die"]}
READ, PROCESS = ToolCall("read_notes", {}), ToolCall("process", {})
Episode = Callable[..., ToolBox]


def note(text: str) -> ToolCall:
    return ToolCall("note", {"text": text})


async def texts(box: ToolBox, *calls: ToolCall) -> list[str]:
    return [result.text for result in await box.call_all(calls)]


def lives(process_id: str) -> bool:
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def ended(*process_ids: str) -> None:
    async with asyncio.timeout(60):
        while any(map(lives, process_ids)):
            await asyncio.sleep(0.05)


def make(**settings: Any) -> dict[str, BaseTool]:
    return make_tools([ToolConfig(name="mcp", settings=SETTINGS | settings, timeout_s=60.0, retries=0)], None)


@pytest_asyncio.fixture
async def tools() -> AsyncIterator[dict[str, BaseTool]]:
    made = make(per_episode=True)
    yield made
    await close_tools(made.values())


@pytest.fixture
def episode(queue_of: Callable[..., Any], tasks_of: Callable[..., Any]) -> Episode:
    def open_one(tools: dict[str, BaseTool], queue: Any = None) -> ToolBox:
        (task,) = tasks_of()
        queue = queue or queue_of([task])
        return ToolBox(tools, configs_of(tools), task, EpisodeJournal(queue, queue.lease(task)))

    return open_one


async def test_mcp_episodes_see_nothing_of_each_other(tools: dict[str, BaseTool], episode: Episode) -> None:
    one, other = episode(tools), episode(tools)
    await asyncio.gather(texts(one, note("mine"), note("too")), texts(other, note("other")))
    assert await texts(one, READ) == ["mine too"]
    assert await texts(other, READ) == ["other"]
    (first,), (second,) = await texts(one, PROCESS), await texts(other, PROCESS)
    assert first != second
    await one.release()
    await ended(first)
    assert await texts(other, READ) == ["other"]
    await other.release()
    await ended(second)
    later = episode(tools)
    assert await texts(later, READ) == ["(no output)"]
    await later.release()


async def test_mcp_one_connection_serves_all_tools_of_an_episode_in_the_models_order(
    tools: dict[str, BaseTool], episode: Episode
) -> None:
    box = episode(tools)
    written = [call for number in range(4) for call in (note(str(number)), READ)]
    assert await texts(box, *written) == ["kept", "0", "kept", "0 1", "kept", "0 1 2", "kept", "0 1 2 3"]
    assert len({*await texts(box, PROCESS, PROCESS)}) == 1
    await box.release()


async def test_mcp_state_that_ended_with_its_server_ends_the_episode(
    tools: dict[str, BaseTool], episode: Episode
) -> None:
    box = episode(tools)
    await texts(box, note("lost"))
    with pytest.raises(InfraFailure, match="mcp"):
        await texts(box, ToolCall("die", {}))
    with pytest.raises(InfraFailure, match="its state ended with the connection"):
        await texts(box, READ)
    await box.release()


async def test_mcp_server_that_does_not_start_for_an_episode_is_a_failure_of_the_infrastructure(
    tools: dict[str, BaseTool], episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool's time limit would tell the model that its call took too long."""
    executed = []

    async def no_connection(_self: Any) -> None:
        raise ToolUnavailable("mcp", "no connection within 30 s")

    async def execute(*given: Any) -> None:
        executed.append(given)

    monkeypatch.setattr("penstock.tools.mcp.connection.McpConnection.client", no_connection)
    monkeypatch.setattr(type(tools["note"]), "execute", execute)
    box = episode(tools)
    with pytest.raises(InfraFailure, match="no connection within"):
        await texts(box, note("never"))
    assert not executed
    await box.release()


async def test_mcp_episode_of_a_dead_worker_starts_afresh(
    tools: dict[str, BaseTool], episode: Episode, queue_of: Callable[..., Any], tasks_of: Callable[..., Any]
) -> None:
    queue = queue_of(tasks_of())
    first = episode(tools, queue)
    await texts(first, note("lost"))
    again = episode(tools, queue)
    assert await texts(again, note("lost")) == ["kept"]  # from the journal
    with pytest.raises(EpisodeRestart):
        await texts(again, READ)
    await again.release()
    await first.release()
