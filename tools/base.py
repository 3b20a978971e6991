"""Tools as users write them: a class with a lifecycle per episode; and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.common import nearest
from penstock.transfer_queue import Task

if TYPE_CHECKING:
    from penstock.sandbox import Sandbox
    from penstock.tools.config import ToolConfig


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call: text for the model, numbers for the trainer."""

    text: str
    images: tuple[str, ...] = ()
    """References (paths or URLs), never pixels."""
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_error: bool = False
    """The call failed in a way that the model can fix (bad arguments, code that raised)."""
    final: bool = False
    """The episode is over: `text` is its answer."""


class ToolInfraError(Exception):
    """The tool's own machinery failed: ends the episode as ``infra_error(component)``, never as a reward of 0."""

    def __init__(self, component: str, reason: str) -> None:
        super().__init__(f"{component}: {reason}")
        self.component = component
        self.reason = reason


class NoToolReward(ToolInfraError):
    """`calc_reward` found none: by the policy's doing, or since the tool's settings are wrong. It is 0 once the run had
    a reward of this tool and data source."""

    def __init__(self, component: str, reason: str, *, is_zero: bool = False) -> None:
        """`is_zero`: the operator has said that it is the policy's own 0."""
        super().__init__(component, reason)
        self.is_zero = is_zero


class ToolUnavailable(ToolInfraError):
    """Refused, busy or not reached, and nothing was done: the call may be retried (`ToolConfig.retries`)."""

    def __init__(self, component: str, reason: str, after_s: float | None = None) -> None:
        super().__init__(component, reason)
        self.after_s = after_s
        """Seconds that the service asked callers to wait (``Retry-After``)."""


class CallGuard(Protocol):
    """Wraps the calls of a tool, see `penstock.tools.guard.ToolGuard`."""

    @property
    def config(self) -> ToolConfig:
        """The tool's settings."""

    async def call(self, tool: BaseTool, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """One call. Raises `ToolInfraError`."""


class BaseTool(ABC):
    """One object per agent worker; one `state` per episode. `release` is always awaited, also on cancellation."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments (type object). It is rendered into every prompt: keep it small and stable."""
    aliases: Mapping[str, tuple[str, ...]] = {}
    """Other names under which a `tool_schema` may offer an argument."""
    pure: bool = False
    """The result follows from the arguments alone, without effects: a worker asks once and remembers."""
    replayable: bool = True
    """True if the tool's own earlier calls restore a lost state. False: the episode starts afresh."""
    turn_group: str | None = None
    """Calls of tools of one group run in the order in which the model wrote them; others run in parallel."""
    needs_sandbox: bool = True
    """False: the tool opens no box, and a recipe with such tools alone runs without a sandbox."""
    create_timeout_s: float = 60.0
    """Deadline of `create`, waiting for a free box included."""
    reward_timeout_s: float = 60.0
    """Deadline of `calc_reward`."""
    guard: CallGuard | None = None
    """Cache, turnstile and retries around the calls; made from the tool's configuration."""

    defaults: Mapping[str, Any] = {}
    """Settings that a recipe may give a tool without its own `__init__`, and their defaults."""

    def __init__(self, sandbox: Sandbox | None = None, **settings: Any) -> None:
        """Raises `TypeError` for a setting that `defaults` does not have."""
        if unknown := sorted(set(settings) - set(self.defaults)):
            known = f"; known are {', '.join(self.defaults)}" if self.defaults else "; it has none"
            raise TypeError(f"unknown setting {unknown[0]!r}{nearest(unknown[0], self.defaults) or known}")
        self.sandbox = sandbox
        self.settings = {**self.defaults, **settings}

    @property
    def schema(self) -> dict[str, Any]:
        """OpenAI's function-tool shape, as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def create(self, task: Task) -> Any:
        """State for one episode; called on the tool's first use in it."""
        return None

    async def attach(self, task: Task, session_id: str) -> Any:
        """State around the session `session_id` of another worker; None: make a new one.

        Raises `SandboxLost` where the session is gone.
        """
        return None

    @abstractmethod
    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """One call, arguments already validated. Raises `ToolInfraError` where the tool, not the call, failed.

        Written without ``async`` it runs in a thread. `penstock.sandbox.current_call` names the call, with the same
        name in a worker that has to repeat it: an idempotency key for services that the tool itself uses.
        """

    async def calc_reward(self, state: Any) -> float | None:
        """Reward of the tool's final state, asked at the episode's end; None if it has none."""
        return None

    async def release(self, state: Any) -> None:
        """Give back what `create` took."""

    async def leave(self, state: Any) -> None:
        """Detach from a state whose episode continues in another worker, which will `attach` (a drain, a lost lease).

        What would end with this process anyway is released.
        """
        await self.release(state)

    async def close(self) -> None:
        """Give back what the tool itself holds (connections, servers); awaited once, when its worker ends."""


class ToolGroup(ABC):
    """Several tools from one entry of a recipe; made with the entry's settings, as a `BaseTool` is."""

    needs_sandbox: bool = True

    @abstractmethod
    def tools(self) -> list[BaseTool]:
        """Each with a unique name; they share the entry's limits. Raises `ValueError`, which names the fix."""
