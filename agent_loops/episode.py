"""One leased episode: from its lease to its completed trajectory.

lease ─► equip loop ─► setup, run (deadline) ─► teardown ─► tools' rewards ─► release ─► reward ─► teacher ─► complete
              ▲                │                                                            │          │
              └── restart ◄────┤ journal left                        infra failure ─────────┴──────────┴──► fail

Cancelled, or lease lost: teardown, then the tools' states are left to the next owner. `FinishedAttempt` checks a loop's
outputs against what was sampled, adds reward and metrics, and builds the trajectory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.agent_loops.base import AgentLoopBase, WorkerServices
from penstock.agent_loops.chat.calls import name_of
from penstock.agent_loops.chat.chat import new_budget
from penstock.agent_loops.errors import BadOutput, EpisodeRestart, InfraFailure, LoadError, TokenMismatch
from penstock.agent_loops.forks import Forks
from penstock.agent_loops.journal import EpisodeJournal
from penstock.agent_loops.llm import EpisodeLLM, usual_sampling
from penstock.agent_loops.merge import as_outputs, check_output, images_of, number_of, to_trajectory
from penstock.agent_loops.mismatch import continuity
from penstock.agent_loops.rescore import PROGRAM, TOOL_REWARD, reward_facts
from penstock.agent_loops.segment import TRUNCATED_DEADLINE, AgentLoopOutput
from penstock.agent_loops.sources import services_of
from penstock.agent_loops.tool_runner import ToolBox
from penstock.agent_loops.tracing import Trace, begin_trace, episode_spans, span, trajectory_facts
from penstock.common import USERS_FAULTS, describe_error
from penstock.common.errors import defined_at
from penstock.tools import call_users
from penstock.transfer_queue import BadPayload, Lease, Outcome, OutcomeKind, QueueError, Trajectory

NO_REWARD = (
    "no reward: agent.reward is not set, and the episode called no tool that has calc_reward. Give agent.reward a "
    "function, such as one that returns sum(extra_info['tool_rewards'].values()), or segment.output(reward=…) one"
)
MAX_RESTARTS = 2
log = logging.getLogger(__name__)


class Episode:
    """Runs one lease. Single use."""

    def __init__(self, services: WorkerServices, lease: Lease) -> None:
        self._services = services_of(services, lease.task.data_source)
        self._lease = lease
        self._journal = EpisodeJournal(services.queue, lease)
        self._trace = Trace()
        self.is_ending = False
        """True while the result is being sent: the queue may have it, and no lease any more, before its answer
        arrives.
        """

    async def run(self) -> Outcome:
        """The outcome reported to the queue. Raises `QueueError` (lease lost, queue gone) and `CancelledError`."""
        spans = episode_spans(self._lease, self._services.worker)
        self._trace = begin_trace(self._services.on_span, spans, self._lease.episode_id, self._services.on_use)
        if spans is None:
            return await self._run()
        cause = "stopped"
        try:
            outcome = await self._run()
            spans.outcome(outcome)
            cause = ""
            return outcome
        except QueueError as error:
            cause = f"{type(error).__name__}: {error}"
            raise
        finally:
            spans.end(cause)

    async def _run(self) -> Outcome:
        try:
            trajectory = await self._follow_or_restart()
            if trajectory.outcome.may_carry_reward:
                return await self._complete(trajectory)
            return await self._fail(trajectory.outcome)
        except InfraFailure as failure:
            self._services.mismatches.seen += isinstance(failure, TokenMismatch)
            of_loop = isinstance(failure, BadOutput | TokenMismatch) and failure.component in ("loop", "queue")
            reason = failure.reason + (defined_at(self._loop_class().run) if of_loop else "")
            return await self._fail(Outcome(OutcomeKind.INFRA_ERROR, reason, failure.component))
        except BadPayload as error:
            return await self._fail(Outcome(OutcomeKind.INFRA_ERROR, f"cannot be stored: {error}", "queue"))
        except QueueError:
            raise
        except USERS_FAULTS as error:
            # Without this report the episode waits until its lease expires, and its cause is lost.
            log.exception("episode %s failed outside of its guards", self._lease.episode_id)
            return await self._fail(Outcome(OutcomeKind.INFRA_ERROR, describe_error(error), "worker"))

    # endings -------------------------------------------------------------------------------------------------------
    async def _complete(self, trajectory: Trajectory) -> Outcome:
        if self._services.teachers is not None:
            trajectory = await self._services.teachers.annotate(self._lease.task, trajectory)
        self.is_ending = True
        lease = replace(self._lease, origin=self._journal.origin)  # a branch that restarted shares nothing
        try:
            await self._services.queue.complete(lease, trajectory)
        except BadPayload as error:
            raise BadOutput("queue", f"refused the trajectory: {error}") from error
        if self._trace.exported is not None:
            self._trace.exported.root.note(**trajectory_facts(trajectory))
        return trajectory.outcome

    async def _fail(self, outcome: Outcome) -> Outcome:
        self.is_ending = True
        again = await self._services.queue.fail(self._lease, outcome)
        log.warning(
            "episode %s: %s %s: %s (%s)",
            self._lease.episode_id,
            outcome.kind,
            outcome.component,
            outcome.reason,
            "will be retried" if again else "no retries left",
        )
        return outcome

    # attempts ------------------------------------------------------------------------------------------------------
    async def _follow_or_restart(self) -> Trajectory:
        for _ in range(MAX_RESTARTS):
            try:
                return await self._attempt()
            except EpisodeRestart as cause:
                log.warning("episode %s restarts: %s", self._lease.episode_id, cause)
                await self._journal.restart(str(cause))
        try:
            return await self._attempt()
        except EpisodeRestart as cause:
            raise InfraFailure("loop", f"restarted {MAX_RESTARTS} times, again: {cause}") from cause

    async def _attempt(self) -> Trajectory:
        """Loop and tools are closed before the reward is computed: a slow reward holds no sandbox."""
        loop = self._loop_class()()
        llm, tools = self._equip(loop)
        leave = False
        try:
            try:
                outputs = await self._outputs_within_deadline(loop, llm)
            finally:
                await self._teardown(loop)
            for failure in (llm.failure, tools.failure):
                # A loop may catch our failures to clean up, not to be rewarded despite them (invariant 5).
                if failure is not None:
                    raise failure
            await loop.forks.at_end()
            tool_rewards = await tools.rewards()
        except (asyncio.CancelledError, QueueError):
            leave = True
            raise
        except (InfraFailure, EpisodeRestart):
            leave = await self._is_lost()
            raise
        finally:
            await tools.release(leave=leave)
        return await FinishedAttempt(
            *(self._services, self._lease, outputs, llm, tools, tool_rewards, self._journal, self._trace),
            agent=type(loop).__name__,
        ).trajectory()

    async def _is_lost(self) -> bool:
        """Return True if another worker owns the episode and the sessions of its tools: this one must not end them."""
        try:
            return self._lease.episode_id in await self._services.queue.renew([self._lease])
        except QueueError:
            return True

    def _loop_class(self) -> type[AgentLoopBase]:
        name = self._lease.task.agent_name or self._services.config.loop
        try:
            return self._services.find_loop(name)
        except LoadError as error:
            raise InfraFailure("loop", str(error)) from error

    def _equip(self, loop: AgentLoopBase) -> tuple[EpisodeLLM, ToolBox]:
        services, lease = self._services, self._lease
        loop.chat = services.chat.for_episode(new_budget(services.config, services.max_model_len))
        sampling = usual_sampling(services.config, services.chat.stop_token_ids, lease)
        is_train = lease.task.split == "train"
        with_routes = services.routing_replay and is_train
        loop.llm = EpisodeLLM(
            services.client, lease, self._journal, sampling, services.chat.decode, with_routes=with_routes
        )
        loop.tools = ToolBox(
            services.tools,
            services.tool_configs,
            lease.task,
            self._journal,
            services.on_lost,
            services.chat.count_tokens,
        )
        loop.sandbox, loop.config = services.sandbox, services.config.settings
        loop.forks = Forks(services.config.forks if loop.can_fork and is_train else None, lease, self._journal)
        loop.equip(services, lease, self._journal)
        return loop.llm, loop.tools

    async def _outputs_within_deadline(self, loop: AgentLoopBase, llm: EpisodeLLM) -> list[AgentLoopOutput]:
        deadline_s = self._services.config.episode_deadline_s
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                await call_users(loop.setup, self._lease.task)
                outputs = as_outputs(await loop.run(self._lease.task))
                self._journal.check_followed()
                return outputs
        except (InfraFailure, EpisodeRestart, QueueError):
            raise
        except USERS_FAULTS as error:
            if not deadline.expired():
                raise InfraFailure("loop", describe_error(error)) from error
        if not llm.segments:
            raise InfraFailure("rollout", f"nothing was sampled within {deadline_s:g} s")
        return [segment.output(outcome=TRUNCATED_DEADLINE) for segment in llm.segments]

    async def _teardown(self, loop: AgentLoopBase) -> None:
        try:
            async with asyncio.timeout(10.0):
                await call_users(loop.teardown)
        except USERS_FAULTS:
            log.exception("teardown of episode %s failed", self._lease.episode_id)


@dataclass(frozen=True, slots=True)
class FinishedAttempt:
    """A finished attempt, loop and tools closed: checks, rewards and measures its outputs."""

    services: WorkerServices
    lease: Lease
    outputs: Sequence[AgentLoopOutput]
    llm: EpisodeLLM
    tools: ToolBox
    tool_rewards: Mapping[str, float]
    journal: EpisodeJournal
    trace: Trace
    agent: str
    """Name of the loop's class."""

    async def trajectory(self) -> Trajectory:
        """Raises `TokenMismatch` for edited outputs, `InfraFailure` if a reward is missing, `QueueError`."""
        for output in self.outputs:
            check_output(output, self.llm.seen)
        metrics = {**self._numbers(), **{f"{TOOL_REWARD}{name}": value for name, value in self.tool_rewards.items()}}
        reward = None
        if self.outputs[-1].outcome.may_carry_reward:
            reward, further = await self._reward()
            metrics |= further
        images = await images_of(self.lease, self.outputs)
        return to_trajectory(self.lease, self.outputs, reward, metrics | self._totals(), self._notes(), images=images)

    async def _reward(self) -> tuple[float, Mapping[str, float]]:
        """The loop's own reward, else the run's reward function, else the sum of the tools'."""
        rewards = [output.reward for output in self.outputs if output.reward is not None]
        if rewards:
            return number_of(rewards[-1], "reward"), {}
        if self.services.reward is None:
            if not self.tool_rewards:
                raise InfraFailure("reward", NO_REWARD)
            return sum(self.tool_rewards.values()), {}
        texts = [self.services.chat.decode(one.response_ids.tolist(), special=False) for one in self.outputs]
        with span("reward") as reward_span:
            score = await self.services.reward.score_once(
                self.lease.task, texts[-1], self._for_reward(texts), self.outputs, self.journal
            )
            reward_span.note(reward=score.reward)
        return score.reward, score.metrics

    def _for_reward(self, texts: Sequence[str]) -> Mapping[str, Any]:
        """Added to the row's `extra_info`. `texts`: of each segment's response."""
        return reward_facts(
            self.outputs,
            texts,
            self.services.chat,
            tool_calls=self.tools.counts.calls,
            final_answer=self.tools.counts.final_answer,
            tool_rewards=dict(self.tool_rewards),
            **{name: value for name, value in self.outputs[-1].extra.items() if name == PROGRAM},
        )

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
            **continuity(self.outputs, self.services.chat.decode, self.services.chat.opening_tokens),
            "restarts": self.journal.replayed.restarts,
            "token_mismatches": self.services.mismatches.take(),
            "latency_s": time.monotonic() - self.trace.started,
        }

    def _notes(self) -> dict[str, Any]:
        return {
            "tool_results": self.tools.counts.texts,
            "fault": self.tools.counts.fault,
            **({} if (final := self.tools.counts.final_answer) is None else {"final_answer": final}),
            "tool_error_texts": self.tools.counts.error_texts,
            "agent": self.agent,
            "parser": name_of(self.services.chat.parser),
            "worker": self.services.worker,
            "attempt": self.lease.attempt,
            **({} if (origin := self.journal.origin) is None else {"origin": asdict(origin)}),
            "replayed_calls": self.journal.replayed.sampled,
            "replayed_tool_turns": self.journal.replayed.tools,
            **self.trace.plain(),
        }
