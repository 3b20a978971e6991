"""The `tools` of a loop: calls in parallel, each with a deadline; state per episode, always given back.

call ──malformed, unknown, invalid──► error text for the model
     └─► state (tool_states.py) ──► execute (tools/guard.py) ──► cut to the limits ──► journal ──► the loop
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.agent_loops.errors import AgentError, EpisodeRestart, InfraFailure
from penstock.agent_loops.journal import SESSIONS, EpisodeJournal
from penstock.agent_loops.load import nearest
from penstock.agent_loops.named_calls import CallNames, NamedCall, hash_of
from penstock.agent_loops.side_by_side import all_or_none
from penstock.agent_loops.tool_counts import ToolCounts
from penstock.agent_loops.tool_failures import as_infra, within
from penstock.agent_loops.tool_states import OnLost, ToolStates
from penstock.agent_loops.trace import span
from penstock.sandbox import SandboxLost, as_call
from penstock.tools import (
    BaseTool,
    CountTokens,
    ToolConfig,
    ToolResult,
    check_arguments,
    guard_of,
    truncate,
    truncate_tokens,
)
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import JournalEntry, JournalKind, Task

log = logging.getLogger(__name__)


class ToolBox:
    """Made for one attempt at an episode. `release` must be awaited at its end, whatever the end is."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        tools: Mapping[str, BaseTool],
        configs: Mapping[str, ToolConfig],
        task: Task,
        journal: EpisodeJournal,
        on_lost: OnLost = "replay",
        count_tokens: CountTokens | None = None,
    ) -> None:
        self.counts = ToolCounts()
        self.failure: AgentError | None = None
        """The failure that ends the episode, also where the loop swallowed it."""
        self._tools = tools
        self._configs = configs
        self._journal = journal
        self._count_tokens = count_tokens
        self._names = CallNames()
        self._states = ToolStates(tools, task, journal, on_lost, self._execute)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of all tools, for `chat.start`."""
        return [tool.schema for tool in self._tools.values()]

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Results in the order of `calls`; different tools run in parallel, calls of one stateful tool in turn.

        What the model did wrong comes back as an error text. Raises `InfraFailure` where a tool itself failed.
        """
        asked = hash_of(calls)
        try:
            named = self._names.of_turn(await self._journal.life(), asked, calls)
            entry = self._journal.take(JournalKind.TOOLS, asked)
            results = _results_of(entry) if entry else await self._run_now(named, asked)
        except (InfraFailure, EpisodeRestart) as error:
            self.failure = error
            raise
        self._states.past.extend(one for one in named if not self._problem_with(one.call))
        self.counts.add(results)
        return results

    async def rewards(self) -> Mapping[str, float]:
        """`calc_reward` of each tool that was used, where it has one; durable. Raises `InfraFailure`."""
        if self._journal.tool_rewards is None:
            rewards = {}
            for name, state in (await self._states.with_rewards()).items():
                reward = await within(name, self._tools[name].reward_timeout_s, self._tools[name].calc_reward(state))
                if reward is not None:
                    rewards[name] = float(reward)
            if not rewards:
                return {}
            await self._journal.keep_rewards(rewards)
        return self._journal.tool_rewards or {}

    async def release(self, *, leave: bool = False) -> None:
        """Give back every state; never raises. `leave`: another worker goes on, sessions that can stay open for it."""
        await self._states.give_back(leave=leave)

    # a turn --------------------------------------------------------------------------------------------------------
    async def _run_now(self, calls: Sequence[NamedCall], asked: int) -> list[ToolResult]:
        results = await all_or_none([self._run_one(one) for one in calls])
        data = {"results": [asdict(result) for result in results], SESSIONS: self._states.sessions()}
        await self._journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=asked, data=data))
        return results

    async def _run_one(self, named: NamedCall) -> ToolResult:
        problem = self._problem_with(named.call)
        if problem:
            return ToolResult(f"Error: {problem}", is_error=True)
        name = named.call.name
        async with self._states.using(name) as state:
            try:
                return await self._execute(named, state)
            except SandboxLost as error:
                log.warning("tool %s goes on in a fresh session: %s", name, error)
        await self._states.lose(name, state)
        async with self._states.using(name) as state:
            try:
                return await self._execute(named, state)
            except SandboxLost as error:
                raise InfraFailure("sandbox", f"lost twice in one call: {error}") from error

    def _problem_with(self, call: ToolCall) -> str | None:
        if call.error:
            return call.error
        tool = self._tools.get(call.name)
        if tool is None:
            return f"there is no tool {call.name!r}{nearest(call.name, self._tools)} (tools: {', '.join(self._tools)})"
        return check_arguments(tool.parameters, call.arguments)

    async def _execute(self, named: NamedCall, state: Any) -> ToolResult:
        call = named.call
        tool, config = self._tools[call.name], self._configs[call.name]
        with span("tool", call.name) as told, as_call(named.name):
            result = await as_infra(call.name, guard_of(tool, config).call(tool, state, call.arguments))
            told.note(is_error=result.is_error)
            if told.with_text:
                told.text(arguments=json.dumps(call.arguments, default=str), result=result.text)
        return _cut(result, config, self._count_tokens)


def _results_of(entry: JournalEntry) -> list[ToolResult]:
    return [ToolResult(**{**result, "images": tuple(result["images"])}) for result in entry.data["results"]]


def _cut(result: ToolResult, config: ToolConfig, count_tokens: CountTokens | None) -> ToolResult:
    if config.max_output_tokens and count_tokens:
        text = truncate_tokens(result.text, config.max_output_tokens, count_tokens, config.max_output_chars, config.cut)
    else:
        text = truncate(result.text, config.max_output_chars, config.cut)
    return result if text == result.text else replace(result, text=text)
