"""Loops whose agent asks by an API of others: the session records it, and its segments are the episode's.

    agent ──API──► GatewaySession, on the episode's own lease, journal and budget ──► segments

The rules are those of recorded episodes (docs/guide/agent.md). On a resumed episode the agent runs from its
start, and its requests are answered from the journal, each answer once and in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from penstock.agent_loops import (
    AgentLoopBase,
    AgentLoopOutput,
    EpisodeJournal,
    EpisodeRestart,
    InfraFailure,
    WorkerServices,
)
from penstock.gateway.context import MAX_TOKENIZING, GatewayContext, detokenizer
from penstock.gateway.errors import GatewayError
from penstock.gateway.finish import last_turn, tool_calls_of
from penstock.gateway.journal import ANSWER, NOTED
from penstock.gateway.session import GatewaySession
from penstock.transfer_queue import Lease, Outcome

MODEL = "policy"
"""Name of the model for agents inside a worker, besides `agent.capture.model_aliases`."""
_TOKENIZING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""`GatewayContext.tokenizing` of all episodes of one event loop, which is one worker."""


class RecordedLoop(AgentLoopBase):
    """Base of loops that record an agent's requests. `recorded` is set before `setup`."""

    can_fork: ClassVar[bool] = False
    session_kind: ClassVar[type[GatewaySession]] = GatewaySession
    recorded: GatewaySession

    def equip(self, services: WorkerServices, lease: Lease, journal: EpisodeJournal) -> None:
        """The session counts calls, ids and budget; the rest of the episode reads them there."""
        super().equip(services, lease, journal)
        entries = journal.hand_over((ANSWER, NOTED))
        lease = replace(lease, journal=entries)
        context = GatewayContext(
            worker=services.worker,
            config=services.config,
            queue=services.queue,
            client=services.client,
            chat=services.chat,
            detokenizer=detokenizer(services.chat),
            model=MODEL,
            reward=services.reward,
            teachers=services.teachers,
            routing_replay=services.routing_replay,
            mismatches=services.mismatches,
            tokenizing=_TOKENIZING.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_TOKENIZING)),
        )
        self.recorded = self.session_kind(context, lease, "", own_journal=journal)
        self.llm, self.chat = self.recorded.llm, self.recorded.history.chat
        self.llm.segments = self.recorded.history.segments

    async def close_recording(self) -> None:
        """Cancels answers that the agent left in progress, before segments are read."""
        self.recorded.end("the agent has returned")
        await self.recorded.in_flight.ended()

    def check_replayed(self) -> None:
        """Raises `EpisodeRestart` if the agent's second run sent other requests than its first."""
        if self.recorded.replay.left:
            raise EpisodeRestart(f"the agent did not ask again for {self.recorded.replay.left} recorded answers")

    def recorded_outputs(
        self,
        outcome: Outcome,
        *,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[AgentLoopOutput]:
        """All segments; that of the last answer comes last: its end is the episode's. At least one was sampled."""
        last = last_turn(self.recorded)
        assert last is not None
        self.tools.counts.calls += tool_calls_of(self.recorded)
        others = [segment for segment in self.recorded.history.segments if segment is not last.segment]
        outputs = [segment.output(outcome=outcome) for segment in others]
        return [*outputs, last.segment.output(outcome=outcome, reward=reward, metrics=metrics, extra=extra)]


def infra_failure_of(error: GatewayError, episode: GatewaySession) -> InfraFailure:
    """Return the failure that an agent received as `error`. Messages of infrastructure failures are "component:
    reason".
    """
    if episode.broken is not None:
        return InfraFailure(episode.broken.component, episode.broken.reason)
    component, _, reason = str(error).removeprefix("the ").partition(": ")
    return InfraFailure(component, reason) if reason else InfraFailure("rollout", str(error))
