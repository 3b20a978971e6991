"""Environments and loops without a model.

check_env   a scripted policy runs a recipe's tasks in a real agent worker (`penstock rehearse`)
try_loop    one episode of a loop with given answers, on a tokenizer and a queue in memory

    policy(state) ──text──► ScriptedClient ──ids──► worker: loop, tools, sandbox, reward ──► trajectories

Everything but the model is what a run would use: chat template, parser, tools, sandboxes, servers, reward. A correct
policy must earn the full reward on every task, and one that does nothing must earn none.

    trajectory = await try_loop("my_agent.py:MyAgent", task, model=FOLDER, says=["first answer", "second answer"])
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.agent_loops.chat.chat import ChatTokens, chat_of
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.episode import Episode
from penstock.agent_loops.errors import InfraFailure, WorkerStopped
from penstock.agent_loops.worker import WorkerJob, build_services, run_worker
from penstock.rollout_server import Chunk, GenerateRequest, Generation
from penstock.sandbox import Sandbox, SandboxConfig, make_sandbox
from penstock.testing.fake_client import FakeClient
from penstock.testing.memory_queue import MemoryTransferQueue
from penstock.tools import ToolConfig
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import DataCursor, DeadLetter, Limits, RunContext, Task, Trajectory

SPLIT = "rehearsal"
LEASE_TTL_S = 60.0
POLL_S = 0.05
_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
Says = Sequence[str] | Callable[[str], str]
"""The model's answers in order, the last one repeated; or a function of the context's text."""


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """The input of a policy: one episode before a model call."""

    task: Task
    observed: Sequence[str]
    """The text fed after each of the model's answers, as rendered by the chat template.

    Where a new segment begins, its whole prompt.
    """
    chat: ChatTokens

    @property
    def turn(self) -> int:
        """Number of answers so far."""
        return len(self.observed)

    @property
    def results(self) -> list[str]:
        """Texts of tool results, oldest first; without ``<tool_response>`` in the template, everything fed."""
        return [text for fed in self.observed for text in (_RESULT.findall(fed) or [fed])]

    def call(self, name: str, **arguments: object) -> str:
        """A tool call as rendered by the model's template. Raises `ValueError` if the template has no tool calls."""
        text = self.chat.template.reply_with_call((), ToolCall(name, arguments))
        if text is None:
            raise ValueError("this chat template renders no tool calls: the policy must write them")
        return text.partition(self.chat.decode([self.chat.turn_end_id]))[0]


Policy = Callable[[EpisodeState], str]
"""Returns the model's next answer."""


class ScriptedClient:
    """A `GenerateClient` that answers with a policy. `tasks` by task id."""

    def __init__(self, chat: ChatTokens, tasks: Mapping[str, Task], policy: Policy) -> None:
        self._chat = chat
        self._tasks = tasks
        self._policy = policy
        self._heard: dict[str, tuple[list[int], list[str]]] = {}
        """Episode → its context with the last answer, texts fed after each answer."""

    async def generate(self, request: GenerateRequest) -> Generation:
        return await self._speaker(request).generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        async for chunk in self._speaker(request).stream(request):
            yield chunk

    async def best_version(self) -> int | None:
        return 0

    def _speaker(self, request: GenerateRequest) -> FakeClient:
        return FakeClient(lambda _: self._say(request))

    def _say(self, request: GenerateRequest) -> list[int]:
        context = list(request.token_ids)
        known, observed = self._heard.get(request.episode_id, ([], []))
        if known:
            new = context[len(known) :] if context[: len(known)] == known else context
            observed = [*observed, self._chat.decode(new)]
        task = self._tasks[request.episode_id.rpartition("#")[0]]
        ids = [*self._chat.encode(self._policy(EpisodeState(task, observed, self._chat))), self._chat.turn_end_id]
        self._heard[request.episode_id] = ([*context, *ids], observed)
        return ids


@dataclass(frozen=True, slots=True)
class EnvCheck:
    """The result: each task is in one of the two lists."""

    trajectories: Sequence[Trajectory]
    """In the order of the tasks."""
    failures: Sequence[DeadLetter]
    """Episodes that the infrastructure failed, with the cause."""

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward or 0.0 for trajectory in self.trajectories]


async def check_env(
    tasks: Sequence[Task],
    policy: Policy,
    *,
    model: str,
    config: AgentConfig,
    tools: Sequence[ToolConfig] = (),
    sandbox: SandboxConfig | None = None,
    sandbox_token: str | None = None,
    recipe_dir: Path = Path(),
    on_ended: Callable[[int], None] = lambda _: None,
    slack_s: float = 60.0,
) -> EnvCheck:
    """Runs every task once with `policy`, `config.concurrency` at a time.

    `model` is a tokenizer's folder or hub name; `on_ended` is called with the number of ended episodes.
    The check stops without progress for the deadlines of an episode and a reward and `slack_s`.
    Raises `AgentError` and `SandboxError` as a worker does at its start,
    `WorkerStopped` if the infrastructure fails repeatedly, or no episode ends.
    """
    staged = [replace(task, split=SPLIT, task_id=f"{SPLIT}/{number:08d}") for number, task in enumerate(tasks)]
    queue = MemoryTransferQueue()
    await queue.create_run(
        Limits(group_size=1, groups_per_step=1, max_staleness=0, max_attempts=1, lease_ttl_s=LEASE_TTL_S), "{}"
    )
    await queue.submit(staged)
    player = ScriptedClient(chat_of(model, config), {task.task_id: task for task in staged}, policy)
    job = WorkerJob(
        name="rehearsal",
        run=RunContext(queue, model, sandbox_token or "", recipe_dir=recipe_dir, lease_ttl_s=LEASE_TTL_S),
        config=config,
        client=player,
        tools=list(tools),
        sandbox=sandbox or SandboxConfig(),
    )
    patience_s = config.episode_deadline_s + config.rewards.timeout_s + slack_s
    await _play(job, queue, len(staged), patience_s, on_ended)
    trajectories, _ = await queue.results(SPLIT)
    return EnvCheck(sorted(trajectories, key=lambda one: one.task_id), await queue.dead_letters(max(1, len(staged))))


async def _play(
    job: WorkerJob, queue: MemoryTransferQueue, count: int, patience_s: float, on_ended: Callable[[int], None]
) -> None:
    worker = asyncio.create_task(run_worker(job), name="rehearsal")
    try:
        ended, since = 0, time.monotonic()
        while ended < count:
            await asyncio.wait({worker}, timeout=POLL_S)
            if worker.done():
                worker.result()  # a worker runs until it is cancelled: it can only have failed
            split = (await queue.status()).other_splits[SPLIT]
            if split["done"] > ended:
                ended, since = split["done"], time.monotonic()
                on_ended(ended)
            elif time.monotonic() - since > patience_s:
                raise WorkerStopped(f"{ended} of {count} episodes ended, and none for {patience_s:.0f} s: {split}")
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


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
    if the episode fails.
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
    run = RunContext(queue, model, recipe_dir=recipe_dir)
    job = WorkerJob("trial", run, AgentConfig(loop=loop, **agent), client, tools)
    services = build_services(job, sandbox)
    client.reply = _player(services.chat, says)
    await queue.submit([task], cursor=DataCursor(0, 1))
    (lease,) = await queue.lease_episodes("trial", 1, 0)
    try:
        outcome = await Episode(services, lease).run()
    finally:
        await services.shared.close()
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
