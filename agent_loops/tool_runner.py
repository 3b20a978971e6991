"""The `tools` of a loop: calls in parallel, each with a deadline; a turn's results are journaled.

call ──malformed, unknown, invalid──► error text for the model
     └─► ToolStates.using (tool_states.py) ──► execute (tools/guard.py) ──► cut to the limits ──► journal ──► the loop

Each call has a name that is the same in every worker that runs the episode. A worker that dies during a call leaves no
journal entry; the next one repeats the call under that name, and a sandbox server that already executed it returns the
first result (`sandbox/idempotency.py`). An exception that escapes a tool is the tool's failure, never the model's.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import xxhash

from penstock.agent_loops.errors import AgentError, EpisodeRestart, InfraFailure
from penstock.agent_loops.journal import SESSIONS, UNREPEATABLE, EpisodeJournal
from penstock.agent_loops.rewards.registry import proof_of
from penstock.agent_loops.tool_states import NamedCall, OnLost, ToolStates, as_infra, within
from penstock.agent_loops.tracing import span
from penstock.common import gather_or_cancel, nearest
from penstock.common.errors import defined_at, finite_number
from penstock.sandbox import SandboxLost, as_call
from penstock.tools import (
    BaseTool,
    BoxTool,
    CountTokens,
    EpisodeBox,
    NoToolReward,
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


class CallNames:
    """Names the calls of one run of an episode, turn after turn, replayed turns included.

    A name depends on the calls and how often they occurred, not on their order: branches may run in another order.
    """

    def __init__(self) -> None:
        self._call_counts: Counter[int] = Counter()

    def of_turn(self, life: str, digest: int, calls: Sequence[ToolCall]) -> list[NamedCall]:
        """`life`: the run's own name (`EpisodeJournal.life`); `digest`: `hash_of(calls)`."""
        turn, self._call_counts[digest] = self._call_counts[digest], self._call_counts[digest] + 1
        return [NamedCall(call, f"{life}/{digest:016x}.{turn}.{index}") for index, call in enumerate(calls)]


def hash_of(calls: Sequence[ToolCall]) -> int:
    """The journal's hash of a turn's calls."""
    plain = [[call.name, call.arguments, call.error] for call in calls]
    return xxhash.xxh3_64_intdigest(json.dumps(plain, sort_keys=True, default=repr).encode())


MALFORMED = "malformed calls"
KEPT_ERRORS, MAX_ERROR = 3, 400


@dataclass(slots=True)
class ToolCounts:
    calls: int = 0
    errors: int = 0
    reward: float = 0.0
    """Sum of `ToolResult.reward`."""
    texts: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums of `ToolResult.metrics`."""
    final_answer: str | None = None
    """Text of the last result that was `final`."""
    error_texts: list[str] = field(default_factory=list)
    """The first `KEPT_ERRORS` results that were errors, cut."""
    faults: Counter[str] = field(default_factory=Counter)
    """Calls that came to nothing, by what was wrong with them."""

    @property
    def fault(self) -> str:
        """Returns the most frequent of `faults`, in words; empty if every call was answered."""
        return self.faults.most_common(1)[0][0] if self.faults else ""

    def add(self, results: Sequence[ToolResult]) -> None:
        """One turn's."""
        for result in results:
            self.calls += 1
            self.reward += result.reward or 0.0
            self.texts.append(result.text)
            if result.is_error:
                self.errors += 1
                if len(self.error_texts) < KEPT_ERRORS:
                    self.error_texts.append(result.text[:MAX_ERROR])
            if result.final:
                self.final_answer = result.text
            for key, value in result.metrics.items():
                self.metrics[key] = self.metrics.get(key, 0.0) + float(value)


class ToolBox:
    """The tools of one attempt at an episode. `release` must be awaited when the attempt ends, however it ends."""

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
        """The failure that ends the episode, even if the loop caught it."""
        self._tools, self._configs, self._task = tools, configs, task
        self._journal = journal
        self._names = CallNames()
        # No method of this object: with a cycle, all of an ended episode would wait for the garbage collector.
        self._execute = partial(_execute, tools, configs, count_tokens)
        self._states = ToolStates(tools, task, journal, on_lost, self._execute)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of all tools, for `chat.start`."""
        return [tool.schema for tool in self._tools.values()]

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Results in the order of `calls`; different tools run in parallel, calls of one stateful tool in turn.

        The model's mistakes are returned as error texts. Raises `InfraFailure` if a tool itself failed.
        """
        digest = hash_of(calls)
        try:
            named = self._names.of_turn(await self._journal.life(), digest, calls)
            problems = [self._problem_with(call) for call in calls]
            entry = self._journal.take(JournalKind.TOOLS, digest)
            if entry is not None:
                results = [ToolResult(**{**one, "images": tuple(one["images"])}) for one in entry.data["results"]]
                self._states.past.extend(one for one, problem in zip(named, problems, strict=True) if not problem)
            else:
                runs = [self._run_one(one, problem) for one, problem in zip(named, problems, strict=True)]
                results = await gather_or_cancel(runs)
                plain = [_plain(result) for result in results]
                data: dict[str, Any] = {"results": plain, SESSIONS: self._states.sessions()}
                if not all(self._states.can_repeat(call.name) for call in calls):
                    data[UNREPEATABLE] = True
                await self._journal.append(JournalEntry(kind=JournalKind.TOOLS, context_hash=digest, data=data))
        except (InfraFailure, EpisodeRestart) as error:
            self.failure = error
            raise
        self.counts.add(results)
        for one in zip(calls, problems, results, strict=True):
            if fault := self._fault_of(*one):
                self.counts.faults[fault] += 1
        return results

    async def rewards(self) -> Mapping[str, float]:
        """`calc_reward` of each tool that was used and has one; durable. Raises `InfraFailure`."""
        if self._journal.tool_rewards is None:
            rewards = {}
            for name, state in (await self._states.with_rewards()).items():
                reward = await self._reward_of(name, state)
                if reward is not None:
                    rewards[name] = reward
            if not rewards:
                return {}
            await self._journal.keep_rewards(rewards)
        return self._journal.tool_rewards or {}

    async def _reward_of(self, name: str, state: Any) -> float | None:
        """0 where the policy prevented one: once the run had a reward of the data source, the settings can give one.

        A lost box prevents one too, and is no doing of the policy: code in a box can only end it by a limit.
        """
        tool, settings = self._tools[name], repr(sorted(self._configs[name].settings.items()))
        proof = proof_of(f"tool {tool.turn_group or name}", settings, self._task.data_source)
        try:
            reward = await within(name, tool.reward_timeout_s, tool.calc_reward(state))
        except InfraFailure as failure:
            cause = failure.__cause__
            if not isinstance(cause, NoToolReward) or not (cause.is_zero or await self._journal.is_proven(proof)):
                raise
            log.warning("%s earns 0: %s", self._task.task_id, failure.reason)
            return 0.0
        except SandboxLost as error:
            raise InfraFailure("sandbox", str(error)) from error
        if reward is None:
            return None
        number = finite_number(reward)
        if number is None:
            problem = f"calc_reward returned {reward!r:.80}, not a finite number{defined_at(tool.calc_reward)}"
            raise InfraFailure(f"tool {name}", problem)
        await self._journal.prove(proof)
        return number

    async def episode_box(self) -> EpisodeBox | None:
        """The box that the recipe's tools work in, opened; its tools then count as used, and reward what is in it.

        None: no tool works in one. Raises `InfraFailure`.
        """
        name = next((name for name, tool in self._tools.items() if isinstance(tool, BoxTool)), None)
        if name is None:
            return None
        async with self._states.using(name) as state:
            box: EpisodeBox = state
            return box

    async def release(self, *, leave: bool = False) -> None:
        """Releases every state; never raises. `leave`: keep sessions open for the next owner where possible."""
        await self._states.give_back(leave=leave)

    # a turn --------------------------------------------------------------------------------------------------------
    async def _run_one(self, named: NamedCall, problem: str | None, *, is_second: bool = False) -> ToolResult:
        if problem:
            return ToolResult(f"Error: {problem}", is_error=True)
        name = named.call.name
        async with self._states.using(name) as state:
            try:
                result = await self._execute(named, state)
            except SandboxLost as error:
                if is_second:
                    raise InfraFailure("sandbox", f"lost twice in one call: {error}") from error
                log.warning("tool %s continues in a fresh session: %s", name, error)
            else:
                self._states.past.append(named)
                return result
        await self._states.lose(name, state)
        return await self._run_one(named, problem, is_second=True)

    def _fault_of(self, call: ToolCall, problem: str | None, result: ToolResult) -> str:
        if call.error:
            return MALFORMED
        if call.name not in self._tools:
            return f"no tool named {call.name[:40]}"  # a model may make up any name
        if problem:
            return f"wrong arguments for {call.name}"
        return f"{call.name} answered with an error" if result.is_error else ""

    def _problem_with(self, call: ToolCall) -> str | None:
        if call.error:
            return call.error
        tool = self._tools.get(call.name)
        if tool is None:
            tools = ", ".join(self._tools) or "none"
            return f"there is no tool {call.name!r}{nearest(call.name, self._tools)} (tools: {tools})"
        return check_arguments(tool.parameters, call.arguments)


async def _execute(
    tools: Mapping[str, BaseTool],
    configs: Mapping[str, ToolConfig],
    count_tokens: CountTokens | None,
    named: NamedCall,
    state: Any,
) -> ToolResult:
    call = named.call
    tool, config = tools[call.name], configs[call.name]
    with span("tool", call.name) as tool_span, as_call(named.name):
        result = await as_infra(call.name, guard_of(tool, config).call(tool, state, call.arguments))
        tool_span.note(is_error=result.is_error)
        if tool_span.with_text:
            tool_span.text(arguments=json.dumps(call.arguments, default=str), result=result.text)
    return _cut(result, config, count_tokens)


def _plain(result: ToolResult) -> dict[str, Any]:
    """Returns the fields by name; `asdict` would copy every element of every field."""
    return {one.name: getattr(result, one.name) for one in fields(ToolResult)} | {"metrics": dict(result.metrics)}


def _cut(result: ToolResult, config: ToolConfig, count_tokens: CountTokens | None) -> ToolResult:
    if config.max_output_tokens and count_tokens:
        text = truncate_tokens(result.text, config.max_output_tokens, count_tokens, config.max_output_chars, config.cut)
    else:
        text = truncate(result.text, config.max_output_chars, config.cut)
    return result if text == result.text else replace(result, text=text)
