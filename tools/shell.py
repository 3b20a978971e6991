"""The `shell` tool: bash in the episode's box, one process per call, which restores the state of the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.sandbox import RunResult, SandboxError
from penstock.tools.base import ToolInfraError, ToolResult
from penstock.tools.episode_box import BoxTool, EpisodeBox, limit_text

# Variables and functions of a call are there in the next: `set -a` exports what is assigned, the trap writes it down.
# The file lies in the box, so that the shell also continues where another worker takes over.
_WRAPPER = """\
exec 2>&1
__state="$PWD/.penstock_shell"
if [ -r "$__state" ]; then . "$__state" 2>/dev/null; else eval "$2"; fi
trap '__code=$?; { export -p; declare -f; printf "cd -- %q\\n" "$PWD"; } > "$__state" 2>/dev/null; exit $__code' EXIT
set -a
eval "$1"
"""


class ShellTool(BoxTool):
    """Runs shell commands. stdout and stderr are merged in their order; no process outlives its command."""

    name = "shell"
    description = "Run a bash command. Files, the working directory and variables persist between calls."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }

    async def execute(self, state: EpisodeBox, arguments: Mapping[str, Any]) -> ToolResult:
        command = arguments["command"]
        if "\0" in command:
            return ToolResult("Error: the command holds a NUL character", is_error=True)
        try:
            session = await state.session()
            result = await session.run(
                ["bash", "-c", _WRAPPER, "bash", command, state.begin], timeout_s=self.run_timeout_s
            )
        except SandboxError as error:
            raise ToolInfraError("sandbox", str(error)) from error
        return _to_tool_result(result)


def _to_tool_result(result: RunResult) -> ToolResult:
    parts = [(result.stdout + result.stderr).rstrip()]
    if result.exit_code is None:
        parts.append(limit_text("command", result.limit))
    elif result.exit_code != 0:
        parts.append(f"[exit status {result.exit_code}]")
    if result.limit == "output" and result.exit_code is not None:
        parts.append("[output cut]")
    if result.files_lost:
        parts.append("The sandbox was restarted: files and variables are gone.")
    text = "\n".join(part for part in parts if part) or "(no output)"
    return ToolResult(text, metrics={"shell_s": result.duration_s}, is_error=result.exit_code != 0)
