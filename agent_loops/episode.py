"""One leased episode from its lease to the ledger.

lease ─► equip loop ─► setup, run (deadline) ─► teardown ─► tools' rewards ─► release ─► reward ─► complete
              ▲                │                                                            │
              └── restart ◄────┤ journal left                        infra failure ─────────┴──► fail
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.agent_loops.base import AgentLoopBase, AgentLoopOutput
from penstock.agent_loops.chat import ChatTokens, new_budget
from penstock.agent_loops.client import GenerateClient
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.errors import EpisodeRestart, InfraFailure, LoadError, TokenMismatch
from penstock.agent_loops.journal import EpisodeJournal
from penstock.agent_loops.llm import EpisodeLLM
from penstock.agent_loops.merge import as_outputs, check_output, to_trajectory
from penstock.agent_loops.mismatch import continuity
from penstock.agent_loops.reward import RewardFunction
from penstock.agent_loops.sampling import usual_sampling
from penstock.agent_loops.segment import TRUNCATED_DEADLINE
from penstock.agent_loops.toolbox import ToolBox
from penstock.agent_loops.trace import Trace, begin_trace, span
from penstock.sandbox.protocol import Sandbox
from penstock.tools.base import BaseTool
from penstock.tools.config import ToolConfig
from penstock.transfer_queue.ledger import BadPayload, Lease, Ledger, LedgerError
from penstock.transfer_queue.trajectory import Outcome, OutcomeKind, Trajectory

TEARDOWN_DEADLINE_S = 10.0
MAX_RESTARTS = 2
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Mismatches:
    """Token mismatches of a worker; the next trajectory that completes carries the count, so that none is hidden."""

    seen: int = 0
    reported: int = 0

    def take(self) -> int:
        new, self.reported = self.seen - self.reported, self.seen
        return new


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """What all episodes of one worker share."""

    worker: str
    config: AgentConfig
    ledger: Ledger
    client: GenerateClient
    chat: ChatTokens
    tools: Mapping[str, BaseTool]
    tool_configs: Mapping[str, ToolConfig]
    find_loop: Callable[[str], type[AgentLoopBase]]
    sandbox: Sandbox | None = None
    on_lost: Literal["replay", "restart"] = "replay"
    reward: RewardFunction | None = None
    mismatches: Mismatches = field(default_factory=Mismatches)


class Episode:
    """Runs one lease. Made, run once, thrown away."""

    def __init__(self, parts: EpisodeParts, lease: Lease) -> None:
        self._parts = parts
        self._lease = lease
        self._journal = EpisodeJournal(parts.ledger, lease)
        self._started = time.monotonic()
        self._trace = Trace()

    async def run(self) -> Outcome:
        """The outcome that the ledger was told. Raises `LedgerError` (lease lost, ledger gone) and `CancelledError`."""
        self._trace = begin_trace()
        try:
            trajectory = await self._follow_or_restart()
            if trajectory.outcome.may_carry_reward:
                return await self._complete(trajectory)
            return await self._fail(trajectory.outcome)
        except InfraFailure as failure:
            self._parts.mismatches.seen += isinstance(failure, TokenMismatch)
            return await self._fail(Outcome(OutcomeKind.INFRA_ERROR, failure.reason, failure.component))

    # endings -------------------------------------------------------------------------------------------------------
    async def _complete(self, trajectory: Trajectory) -> Outcome:
        try:
            await self._parts.ledger.complete(self._lease, trajectory)
        except BadPayload as error:
            raise InfraFailure("ledger", f"refused the trajectory: {error}") from error
        return trajectory.outcome

    async def _fail(self, outcome: Outcome) -> Outcome:
        again = await self._parts.ledger.fail(self._lease, outcome)
        log.warning(
            "episode %s: %s %s: %s (%s)",
            self._lease.episode_id,
            outcome.kind,
            outcome.component,
            outcome.reason,
            "will be tried again" if again else "given up",
        )
        return outcome

    # attempts ------------------------------------------------------------------------------------------------------
    async def _follow_or_restart(self) -> Trajectory:
        for _ in range(MAX_RESTARTS):
            try:
                return await self._attempt()
            except EpisodeRestart as cause:
                log.warning("episode %s starts afresh: %s", self._lease.episode_id, cause)
                await self._journal.restart(str(cause))
        try:
            return await self._attempt()
        except EpisodeRestart as cause:
            raise InfraFailure("loop", f"started afresh {MAX_RESTARTS} times, again: {cause}") from cause

    async def _attempt(self) -> Trajectory:
        """Loop and tools are closed before the reward is asked: a slow reward holds no box."""
        loop = self._loop_class()()
        llm, tools = self._equip(loop)
        try:
            try:
                outputs = await self._outputs_within_deadline(loop, llm)
            finally:
                await self._teardown(loop)
            _raise_swallowed(llm, tools)
            tool_rewards = await tools.rewards()
        finally:
            await tools.release()
        return await self._conclude(outputs, llm, tools, tool_rewards)

    def _loop_class(self) -> type[AgentLoopBase]:
        name = self._lease.task.agent_name or self._parts.config.loop
        try:
            return self._parts.find_loop(name)
        except LoadError as error:
            raise InfraFailure("loop", str(error)) from error

    def _equip(self, loop: AgentLoopBase) -> tuple[EpisodeLLM, ToolBox]:
        parts, lease = self._parts, self._lease
        loop.chat = parts.chat.for_episode(new_budget(parts.config))
        sampling = usual_sampling(parts.config, parts.chat.stop_token_ids, lease)
        loop.llm = EpisodeLLM(parts.client, lease, self._journal, sampling, parts.chat.decode)
        loop.tools = ToolBox(
            parts.tools, parts.tool_configs, lease.task, self._journal, parts.on_lost, parts.chat.count_tokens
        )
        loop.sandbox, loop.config = parts.sandbox, parts.config.settings
        loop.equip(parts, lease, self._journal)
        return loop.llm, loop.tools

    async def _outputs_within_deadline(self, loop: AgentLoopBase, llm: EpisodeLLM) -> list[AgentLoopOutput]:
        deadline_s = self._parts.config.episode_deadline_s
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                await loop.setup(self._lease.task)
                outputs = as_outputs(await loop.run(self._lease.task))
                self._journal.check_followed()
                return outputs
        except (InfraFailure, EpisodeRestart, LedgerError):
            raise
        except Exception as error:
            if not deadline.expired():
                raise InfraFailure("loop", f"{type(error).__name__}: {error}") from error
        if not llm.segments:
            raise InfraFailure("rollout", f"nothing was sampled within {deadline_s:g} s")
        return [segment.output(outcome=TRUNCATED_DEADLINE) for segment in llm.segments]

    async def _teardown(self, loop: AgentLoopBase) -> None:
        try:
            async with asyncio.timeout(TEARDOWN_DEADLINE_S):
                await loop.teardown()
        except Exception:
            log.exception("teardown of episode %s failed", self._lease.episode_id)

    # the trajectory ------------------------------------------------------------------------------------------------
    async def _conclude(
        self, outputs: list[AgentLoopOutput], llm: EpisodeLLM, tools: ToolBox, tool_rewards: Mapping[str, float]
    ) -> Trajectory:
        for output in outputs:
            check_output(output, llm.seen)
        metrics = {**_numbers(llm, tools), **{f"tool_reward/{name}": value for name, value in tool_rewards.items()}}
        reward = None
        if outputs[-1].outcome.may_carry_reward:
            reward, further = await self._reward(outputs, tools, tool_rewards)
            metrics |= further
        return to_trajectory(self._lease, outputs, reward, metrics | self._totals(outputs), self._notes(tools))

    async def _reward(
        self, outputs: list[AgentLoopOutput], tools: ToolBox, tool_rewards: Mapping[str, float]
    ) -> tuple[float, Mapping[str, float]]:
        """The loop's own reward, else the run's reward function, else the sum of the tools'."""
        given = [output.reward for output in outputs if output.reward is not None]
        if given:
            return float(given[-1]), {}
        if self._parts.reward is None:
            if not tool_rewards:
                raise InfraFailure("reward", "no reward: set agent.reward, or give one in segment.output(reward=…)")
            return sum(tool_rewards.values()), {}
        solution = self._parts.chat.decode(outputs[-1].response_ids.tolist(), special=False)
        further = {
            "final_text": self._parts.chat.decode(last_answer(outputs[-1]), special=False),
            "num_turns": sum(output.num_turns for output in outputs),
            "tool_calls": tools.counts.calls,
            "final_answer": tools.counts.final_answer,
            "tool_rewards": dict(tool_rewards),
        }
        with span("reward"):
            score = await self._parts.reward.score(self._lease.task, solution, further)
        return score.reward, score.metrics

    def _totals(self, outputs: list[AgentLoopOutput]) -> dict[str, float]:
        return {
            "num_turns": sum(output.num_turns for output in outputs),
            "response_tokens": sum(len(output.response_ids) for output in outputs),
            "segments": len(outputs),
            **continuity(outputs, self._parts.chat.decode, self._parts.chat.opening_tokens),
            "restarts": self._journal.replayed.restarts,
            "token_mismatches": self._parts.mismatches.take(),
            "latency_s": time.monotonic() - self._started,
        }

    def _notes(self, tools: ToolBox) -> dict[str, Any]:
        replayed = self._journal.replayed
        return {
            "tool_results": tools.counts.texts,
            "agent": self._loop_class().__name__,
            "worker": self._parts.worker,
            "attempt": self._lease.attempt,
            "replayed_calls": replayed.sampled,
            "replayed_tool_turns": replayed.tools,
            **self._trace.plain(),
        }


def last_answer(output: AgentLoopOutput) -> list[int]:
    """Ids of the last model call's answer."""
    if output.num_turns == 0:
        return []
    start = int(output.turn_starts[-1])
    ids: list[int] = output.response_ids[start:][output.response_mask[start:] == 1].tolist()
    return ids


def _numbers(llm: EpisodeLLM, tools: ToolBox) -> dict[str, float]:
    return {
        "calls": llm.counts.calls,
        "calls_continued_over_update": llm.counts.continued_over_update,
        "calls_resumed": llm.counts.resumed,
        "llm_latency_s": llm.counts.latency_s,
        "tool_calls": tools.counts.calls,
        "tool_errors": tools.counts.errors,
        "tool_call_reward": tools.counts.reward,
        **{f"tool/{key}": value for key, value in tools.counts.metrics.items()},
    }


def _raise_swallowed(llm: EpisodeLLM, tools: ToolBox) -> None:
    """A loop may catch our failures to clean up, not to be rewarded in spite of them (invariant 5)."""
    for failure in (llm.failure, tools.failure):
        if failure is not None:
            raise failure
