"""A loop's outputs become a trajectory: checked against what was sampled, rewarded, and told in numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agent_loops.base import AgentLoopOutput
from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.journal import Replayed
from penstock.agent_loops.llm import EpisodeLLM
from penstock.agent_loops.merge import check_output, to_trajectory
from penstock.agent_loops.mismatch import continuity
from penstock.agent_loops.parts import EpisodeParts
from penstock.agent_loops.toolbox import ToolBox
from penstock.agent_loops.trace import Trace, span
from penstock.transfer_queue import Lease, Trajectory


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt that ran to its end, loop and tools closed."""

    parts: EpisodeParts
    lease: Lease
    outputs: Sequence[AgentLoopOutput]
    llm: EpisodeLLM
    tools: ToolBox
    tool_rewards: Mapping[str, float]
    replayed: Replayed
    trace: Trace
    agent: str
    """Name of the loop's class."""

    async def trajectory(self) -> Trajectory:
        """Raises `TokenMismatch` for outputs that were edited, `InfraFailure` where no reward can be had."""
        for output in self.outputs:
            check_output(output, self.llm.seen)
        metrics = {**self._numbers(), **{f"tool_reward/{name}": value for name, value in self.tool_rewards.items()}}
        reward = None
        if self.outputs[-1].outcome.may_carry_reward:
            reward, further = await self._reward()
            metrics |= further
        return to_trajectory(self.lease, self.outputs, reward, metrics | self._totals(), self._notes())

    async def _reward(self) -> tuple[float, Mapping[str, float]]:
        """The loop's own reward, else the run's reward function, else the sum of the tools'."""
        given = [output.reward for output in self.outputs if output.reward is not None]
        if given:
            return float(given[-1]), {}
        if self.parts.reward is None:
            if not self.tool_rewards:
                raise InfraFailure("reward", "no reward: set agent.reward, or give one in segment.output(reward=…)")
            return sum(self.tool_rewards.values()), {}
        solution = self.parts.chat.decode(self.outputs[-1].response_ids.tolist(), special=False)
        with span("reward") as told:
            score = await self.parts.reward.score(self.lease.task, solution, self._for_reward())
            told.note(reward=score.reward)
        return score.reward, score.metrics

    def _for_reward(self) -> Mapping[str, Any]:
        """What joins the row's `extra_info`."""
        return {
            "final_text": self.parts.chat.decode(last_answer(self.outputs[-1]), special=False),
            "num_turns": sum(output.num_turns for output in self.outputs),
            "tool_calls": self.tools.counts.calls,
            "final_answer": self.tools.counts.final_answer,
            "tool_rewards": dict(self.tool_rewards),
        }

    def _numbers(self) -> dict[str, float]:
        model, tools = self.llm.counts, self.tools.counts
        return {
            "calls": model.calls,
            "calls_continued_over_update": model.continued_over_update,
            "calls_resumed": model.resumed,
            "llm_latency_s": model.latency_s,
            "tool_calls": tools.calls,
            "tool_errors": tools.errors,
            "tool_call_reward": tools.reward,
            **{f"tool/{key}": value for key, value in tools.metrics.items()},
        }

    def _totals(self) -> dict[str, float]:
        return {
            "num_turns": sum(output.num_turns for output in self.outputs),
            "response_tokens": sum(len(output.response_ids) for output in self.outputs),
            "segments": len(self.outputs),
            **continuity(self.outputs, self.parts.chat.decode, self.parts.chat.opening_tokens),
            "restarts": self.replayed.restarts,
            "token_mismatches": self.parts.mismatches.take(),
            "latency_s": time.monotonic() - self.trace.started,
        }

    def _notes(self) -> dict[str, Any]:
        return {
            "tool_results": self.tools.counts.texts,
            "agent": self.agent,
            "worker": self.parts.worker,
            "attempt": self.lease.attempt,
            "replayed_calls": self.replayed.sampled,
            "replayed_tool_turns": self.replayed.tools,
            **self.trace.plain(),
        }


def last_answer(output: AgentLoopOutput) -> list[int]:
    """Ids of the last model call's answer."""
    if output.num_turns == 0:
        return []
    start = int(output.turn_starts[-1])
    ids: list[int] = output.response_ids[start:][output.response_mask[start:] == 1].tolist()
    return ids
