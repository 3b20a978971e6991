"""Try a loop in a second: the real episode code on a tokenizer and a queue in memory, with a model that you play.

trajectory = await try_loop("my_agent.py:MyAgent", task, model=FOLDER, says=["first answer", "second answer"])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.agent_loops.chat import ChatTokens
from penstock.agent_loops.client import FakeClient
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.episode import Episode
from penstock.agent_loops.errors import InfraFailure
from penstock.agent_loops.job import WorkerJob, build_parts
from penstock.sandbox import Sandbox, SandboxConfig, make_sandbox
from penstock.tools import ToolConfig
from penstock.transfer_queue import DataCursor, Limits, MemoryTransferQueue, Task, Trajectory

Says = Sequence[str] | Callable[[str], str]
"""The model's answers in order, the last one over and over; or a function of the context's text."""


async def try_loop(
    loop: str,
    task: Task,
    *,
    model: str,
    says: Says,
    tools: Sequence[ToolConfig] = (),
    recipe_dir: Path = Path(),
    sandbox: SandboxConfig | None = None,
    **agent: Any,
) -> Trajectory:
    """One episode of `loop`, as a worker runs it. `agent`: fields of `AgentConfig`; without `reward`, the loop's own.

    `model` is the folder or hub name of a tokenizer; no weights are loaded. `task.split` is an evaluation's. `sandbox`:
    for tools that need one. Raises `AgentError` and `SandboxError` as a worker does at its start, and `InfraFailure`
    where the episode fails.
    """
    made = make_sandbox(sandbox, "trial") if sandbox is not None else None
    try:
        return await _try(loop, task, model, says, list(tools), recipe_dir, made, agent)
    finally:
        if made is not None:
            await made.close()


async def _try(  # noqa: PLR0917 - called in one place
    loop: str,
    task: Task,
    model: str,
    says: Says,
    tools: list[ToolConfig],
    recipe_dir: Path,
    sandbox: Sandbox | None,
    agent: dict[str, Any],
) -> Trajectory:
    queue = MemoryTransferQueue()
    await queue.create_run(Limits(group_size=1, groups_per_step=1, max_staleness=0, max_attempts=1), "trial: true")
    client = FakeClient(lambda context: [])
    job = WorkerJob("trial", AgentConfig(loop=loop, **agent), queue, client, model, tools, recipe_dir=recipe_dir)
    parts = build_parts(job, sandbox)
    client.reply = _player(parts.chat, says)
    await queue.submit([task], cursor=DataCursor(0, 1))
    (lease,) = await queue.lease_episodes("trial", 1, 0)
    outcome = await Episode(parts, lease).run()
    if not outcome.may_carry_reward:
        raise InfraFailure(outcome.component or str(outcome.kind), outcome.reason)
    (trajectory,) = await queue.read([lease.episode_id])
    return trajectory


def _player(chat: ChatTokens, says: Says) -> Callable[[list[int]], list[int]]:
    answered = 0

    def reply(context: list[int]) -> list[int]:
        nonlocal answered
        text = says(chat.decode(context)) if callable(says) else says[min(answered, len(says) - 1)]
        answered += 1
        return [*chat.encode(text), chat.turn_end_id]

    return reply
