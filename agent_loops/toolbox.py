"""The `tools` of a loop: calls in parallel, each with a deadline; state per episode, always given back.

call ──malformed, unknown, invalid──► error text for the model
     └─► state (made on first use) ──► execute (see tools/guard.py) ──► cut to the limits ──► journal ──► the loop
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

import xxhash

from penstock.agent_loops.errors import AgentError, EpisodeRestart, InfraFailure
from penstock.agent_loops.journal import EpisodeJournal
from penstock.agent_loops.load import nearest
from penstock.agent_loops.trace import span
from penstock.sandbox.protocol import SandboxError, SandboxLost
from penstock.tools.base import BaseTool, ToolInfraError, ToolResult
from penstock.tools.config import ToolConfig
from penstock.tools.episode_box import EpisodeBox, sharing
from penstock.tools.guard import guard_of
from penstock.tools.parsers import ToolCall
from penstock.tools.truncate import CountTokens, truncate, truncate_tokens
from penstock.tools.validate import check_arguments
from penstock.transfer_queue.trajectory import JournalEntry, JournalKind, Task

CREATE_DEADLINE_S = 60.0
"""Making a tool's state, waiting for a free box included."""
RELEASE_DEADLINE_S = 10.0
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class ToolCounts:
    """Numbers and texts of one episode's tool calls."""

    calls: int = 0
    errors: int = 0
    reward: float = 0.0
    """Sum of `ToolResult.reward`."""
    texts: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums of `ToolResult.metrics`."""
    final_answer: str | None = None
    """Text of the last result that was `final`."""


@dataclass(slots=True)
class _Held:
    """What one tool holds for this episode."""

    state: Any = None
    ready: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls on one state run in the order in which the model wrote them."""


class ToolBox:
    """Made for one lease of an episode. `release` must be awaited at its end, whatever the end is."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        tools: Mapping[str, BaseTool],
        configs: Mapping[str, ToolConfig],
        task: Task,
        journal: EpisodeJournal,
        on_lost: Literal["replay", "restart"] = "replay",
        count_tokens: CountTokens | None = None,
    ) -> None:
        self.counts = ToolCounts()
        self.failure: AgentError | None = None
        """The failure that ends the episode, also where the loop swallowed it."""
        self._tools = tools
        self._configs = configs
        self._task = task
        self._journal = journal
        self._on_lost = on_lost
        self._count_tokens = count_tokens
        self._held: dict[str, _Held] = {}
        self._groups: dict[str, asyncio.Lock] = {}
        self._boxes: dict[int, EpisodeBox] = {}
        self._past: list[ToolCall] = []
        self._sessions: dict[str, str] = {}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of all tools, for `chat.start`."""
        return [tool.schema for tool in self._tools.values()]

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Results in the order of `calls`; different tools run in parallel, calls of one stateful tool in turn.

        What the model did wrong comes back as an error text. Raises `InfraFailure` where a tool itself failed.
        """
        asked = _hash_of(calls)
        try:
            entry = self._journal.take(JournalKind.TOOLS, asked)
            results = self._replayed(calls, entry) if entry else await self._run_now(calls, asked)
        except (InfraFailure, EpisodeRestart) as error:
            self.failure = error
            raise
        self._count(results)
        return results

    async def rewards(self) -> dict[str, float]:
        """`calc_reward` of each tool that was used, where it has one. Raises `InfraFailure`."""
        rewards = {}
        for name, held in self._held.items():
            if held.ready:
                tool = self._tools[name]
                reward = await self._guarded(name, tool.calc_reward(held.state), tool.reward_timeout_s)
                if reward is not None:
                    rewards[name] = float(reward)
        return rewards

    async def release(self) -> None:
        """Give back every state. Never raises: what cannot be given back is logged and left to its TTL."""
        held, self._held = self._held, {}
        ready = {name: state for name, state in held.items() if state.ready}
        await asyncio.gather(*(self._release_one(name, one.state) for name, one in ready.items()))

    # a turn --------------------------------------------------------------------------------------------------------
    async def _run_now(self, calls: Sequence[ToolCall], asked: int) -> list[ToolResult]:
        results = await all_or_none([self._run_one(call) for call in calls])
        self._past.extend(calls)
        data = {"results": [asdict(result) for result in results], "sandbox_sessions": self._open_sessions()}
        await self._journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=asked, data=data))
        return results

    def _replayed(self, calls: Sequence[ToolCall], entry: JournalEntry) -> list[ToolResult]:
        self._past.extend(calls)
        self._sessions.update(entry.data.get("sandbox_sessions", {}))
        return [ToolResult(**{**result, "images": tuple(result["images"])}) for result in entry.data["results"]]

    def _open_sessions(self) -> dict[str, str]:
        named = {name: getattr(held.state, "session_id", None) for name, held in self._held.items()}
        return {name: session for name, session in named.items() if session is not None}

    def _count(self, results: Sequence[ToolResult]) -> None:
        self.counts.calls += len(results)
        self.counts.errors += sum(result.is_error for result in results)
        self.counts.reward += sum(result.reward or 0.0 for result in results)
        self.counts.texts.extend(result.text for result in results)
        finals = [result.text for result in results if result.final]
        self.counts.final_answer = finals[-1] if finals else self.counts.final_answer
        for key, value in ((key, value) for result in results for key, value in result.metrics.items()):
            self.counts.metrics[key] = self.counts.metrics.get(key, 0.0) + float(value)

    # one call ------------------------------------------------------------------------------------------------------
    async def _run_one(self, call: ToolCall) -> ToolResult:
        problem = self._problem_with(call)
        if problem:
            return ToolResult(f"Error: {problem}", is_error=True)
        held = self._hold(call.name)
        async with held.lock:
            if not held.ready:
                await self._make_ready(call.name, held)
            if held.state is not None:
                return await self._execute(call, held.state)
        return await self._execute(call, None)

    def _hold(self, name: str) -> _Held:
        if name not in self._held:
            group = self._tools[name].turn_group
            lock = self._groups.setdefault(group, asyncio.Lock()) if group else asyncio.Lock()
            self._held[name] = _Held(lock=lock)
        return self._held[name]

    def _problem_with(self, call: ToolCall) -> str | None:
        if call.error:
            return call.error
        tool = self._tools.get(call.name)
        if tool is None:
            return f"there is no tool {call.name!r}{nearest(call.name, self._tools)} (tools: {', '.join(self._tools)})"
        return check_arguments(tool.parameters, call.arguments)

    async def _execute(self, call: ToolCall, state: Any) -> ToolResult:
        tool, config = self._tools[call.name], self._configs[call.name]
        with span("tool", call.name):
            result = await self._infra(call.name, guard_of(tool, config).call(tool, state, call.arguments))
        return _cut(result, config, self._count_tokens)

    # state ---------------------------------------------------------------------------------------------------------
    async def _make_ready(self, name: str, held: _Held) -> None:
        """A fresh state; on a resumed episode the old session, or a fresh one brought to where the old one was."""
        tool = self._tools[name]
        with sharing(self._boxes):
            attached = await self._attach(name)
            held.state = (
                attached
                if attached is not None
                else await self._guarded(name, tool.create(self._task), CREATE_DEADLINE_S)
            )
        shared = any(self._held[one].ready for one in self._partners(name) if one in self._held)
        held.ready = True
        if attached is None and held.state is not None and not shared:
            await self._repeat_past_calls(name, held.state)

    def _partners(self, name: str) -> list[str]:
        """The tools that work on the same state: those of its turn group, itself among them."""
        group = self._tools[name].turn_group
        return [one for one, tool in self._tools.items() if one == name or (group and tool.turn_group == group)]

    async def _attach(self, name: str) -> Any:
        session_id = next((self._sessions[one] for one in self._partners(name) if one in self._sessions), None)
        if session_id is None:
            return None
        try:
            return await self._guarded(name, self._tools[name].attach(self._task, session_id), CREATE_DEADLINE_S)
        except SandboxLost:
            return None

    async def _repeat_past_calls(self, name: str, state: Any) -> None:
        partners = self._partners(name)
        past = [call for call in self._past if call.name in partners and not self._problem_with(call)]
        if past and (self._on_lost == "restart" or not self._tools[name].replayable):
            raise EpisodeRestart(f"the state of tool {name} went with its worker")
        for call in past:
            await self._execute(call, state)

    async def _release_one(self, name: str, state: Any) -> None:
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await self._tools[name].release(state)
        except Exception:
            log.exception("tool %s could not be released in episode of %s", name, self._task.task_id)

    # errors of tools -----------------------------------------------------------------------------------------------
    async def _guarded(self, name: str, work: Awaitable[T], deadline_s: float) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._infra(name, work)
        except TimeoutError as error:
            raise InfraFailure(f"tool {name}", f"not ready within {deadline_s:g} s") from error

    async def _infra(self, name: str, work: Awaitable[T]) -> T:
        """Whatever escapes a tool is the tool's failure, never the model's."""
        try:
            return await work
        except (SandboxLost, TimeoutError):
            raise
        except ToolInfraError as error:
            raise InfraFailure(error.component, error.reason) from error
        except SandboxError as error:
            raise InfraFailure("sandbox", str(error)) from error
        except Exception as error:
            raise InfraFailure(f"tool {name}", f"{type(error).__name__}: {error}") from error


async def all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order; on the first failure the others are cancelled and awaited, so that none runs on."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _hash_of(calls: Sequence[ToolCall]) -> int:
    plain = [[call.name, call.arguments, call.error] for call in calls]
    return xxhash.xxh3_64_intdigest(json.dumps(plain, sort_keys=True, default=repr).encode())


def _cut(result: ToolResult, config: ToolConfig, count_tokens: CountTokens | None) -> ToolResult:
    if config.max_output_tokens and count_tokens:
        text = truncate_tokens(result.text, config.max_output_tokens, count_tokens, config.max_output_chars, config.cut)
    else:
        text = truncate(result.text, config.max_output_chars, config.cut)
    return result if text == result.text else replace(result, text=text)
