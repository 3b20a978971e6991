"""The base class of agent loops, the services that a worker gives to its episodes, and the registry of loops.

A loop is named by ``@register("my_agent")``, or by the path of any class.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel, ValidationError

from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.errors import LoadError
from penstock.agent_loops.forks import Forks
from penstock.agent_loops.journal import EpisodeJournal
from penstock.agent_loops.llm import EpisodeLLM, GenerateClient
from penstock.agent_loops.loader import load_object
from penstock.agent_loops.rewards.registry import RewardFunction
from penstock.agent_loops.segment import AgentLoopOutput
from penstock.agent_loops.tool_runner import ToolBox
from penstock.agent_loops.tracing import OnSpan, OnUse
from penstock.common import USERS_FAULTS, Registry, gather_or_cancel, nearest
from penstock.sandbox import Sandbox
from penstock.tools import BaseTool, ToolConfig
from penstock.transfer_queue import Lease, Task, TransferQueue

if TYPE_CHECKING:
    from penstock.agent_loops.teachers import Teachers  # with an HTTP client, which `penstock run` itself does without

log = logging.getLogger(__name__)
T = TypeVar("T")
PACKAGE = "penstock.agent_loops.loops"
UNKNOWN = "extra_forbidden"
"""pydantic's name of the error for a key that a model lacks."""
LOOPS: Registry[type[AgentLoopBase]] = Registry(
    "agent loop",
    {
        "single_turn": f"{PACKAGE}.single_turn:SingleTurnLoop",
        "tool_agent": f"{PACKAGE}.react:ToolAgentLoop",
        "code_act": f"{PACKAGE}.code_act:CodeActLoop",
        "stepwise": f"{PACKAGE}.stepwise:StepwiseLoop",
        "compaction": f"{PACKAGE}.compaction:CompactionLoop",
        "multi_agent": f"{PACKAGE}.multi_agent:MultiAgentLoop",
        "command": "penstock.gateway.command.loop:CommandLoop",
        "gymnasium": "penstock.agent_loops.environments.gymnasium:GymnasiumLoop",
        "openenv": "penstock.agent_loops.environments.openenv:OpenEnvLoop",
    },
    unique=True,
    error=LoadError,
)


@dataclass(slots=True)
class Mismatches:
    """Token mismatches of a worker; the next completed trajectory carries the count, so that none is hidden."""

    seen: int = 0
    reported: int = 0

    def take(self) -> int:
        new, self.reported = self.seen - self.reported, self.seen
        return new


class SharedPart(Protocol):
    async def close(self) -> None: ...


class SharedParts:
    """Processes and connections that loops of one worker share: made on first use, closed with the worker."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], SharedPart]) -> Any:
        """Returns the part of this key, made at the first call."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    async def close(self) -> None:
        """Closes all parts; a failure is logged."""
        while self._parts:
            key, part = self._parts.popitem()
            try:
                await part.close()
            except USERS_FAULTS:
                log.exception("%s could not be closed", key)


@dataclass(frozen=True, slots=True)
class WorkerServices:
    """Shared by all episodes of one worker."""

    worker: str
    config: AgentConfig
    queue: TransferQueue
    client: GenerateClient
    chat: ChatTokens
    tools: Mapping[str, BaseTool]
    tool_configs: Mapping[str, ToolConfig]
    find_loop: Callable[[str], type[AgentLoopBase]]
    sandbox: Sandbox | None = None
    on_lost: Literal["replay", "restart"] = "replay"
    reward: RewardFunction | None = None
    teachers: Teachers | None = None
    routing_replay: bool = False
    """See `RunContext.routing_replay`."""
    max_model_len: int = 0
    """See `RunContext.max_model_len`."""
    mismatches: Mismatches = field(default_factory=Mismatches)
    on_span: OnSpan | None = None
    """Called with each span of each episode when it ends."""
    on_use: OnUse | None = None
    """Called with what an episode uses."""
    recipe_dir: Path = Path()
    """The folder that is searched first for files that settings name."""
    shared: SharedParts = field(default_factory=SharedParts)


class AgentLoopBase(ABC):
    """Runs one episode of one task; one object per episode.

    Set before `setup`: `llm` (token in, token out), `chat` (messages ↔ ids), `tools`, `sandbox`, `config`, `forks`.
    After its worker dies, another worker runs the episode from the start, with model calls and tools answered from the
    journal. `run` must therefore be deterministic given those answers: take randomness from `task`.
    """

    llm: EpisodeLLM
    chat: ChatTokens
    tools: ToolBox
    sandbox: Sandbox | None
    config: Mapping[str, Any]
    forks: Forks
    can_fork: ClassVar[bool] = True
    """False if a worker that takes the episode over does not run it from the journal alone: it has no branches."""
    needs_sandbox: ClassVar[bool] = False
    """True if the loop needs `sandbox` even if the recipe has no tool."""
    settings_kind: ClassVar[type[BaseModel] | None] = None
    """The model of `agent.settings`, for `check_settings`."""
    takes_tools: ClassVar[bool] = True
    """False if its episodes call no tools: a recipe with such loops alone may have none."""

    @classmethod
    def require(cls) -> None:
        """Called once, before the first lease. Raises `LoadError` if a requirement of the loop is not installed."""

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any]) -> None:
        """Checks `agent.settings` before a run; those of a subclass without its own `settings_kind` are its matter.

        Raises `LoadError` naming the wrong one.
        """
        kind = cls.__dict__.get("settings_kind")
        if kind is not None:
            read_as(kind, settings, cls)

    @classmethod
    def longest_response(cls, config: AgentConfig) -> int:
        """Most tokens that a segment has behind its prompt. Raises `LoadError` naming a wrong setting."""
        return config.max_response_tokens

    def equip(self, services: WorkerServices, lease: Lease, journal: EpisodeJournal) -> None:
        """Called before `setup`, so that a loop can replace its services (`OpenAIAgentLoop`). Raises `InfraFailure`."""
        self._journal = journal

    async def together(self, branches: Sequence[Awaitable[T]]) -> list[T]:
        """Run branches of the episode concurrently (sub-agents); results in order.

        Only in here may model calls and tool turns come in another order on a resumed episode. On the first failure
        the other branches are cancelled and awaited.
        """
        with self._journal.branching():
            return await gather_or_cancel(branches)

    async def fork(self, turn: int | None = None, count: int | None = None) -> list[str]:
        """Starts branches of the episode, under `agent.forks`; returns their episodes.

        A branch shares everything before model call `turn` (from 0; None: the next one) and samples that call anew.
        `count` None: `agent.forks.branches`. Fewer, or none, are started where too few members of the group wait, and
        none by a branch at its own origin or before, nor behind calls of a tool whose state cannot be restored.
        """
        return await self.forks.fork(self.llm.counts.calls if turn is None else turn, count)

    async def setup(self, task: Task) -> None:
        """Before `run`; what it opens, `teardown` closes. Written without ``async`` both run in a thread."""

    @abstractmethod
    async def run(self, task: Task) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Runs the episode and returns its segments. Its reward is the last output's that is not None."""

    async def teardown(self) -> None:
        """Always awaited, also on error and cancellation."""


Settings = TypeVar("Settings", bound=BaseModel)


def read_as(kind: type[Settings], settings: Mapping[str, Any], loop: type[AgentLoopBase]) -> Settings:
    """Return `agent.settings` as a loop's own. Raises `LoadError` naming the wrong one."""
    try:
        return kind(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        reason = f"no such setting{nearest(name, kind.model_fields)}" if first["type"] == UNKNOWN else first["msg"]
        raise LoadError(f"agent.settings.{name} of {loop.__name__}: {reason}") from error


Loop = TypeVar("Loop", bound=type[AgentLoopBase])


def register(name: str) -> Callable[[Loop], Loop]:
    """Class decorator: registers a loop under `name`. Raises `LoadError` where another class has the name."""
    return cast("Callable[[Loop], Loop]", LOOPS.register(name))


def find_loop(name: str, recipe_dir: Path) -> type[AgentLoopBase]:
    """The class for a registered name, ``package.module:Class`` or ``folder/file.py:Class``; an ``async def`` that
    takes (client, task) becomes an `OpenAIAgentLoop`. Raises `LoadError`.
    """
    registered: Any = LOOPS.get(name, partial(load_object, recipe_dir=recipe_dir))
    if inspect.iscoroutinefunction(registered):
        # A path, not an import: the gateway imports this folder.
        registered = load_object("penstock.gateway.openai_agent:loop_of", recipe_dir)(registered, name)
    if not (isinstance(registered, type) and issubclass(registered, AgentLoopBase)):
        raise LoadError(f"{name} is not a subclass of AgentLoopBase, nor an `async def agent(client, task)`")
    if inspect.isabstract(registered):
        missing = ", ".join(sorted(registered.__abstractmethods__))
        raise LoadError(f"{name} has no `async def {missing}`: it must be written")
    registered.require()
    return registered
