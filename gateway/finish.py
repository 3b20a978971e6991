"""Finishes a recorded episode: its turns become a trajectory, verified against what the engine was fed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.agent_loops import (
    TRUNCATED_LENGTH,
    AgentLoopOutput,
    InfraFailure,
    TokenMismatch,
    check_output,
    continuity,
    to_trajectory,
)
from penstock.agent_loops.chat import name_of
from penstock.common import USERS_FAULTS, describe_error
from penstock.gateway.errors import Conflict, GatewayError, Gone, NotNow
from penstock.gateway.journal import request_of
from penstock.gateway.prefix_tree import Turn
from penstock.gateway.session import GatewaySession
from penstock.gateway.wire.wires import WIRES
from penstock.transfer_queue import (
    COMPLETED,
    BadPayload,
    LeaseLost,
    Outcome,
    OutcomeKind,
    QueueError,
    Trajectory,
)

RECORDED = "recorded_as"
"""Key in a trajectory's `extra`: the handle under which it was recorded."""


@dataclass(frozen=True, slots=True)
class FinishResult:
    """Body of /finish, the same for repeated calls."""

    episode_id: str
    outcome: str
    reason: str
    reward: float | None
    segments: int
    turns: int
    tried_again: bool = False
    """True if the episode failed and the queue leases it again."""


async def finish(episode: GatewaySession, requested: Outcome | None) -> FinishResult:
    """Completes or fails the episode in the queue; cancels answers in progress.

    Args:
        requested: the outcome; None: by the last answer.

    Raises:
        Conflict, NotNow: the episode stays open.
        Gone: the lease is lost.
    """
    episode.check_open()
    episode.end("the episode is being finished")
    await episode.in_flight.ended()
    try:
        await episode.refresh()
        outcome = outcome_of(episode, requested)
        return await (_complete(episode, outcome) if outcome.may_carry_reward else fail(episode, outcome))
    except (Conflict, NotNow):
        episode.reopen()
        raise


async def _complete(episode: GatewaySession, outcome: Outcome) -> FinishResult:
    if not episode.history.turns:
        raise Conflict("nothing was sampled yet; finish with outcome infra_error or cancelled to give the task back")
    try:
        outputs = [segment.output(outcome=outcome) for segment in episode.history.segments]
        for output in outputs:
            check_output(output, episode.llm.seen)
        reward, further = await _reward(episode, outputs)
        numbers = {**_numbers(episode, outputs), **further}
        trajectory = to_trajectory(episode.lease, outputs, reward, numbers, _notes(episode))
        trajectory = replace(trajectory, turn_rewards=_turn_rewards(episode))
        if episode.context.teachers is not None:
            trajectory = await episode.context.teachers.annotate(episode.lease.task, trajectory)
        await episode.context.queue.complete(episode.lease, trajectory)
    except BadPayload as error:
        return await fail(episode, Outcome(OutcomeKind.INFRA_ERROR, f"refused the trajectory: {error}", "queue"))
    except InfraFailure as error:
        episode.context.mismatches.seen += isinstance(error, TokenMismatch)
        return await fail(episode, Outcome(OutcomeKind.INFRA_ERROR, error.reason, error.component))
    except QueueError as error:
        raise _client_error(episode, error) from error
    except GatewayError:
        raise
    except USERS_FAULTS as error:
        return await fail(episode, Outcome(OutcomeKind.INFRA_ERROR, describe_error(error), "worker"))
    episode.end(f"the episode is finished: {outcome.kind}")
    return ending_of(trajectory)


async def fail(episode: GatewaySession, outcome: Outcome) -> FinishResult:
    """Fails the episode; the queue decides whether it is tried again. Raises `Gone`, `NotNow`."""
    try:
        again = await episode.context.queue.fail(episode.lease, outcome)
    except QueueError as error:
        raise _client_error(episode, error) from error
    episode.end(f"the episode has failed: {outcome.component}: {outcome.reason}")
    turns, segments = len(episode.history.turns), len(episode.history.segments)
    return FinishResult(episode.lease.episode_id, str(outcome.kind), outcome.reason, None, segments, turns, again)


async def finished_earlier(episode_id: str, handle: str, queue: Any) -> FinishResult | None:
    """The result of an episode that was completed under this handle and is not trained yet."""
    try:
        (trajectory,) = await queue.read([episode_id])
    except (BadPayload, LeaseLost):
        return None
    return ending_of(trajectory) if trajectory.extra.get(RECORDED) == handle else None


def ending_of(trajectory: Trajectory) -> FinishResult:
    outcome = trajectory.outcome
    return FinishResult(
        trajectory.episode_id,
        str(outcome.kind),
        outcome.reason,
        trajectory.reward,
        len(trajectory.segments),
        trajectory.num_turns,
    )


def _client_error(episode: GatewaySession, error: QueueError) -> Exception:
    if isinstance(error, LeaseLost):
        episode.end(f"the lease is lost: {error}")
        return Gone(str(episode.gone))
    return NotNow(f"the queue: {error}")


def outcome_of(episode: GatewaySession, requested: Outcome | None) -> Outcome:
    """The client's outcome, except that an episode out of turns or tokens is truncated; None: by the last answer."""
    if requested is not None and requested.kind is not OutcomeKind.COMPLETED:
        return requested
    if reason := episode.facts.get("truncated"):
        return Outcome(OutcomeKind.TRUNCATED, reason)
    last = last_turn(episode)
    if requested is not None or last is None or last.choice.finish_reason != "length":
        return COMPLETED
    # An answer as long as its client's `max_tokens` is whole; otherwise a limit of the run ended it.
    own = request_of(last).sampling.get("max_new_tokens")
    return TRUNCATED_LENGTH if own is None or len(last.choice.token_ids) < own else COMPLETED


def last_turn(episode: GatewaySession) -> Turn | None:
    return next(reversed(episode.history.turns.values()), None)


# the trajectory ----------------------------------------------------------------------------------------------------
def _turn_rewards(episode: GatewaySession) -> tuple[float, ...]:
    """Rewards in the order of the segments' turns; clients post them in the order of answers."""
    posted, turns = episode.facts.get("turn_rewards") or (), list(episode.history.turns.values())
    if posted and len(posted) != len(turns):
        raise Conflict(f"{len(posted)} turn_rewards for {len(turns)} turns; POST /reward with one for each, in order")
    pairs = list(zip(turns, posted, strict=False))
    return tuple(value for segment in episode.history.segments for turn, value in pairs if turn.segment is segment)


async def _reward(episode: GatewaySession, outputs: Sequence[AgentLoopOutput]) -> tuple[float, Mapping[str, float]]:
    """The client's reward; otherwise the reward function's, on the segment of the last answer."""
    posted = episode.facts.get("reward")
    if posted is not None:
        return float(posted), {}
    if episode.context.reward is None:
        raise Conflict(
            f"no reward: POST /episodes/{episode.handle}/reward before /finish, or name a function in agent.reward"
        )
    last = last_turn(episode)
    assert last is not None
    decode, task = episode.context.chat.decode, episode.lease.task
    texts = [decode(one.response_ids.tolist(), special=False) for one in outputs]
    further = {
        "segments": texts,
        "final_text": decode(last.choice.token_ids, special=False),
        "num_turns": len(episode.history.turns),
        "tool_calls": tool_calls_of(episode),
    }
    solution = texts[episode.history.segments.index(last.segment)]
    score = await episode.context.reward.score_once(task, solution, further, outputs, episode.record)
    return score.reward, score.metrics


def tool_calls_of(episode: GatewaySession) -> int:
    return sum(len(turn.choice.calls) for turn in episode.history.turns.values())


def _numbers(episode: GatewaySession, outputs: Sequence[AgentLoopOutput]) -> dict[str, float]:
    counts = episode.llm.counts
    return {
        "calls": counts.calls,
        "calls_continued_over_update": counts.continued_over_update,
        "calls_resumed": counts.resumed,
        "calls_wasted": episode.wasted_calls,
        "llm_latency_s": counts.latency_s,
        "tool_calls": tool_calls_of(episode),
        "num_turns": sum(output.num_turns for output in outputs),
        "response_tokens": sum(len(output.response_ids) for output in outputs),
        "segments": len(outputs),
        **continuity(outputs, episode.context.chat.decode, episode.context.chat.opening_tokens),
        "token_mismatches": episode.context.mismatches.take(),
        "latency_s": time.monotonic() - episode.opened_at,
    }


def _notes(episode: GatewaySession) -> dict[str, Any]:
    last = last_turn(episode)
    return {
        "agent": WIRES[request_of(last).api if last is not None else "chat"].client,
        "parser": name_of(episode.context.chat.parser),
        "worker": episode.context.worker,
        "attempt": episode.lease.attempt,
        RECORDED: episode.handle,
    }
