"""The `python` tool: an interpreter that remembers, in a box of the episode's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.sandbox.protocol import RunResult, Sandbox, SandboxError, SandboxLost, Session
from penstock.tools.base import BaseTool, ToolInfraError, ToolResult
from penstock.tools.episode_box import image_of
from penstock.transfer_queue.trajectory import Task

LIMIT_TEXTS = {
    "wall": "Error: the code ran longer than it may and was stopped.",
    "cpu": "Error: the code used more CPU time than it may and was stopped.",
    "memory": "Error: the code used more memory than it may and was stopped.",
    "output": "Error: the code wrote more output than it may and was stopped.",
}
STATE_LOST = "The interpreter was restarted: variables and imports are gone."
NO_OUTPUT = "(no output)"


class PythonState:
    """One episode's interpreter. The box is opened at the first call."""

    def __init__(self, label: str, session: Session | None = None, image: str | None = None) -> None:
        self.label = label
        self.session = session
        self.image = image
        """None: the sandbox's default."""
        self.taken_over = session is not None
        """Another worker's calls made it what it is: `history` does not know them."""
        self.history: list[str] = []
        """Code of the calls whose names live in the interpreter now, oldest first."""

    @property
    def session_id(self) -> str | None:
        """For the journal: another worker can attach to the session while its box lives."""
        return self.session.session_id if self.session is not None else None


class PythonTool(BaseTool):
    """Runs code; the model reads what it printed, the value of a last expression, or how it failed."""

    name = "python"
    description = "Run Python code. Variables persist between calls."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    }

    def __init__(self, sandbox: Sandbox | None = None, *, traceback_lines: int = 6, replay_lost: bool = True) -> None:
        """Raises `ValueError` without a sandbox.

        Args:
            traceback_lines: so many last lines of stderr the model reads after an error.
            replay_lost: after the loss of a box, run the episode's earlier code again in a fresh one; False: fail.
        """
        super().__init__(sandbox)
        if sandbox is None:
            raise ValueError("tool python needs a sandbox")
        self._sandbox = sandbox
        self._traceback_lines = traceback_lines
        self._replay_lost = replay_lost

    async def create(self, task: Task) -> PythonState:
        return PythonState(task.task_id, image=image_of(task))

    async def attach(self, task: Task, session_id: str) -> PythonState:
        try:
            return PythonState(task.task_id, await self._sandbox.attach(session_id), image_of(task))
        except SandboxLost:
            raise
        except SandboxError as error:
            raise ToolInfraError("sandbox", str(error)) from error

    async def execute(self, state: PythonState, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments["code"]
        try:
            result = await self._run(state, code)
        except SandboxLost as error:
            if self._replay_lost and state.taken_over:
                raise  # whoever knows all calls brings a fresh state to where this one was
            raise ToolInfraError("sandbox", str(error)) from error
        except SandboxError as error:
            raise ToolInfraError("sandbox", str(error)) from error
        state.history = [] if result.state_lost else [*state.history, code]
        return self._to_tool_result(result)

    async def replay(self, state: PythonState, calls: Sequence[str]) -> None:
        """Run `calls` again in a fresh box, their output discarded. Raises `SandboxError`."""
        await self.release(state)
        state.session = await self._sandbox.start(state.label, image=state.image)
        for code in calls:
            await state.session.run_python(code)

    async def release(self, state: PythonState) -> None:
        session, state.session = state.session, None
        if session is not None:
            await session.close()

    async def leave(self, state: PythonState) -> None:
        session, state.session = state.session, None
        if session is not None:
            await session.leave()

    async def _run(self, state: PythonState, code: str) -> RunResult:
        if state.session is None:
            state.session = await self._sandbox.start(state.label, image=state.image)
        try:
            return await state.session.run_python(code)
        except SandboxLost:
            if not self._replay_lost or state.taken_over:
                raise
        await self.replay(state, state.history)
        return await state.session.run_python(code)

    def _to_tool_result(self, result: RunResult) -> ToolResult:
        failed = result.exit_code != 0
        parts = [result.stdout.rstrip()]
        if failed:
            parts.append(self._last_lines(result.stderr))
        if result.exit_code is None:
            parts.append(LIMIT_TEXTS.get(result.limit or "", "Error: the code was stopped."))
        elif result.limit == "output":
            parts.append("[output cut]")
        if result.state_lost:
            parts.append(STATE_LOST)
        elif failed and not result.stderr.strip():
            parts.append(f"Error: exit code {result.exit_code}")
        text = "\n".join(part for part in parts if part) or NO_OUTPUT
        return ToolResult(text, metrics={"python_s": result.duration_s}, is_error=failed)

    def _last_lines(self, stderr: str) -> str:
        return "\n".join(stderr.rstrip().splitlines()[-self._traceback_lines :])
