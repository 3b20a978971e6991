"""Archived trajectories with rewards computed again, by another function or with other settings.

    trajectory ──► texts of its ids, facts of its metrics ─┐
    row of its task ───────────────────────────────────────┴─► reward function ──► the same trajectory, another reward

The function gets what a worker gave it when the episode ended. Ids, logprobs, versions and turn rewards stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.agent_loops.chat.chat import ChatTokens
from penstock.agent_loops.errors import InfraFailure, LoadError
from penstock.agent_loops.rewards.registry import RewardFunction
from penstock.agent_loops.segment import last_answer
from penstock.common import Backoff, gather_or_cancel
from penstock.transfer_queue import Segment, Task, Trajectory

PROGRAM = "program"
"""Key in an output's extra that the reward sees too: how the program of a loop `command` ended, and what it left."""
TOOL_REWARD = "tool_reward/"
"""A tool's reward is the metric of this prefix and the tool's name."""
ATTEMPTS, RETRY = 3, Backoff(0.5, 5.0)
"""A reward that fails so often for an episode ends the scoring."""


def reward_facts(segments: Sequence[Segment], texts: Sequence[str], chat: ChatTokens, **facts: Any) -> dict[str, Any]:
    """Return what is added to the row's `extra_info`. `texts`: of each segment's response; `facts`: what ids do not
    say (`tool_calls`, `final_answer`, `tool_rewards`)."""
    return {
        "segments": list(texts),
        "final_text": chat.decode(last_answer(segments[-1]), special=False),
        "num_turns": sum(segment.num_turns for segment in segments),
        **facts,
    }


async def rescored(
    trajectories: Sequence[Trajectory],
    tasks: Mapping[str, Task],
    reward: RewardFunction,
    chat: ChatTokens,
    concurrency: int,
) -> list[Trajectory]:
    """Return the trajectories with the rewards that `reward` gives them, in their order. `tasks`: by their ids;
    `concurrency`: episodes that are scored at once.

    Raises `LoadError` where a task's row is not the one that was played, `InfraFailure` naming the episode whose reward
    fails again and again.
    """
    room = asyncio.Semaphore(concurrency)

    async def score(trajectory: Trajectory) -> Trajectory:
        async with room:
            return await _with_reward(trajectory, tasks[trajectory.task_id], reward, chat)

    for trajectory in trajectories:
        _check_row(trajectory, tasks[trajectory.task_id], chat)
    return await gather_or_cancel([score(trajectory) for trajectory in trajectories])


def _check_row(trajectory: Trajectory, task: Task, chat: ChatTokens) -> None:
    text = " ".join(_plain(task.messages[-1].get("content")).split()) if task.messages else ""
    question = chat.decode(chat.tokenizer.encode(text, add_special_tokens=False), special=False)
    prompts = (chat.decode(one.prompt_ids.tolist(), special=False) for one in trajectory.segments)
    played = task.data_source == trajectory.data_source
    if not played or not any(" ".join(question.split()) in " ".join(prompt.split()) for prompt in prompts):
        raise LoadError(
            f"{trajectory.task_id}: its prompt lacks the text of its row, now {question[:60]!r} of {task.data_source}: "
            "the data have changed since it was played, or its loop writes prompts of its own; restore the file of "
            "data.train"
        )


def _plain(content: Any) -> str:
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    return " ".join(str(part.get("text") or "") for part in parts)


async def _with_reward(trajectory: Trajectory, task: Task, reward: RewardFunction, chat: ChatTokens) -> Trajectory:
    texts = [chat.decode(one.response_ids.tolist(), special=False) for one in trajectory.segments]
    measured, further = trajectory.metrics, trajectory.extra
    facts = reward_facts(
        trajectory.segments,
        texts,
        chat,
        tool_calls=int(measured.get("tool_calls", 0)),
        final_answer=further.get("final_answer"),
        tool_rewards={k.removeprefix(TOOL_REWARD): v for k, v in measured.items() if k.startswith(TOOL_REWARD)},
        **{name: value for name, value in further.items() if name == PROGRAM},
    )
    pauses = RETRY.pauses()
    for attempt in range(ATTEMPTS):
        try:
            score = await reward.score(task, texts[-1], facts)
            break
        except InfraFailure as error:
            if attempt == ATTEMPTS - 1:
                raise InfraFailure(error.component, f"{trajectory.episode_id}: {error.reason}") from error
            await pauses.sleep()
    others = {name: value for name, value in measured.items() if not name.startswith("reward/")}
    return replace(trajectory, reward=score.reward, metrics={**others, **score.metrics})
