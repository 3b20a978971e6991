"""The `python` tool: an interpreter that remembers, in the episode's box."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.sandbox import RunResult, Sandbox, SandboxError, SandboxLost
from penstock.tools.base import ToolInfraError, ToolResult
from penstock.tools.episode_box import BoxTool, EpisodeBox, limit_text

STATE_LOST = "The interpreter was restarted: variables and imports are gone."


class PythonTool(BoxTool):
    """Runs code; the model reads what it printed, the value of a last expression, or how it failed.

    It works in the episode's box, with `shell` and `editor` where the episode has them. Alone in it, the earlier code
    brings a lost box back.
    """

    name = "python"
    description = "Run Python code. Variables persist between calls."
    replayable = True
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    }

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        """Takes no settings. Raises `ValueError` without a sandbox."""
        super().__init__(sandbox)

    async def execute(self, state: EpisodeBox, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments["code"]
        try:
            result = await self._run(state, code)
        except SandboxLost as error:
            if state.taken_over and not state.shared:
                raise  # the owner of the journal replays all calls in a fresh state
            raise ToolInfraError("sandbox", str(error)) from error
        except SandboxError as error:
            raise ToolInfraError("sandbox", str(error)) from error
        state.python_calls = [] if result.state_lost else [*state.python_calls, code]
        return self._to_tool_result(result)

    async def _run(self, box: EpisodeBox, code: str) -> RunResult:
        try:
            return await (await box.session()).run_python(code)
        except SandboxLost:
            if box.taken_over or box.shared:
                raise
        session = await box.renew()
        for earlier in box.python_calls:
            await session.run_python(earlier)
        return await session.run_python(code)

    def _to_tool_result(self, result: RunResult) -> ToolResult:
        failed = result.exit_code != 0
        parts = [result.stdout.rstrip()]
        if failed:
            parts.append("\n".join(result.stderr.rstrip().splitlines()[-6:]))
        if result.exit_code is None:
            parts.append(limit_text("code", result.limit))
        elif result.limit == "output":
            parts.append("[output cut]")
        if result.state_lost:
            parts.append(
                "The sandbox was restarted: variables, imports and files are gone." if result.files_lost else STATE_LOST
            )
        elif failed and not result.stderr.strip():
            parts.append(f"Error: exit code {result.exit_code}")
        text = "\n".join(part for part in parts if part) or "(no output)"
        return ToolResult(text, metrics={"python_s": result.duration_s}, is_error=failed)
