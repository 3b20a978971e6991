from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("mcp")

from penstock.tools import (
    BaseTool,
    ToolConfig,
    ToolConfigError,
    ToolInfraError,
    ToolResult,
    check_arguments,
    close_tools,
    configs_of,
    make_tools,
)
from penstock.transfer_queue import Task

SERVER = Path(__file__).with_name("mcp_server.py")
TASK = Task("train/0", "train", [], "tests", None)
STDIO = {"command": sys.executable, "args": [str(SERVER)]}


def make(timeout_s: float = 60.0, **settings: Any) -> dict[str, BaseTool]:
    return make_tools([ToolConfig(name="mcp", settings=settings, timeout_s=timeout_s, retries=0)], None)


async def call(tools: dict[str, BaseTool], name: str, /, **arguments: Any) -> ToolResult:
    tool = tools[name]
    assert tool.guard is not None
    return await tool.guard.call(tool, None, arguments)


@pytest_asyncio.fixture
async def stdio() -> AsyncIterator[dict[str, BaseTool]]:
    tools = make(**STDIO)
    yield tools
    await close_tools(tools.values())


def has_ended(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


async def test_mcp_stdio_servers_tools_as_the_loop_sees_them(stdio: dict[str, BaseTool]) -> None:
    assert list(stdio) == ["note", "read_notes", "add", "fail", "variable", "process", "die", "wait", "answer"]
    assert stdio["add"].description == "Add two whole numbers."
    assert set(configs_of(stdio)) == set(stdio)
    assert check_arguments(stdio["add"].parameters, {"a": 1}) == "argument 'b' is missing"
    assert (await call(stdio, "add", a=2, b=3)).text == "5"
    failed = await call(stdio, "fail")
    assert failed.is_error
    assert "on purpose" in failed.text


TEXT = {"type": "text", "text": "21 C"}
LINK = {"type": "resource_link", "uri": "file:///a.csv", "name": "a.csv", "description": "all values"}
BLOB = {"type": "resource", "resource": {"uri": "db://rows/7", "blob": "AAAA"}}
IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}


RESULTS: list[tuple[dict[str, Any], str]] = [
    ({"content": [], "structuredContent": {"städte": ["Köln"]}}, '{"städte": ["Köln"]}'),
    ({"content": [], "structuredContent": {"error": "no such city"}, "isError": True}, '{"error": "no such city"}'),
    ({"content": [IMAGE, {**TEXT, "text": " "}], "structuredContent": {"x": 1}}, '[image left out]\n \n{"x": 1}'),
    ({"content": [TEXT], "structuredContent": {"celsius": 21}}, "21 C"),
    ({"content": [LINK, BLOB]}, "a.csv (all values): file:///a.csv\n[resource db://rows/7 left out]"),
    ({"content": []}, "(no output)"),
]


async def test_mcp_result_without_text_shows_its_json_and_addresses(stdio: dict[str, BaseTool]) -> None:
    for result, text in RESULTS:
        answer = await call(stdio, "answer", result=result)
        assert (answer.text, answer.is_error) == (text, result.get("isError", False))


async def test_mcp_one_process_serves_all_calls_and_ends_with_worker(stdio: dict[str, BaseTool]) -> None:
    answers = await asyncio.gather(*(call(stdio, "process") for _ in range(5)))
    (process_id,) = {answer.text for answer in answers}
    await close_tools(stdio.values())
    async with asyncio.timeout(60):
        while not has_ended(int(process_id)):
            await asyncio.sleep(0.05)


async def test_mcp_reconnects_after_a_server_died(stdio: dict[str, BaseTool]) -> None:
    before = (await call(stdio, "process")).text
    with pytest.raises(ToolInfraError, match="mcp"):
        await call(stdio, "die")
    assert (await call(stdio, "process")).text != before


async def test_mcp_slow_call_ends_and_keeps_the_connection() -> None:
    tools = make(timeout_s=10, **STDIO)
    await tools["wait"].create(TASK)  # starting the server is no part of a call
    before = (await call(tools, "process")).text
    assert (await call(tools, "wait")).text == "Error: wait did not finish within 10 s"
    assert (await call(tools, "process")).text == before
    await close_tools(tools.values())


async def test_mcp_environment_is_passed_on_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k1")
    monkeypatch.setenv("PENSTOCK_TOKEN", "run token")
    tools = make(**STDIO, pass_env=["MY_KEY"], env={"PLAIN": "p"}, select=["variable"], prefix="tiny_")
    assert list(tools) == ["tiny_variable"]
    answers = [(await call(tools, "tiny_variable", name=name)).text for name in ("MY_KEY", "PLAIN", "PENSTOCK_TOKEN")]
    assert answers == ["k1", "p", "(unset)"]
    await close_tools(tools.values())


async def test_mcp_streamable_http_server_with_a_token(
    serve: Callable[[Any], Awaitable[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TOKEN", "s3cret")
    url = f"{await serve(_with_token(_load_server().streamable_http_app(), 's3cret'))}/mcp"
    with pytest.raises(ToolConfigError, match="MCP: http"):
        await asyncio.to_thread(make, url=url)
    tools = await asyncio.to_thread(make, url=url, token_env="MCP_TOKEN")
    assert (await call(tools, "add", a=2, b=3)).text == "5"
    assert (await call(tools, "process")).text == str(os.getpid())
    assert "on purpose" in (await call(tools, "fail")).text
    await close_tools(tools.values())


def _load_server() -> Any:
    spec = importlib.util.spec_from_file_location("mcp_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()


def _with_token(app: Any, token: str) -> Any:
    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "http" and given != f"Bearer {token}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await app(scope, receive, send)

    return guarded


async def test_mcp_file_of_servers(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"tiny": STDIO}}))
    tools = make(servers_file=str(file), select=["add"])
    assert (await call(tools, "add", a=1, b=1)).text == "2"
    await close_tools(tools.values())
    file.write_text(json.dumps({"mcpServers": {"tiny": {"comand": "x"}}}))
    with pytest.raises(ToolConfigError, match=r"mcp\.json: server 'tiny': "):
        make(servers_file=str(file))


async def test_mcp_tools_that_cannot_be_checked_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    odd = {"command": sys.executable, "args": [str(SERVER), "odd"]}
    tools = make(**odd)
    assert list(tools) == ["pair"]
    assert (await call(tools, "pair", at=[1, 2])).text == "[1, 2]"
    await close_tools(tools.values())
    first, second = (record.getMessage() for record in caplog.records)
    assert "is left out: tool word: parameters are no JSON schema: '^\\\\p{L}+$' is not a 'regex'" in first
    assert "is left out: tool thing: parameters are no JSON schema: 'any' is not valid" in second
    with pytest.raises(ToolConfigError, match="tool word: parameters are no JSON schema"):
        make(**odd, select=["word"])


OBJECT = {"type": "object"}
LOST = {**OBJECT, "properties": {"x": {"$ref": "#/$defs/Lost"}}}


def raw(**answer: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVER.with_name("raw_mcp_server.py")), json.dumps(answer)]}


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"outputSchema": LOST}, "tool odd: outputSchema is no JSON schema: the reference '#/$defs/Lost' leads"),
        ({"execution": {"taskSupport": "required"}}, "tool odd: it runs only as a task of MCP"),
        ({"inputSchema": {**OBJECT, "properties": {"x": {"$dynamicRef": "#lost"}}}}, "'#lost' leads nowhere"),
    ],
)
def test_mcp_tools_whose_every_call_would_fail_are_left_out(
    caplog: pytest.LogCaptureFixture, odd: dict[str, Any], message: str
) -> None:
    listed = [{"name": "odd", "inputSchema": OBJECT, **odd}, {"name": "even", "inputSchema": OBJECT}]
    assert list(make(**raw(result={"tools": listed}))) == ["even"]
    assert message in caplog.text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": {"code": -32601, "message": "Method not found"}}, "raw_mcp_server.*: Method not found"),
        ({"result": {"tools": [{"name": "t"}]}}, "raw_mcp_server.*: tools.0.inputSchema Field required"),
        ({"result": {"tools": []}}, "no tool of .*raw_mcp_server.* can be called; there are: none"),
    ],
)
def test_mcp_server_without_a_list_of_tools_is_named(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolConfigError, match=message):
        make(**raw(**answer))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either command .* or url"),
        ({**STDIO, "url": "http://x"}, "either command .* or url"),
        ({"command": "/no/such/program"}, "MCP: /no/such/program"),
        ({"command": "/bin/false"}, "MCP: /bin/false"),
        ({"url": "http://127.0.0.1:9/mcp"}, "MCP: http://127.0.0.1:9/mcp"),
        ({**STDIO, "select": ["subtract"]}, "no tool subtract; there are: note, read_notes, add, fail"),
        ({**STDIO, "pass_env": ["NOT_SET"]}, "NOT_SET is not set"),
        ({"servers_file": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_mcp_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolConfigError, match=message):
        make(**settings)
