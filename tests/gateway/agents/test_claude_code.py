"""Claude Code, unmodified and headless, as a client: a scripted engine decides what is sampled, the agent does it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.conftest import sampled, whole
from tests.gateway.recording_server import MODEL, Server, recording_server, talking_model
from tests.gateway.talking_engine import TalkingEngine

from penstock.rollout_server import EngineInfo, GenerateRequest

__all__ = ["talking_model"]
pytestmark = [pytest.mark.agents, pytest.mark.deep]
INSTALLED = Path(__file__).parents[3] / ".agents/claude/node_modules/.bin/claude"
CLAUDE = os.environ.get("PENSTOCK_CLAUDE") or (str(INSTALLED) if INSTALLED.exists() else shutil.which("claude"))
needs_claude = pytest.mark.skipif(CLAUDE is None, reason="Claude Code is missing: scripts/setup-agents installs it")
DEADLINE_S = 240.0
CONTEXT = 400_000
"""Claude Code's own prompt has some 100,000 tokens of the small vocabulary of these tests."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedEngine(TalkingEngine):
    """Says the next of `script`, whatever the context is."""

    script: tuple[str, ...] = ()

    async def start(self) -> EngineInfo:
        return (await super().start()).model_copy(update={"max_model_len": CONTEXT})

    def ids_of(self, request: GenerateRequest) -> list[int]:
        text = self.script[len(self.asked)]
        pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
        return [*(token for piece in pieces for token in self.chat.encode(piece)), self.chat.turn_end_id]


@pytest.fixture
async def server(tmp_path: Path, talking_model: str) -> AsyncIterator[Server]:
    async with recording_server(tmp_path, talking_model, ScriptedEngine, max_response_tokens=CONTEXT) as running:
        yield running


async def run_claude(episode: dict[str, Any], folder: Path, prompt: str, *more: str) -> dict[str, Any]:
    """Its JSON result. No variable of this process but PATH reaches it."""
    home, work = folder / "home", folder / "work"
    home.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "IS_SANDBOX": "1",
        "ANTHROPIC_BASE_URL": episode["anthropic_base_url"],
        "ANTHROPIC_API_KEY": episode["api_key"],
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "1",
        "DISABLE_AUTO_COMPACT": "1",
    }
    assert CLAUDE is not None
    process = await asyncio.create_subprocess_exec(
        CLAUDE, "-p", prompt, "--model", MODEL, "--output-format", "json", "--dangerously-skip-permissions", *more,
        cwd=work, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out, err)
    result: dict[str, Any] = json.loads(out)
    return result


@needs_claude
@pytest.mark.parametrize("more", [("--bare",), ()], ids=["bare", "whole"])
async def test_an_episode_of_claude_code_is_recorded_token_for_token(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "sum.py").write_text("print(1 - 2)\n")
    (work / "names.txt").write_text("ada\n")
    script = (
        f"<think>\nI look first.\n</think>\n\n{call('Bash', command='cat names.txt', timeout=5000.0)}",
        "Both.\n" + call("Read", file_path=str(work / "sum.py")) + "\n" + call("Bash", command="echo two"),
        call("Edit", file_path=str(work / "sum.py"), old_string="1 - 2", new_string="1 + 2"),
        call("Bash", command="python3 sum.py > out.txt"),
        "<think>\nIt is 3.\n</think>\n\nFixed.",
    )
    monkeypatch.setattr(ScriptedEngine, "script", script)
    episode = await server.open()
    result = await run_claude(episode, tmp_path, "Fix sum.py.", *more)
    assert (result["is_error"], result["result"]) == (False, "Fixed.")
    assert (work / "out.txt").read_text() == "3\n"
    trajectory = await server.finish(episode)
    (segment,) = trajectory.segments
    assert (segment.num_turns, trajectory.metrics["tool_calls"]) == (len(script), 5)
    said, asked = server.engine.said, server.engine.asked
    assert sampled(segment) == [token for ids in said for token in ids]
    assert whole(segment) == [*asked[-1].token_ids, *said[-1]]
    assert "x-anthropic-billing-header" not in server.engine.chat.decode(whole(segment))


@needs_claude
async def test_a_key_of_another_episode_ends_claude_code(server: Server, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    one, two = await server.open(), await server.open()
    with pytest.raises(AssertionError, match=r"401|API key"):
        await run_claude({**one, "api_key": two["api_key"]}, tmp_path, "Hello", "--bare")
    assert server.engines == [] or not server.engine.asked
