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
import itertools
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.agent_loops import (
    AgentConfig,
    ChatTokens,
    Episode,
    InfraFailure,
    WorkerJob,
    WorkerStopped,
    build_services,
    run_worker,
    search_folders,
)
from penstock.agent_loops.chat import chat_of
from penstock.common import USERS_FAULTS, describe_error
from penstock.rollout_server import Chunk, GenerateRequest, Generation
from penstock.sandbox import SandboxConfig, make_sandbox
from penstock.testing.fake_client import FakeClient
from penstock.testing.memory_queue import MemoryTransferQueue
from penstock.tools import ToolConfig
from penstock.tools.parsers import ToolCall
from penstock.transfer_queue import DataCursor, DeadLetter, Limits, RunContext, Task, Trajectory

SPLIT = "rehearsal"
Says = Sequence[str] | Callable[[str], str]
"""The model's answers in order, the last one repeated; or a function of the context's text."""


@dataclass(frozen=True, slots=True)
class EpisodeState:
    """The input of a policy: one episode before a model call."""

    task: Task
    prompt: str
    """The first prompt of the episode, as rendered by the chat template; has an environment's first observation."""
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
        marked = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
        return [text for fed in self.observed for text in (marked.findall(fed) or [fed])]

    def call(self, name: str, /, **arguments: object) -> str:
        """A tool call as rendered by the model's template. Raises `ValueError` if the template has no tool calls."""
        text = self.chat.template.reply_with_call((), ToolCall(name, arguments))
        if text is None:
            raise ValueError("this chat template renders no tool calls: the policy must write them")
        return text.partition(self.chat.decode([self.chat.turn_end_id]))[0]


Policy = Callable[[EpisodeState], str]
"""Returns the model's next answer."""


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """An answer of the policy of which the episode got only the first `limit` tokens."""

    task_id: str
    tokens: int
    limit: int
    """`agent.max_new_tokens`, or what was left of `agent.max_response_tokens`."""


class ScriptedClient:
    """A `GenerateClient` that answers with a policy. `tasks` by task id."""

    def __init__(self, chat: ChatTokens, tasks: Mapping[str, Task], policy: Policy) -> None:
        self._chat = chat
        self._tasks = tasks
        self._policy = policy
        self._heard: dict[str, tuple[list[int], list[str]]] = {}
        """Episode → its context with the last answer; its first prompt and the texts fed after each answer."""
        self.cut: list[CutAnswer] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        return await FakeClient(lambda _: self._say(request)).generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        async for chunk in FakeClient(lambda _: self._say(request)).stream(request):
            yield chunk

    async def best_version(self) -> int | None:
        return 0

    def _say(self, request: GenerateRequest) -> list[int]:
        context = list(request.token_ids)
        known, texts = self._heard.get(request.episode_id, ([], []))
        new = context[len(known) :] if context[: len(known)] == known else context
        prompt, *observed = texts = [*texts, self._chat.decode(new)]
        task = self._tasks[request.episode_id.rpartition("#")[0]]
        try:
            answer = self._policy(EpisodeState(task, prompt, observed, self._chat))
        except USERS_FAULTS as error:
            raise InfraFailure("policy", describe_error(error)) from error
        if not isinstance(answer, str):
            raise InfraFailure("policy", f"returned {answer!r:.80}, not a text")
        ids = [*self._chat.encode(answer), self._chat.turn_end_id]
        limit = request.sampling.max_new_tokens
        if len(ids) > limit:
            self.cut.append(CutAnswer(task.task_id, len(ids), limit))
        self._heard[request.episode_id] = ([*context, *ids], texts)
        return ids


@dataclass(frozen=True, slots=True)
class EnvCheck:
    """The result: each task is in one of the two lists."""

    trajectories: Sequence[Trajectory]
    """Trajectories in the order of the tasks."""
    failures: Sequence[DeadLetter]
    """Episodes that the infrastructure failed, with the cause."""
    cut: Sequence[CutAnswer] = ()

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
        Limits(group_size=1, groups_per_step=1, max_staleness=0, max_attempts=1, lease_ttl_s=60.0), "{}"
    )
    await queue.submit(staged)
    player = ScriptedClient(chat_of(model, config), {task.task_id: task for task in staged}, policy)
    job = WorkerJob(
        name="rehearsal",
        run=RunContext(queue, model, sandbox_token or "", recipe_dir=recipe_dir, lease_ttl_s=60.0),
        config=config,
        client=player,
        tools=list(tools),
        sandbox=sandbox or SandboxConfig(),
    )
    patience_s = config.episode_deadline_s + config.rewards.timeout_s + slack_s
    await _play(job, queue, len(staged), patience_s, on_ended)
    trajectories, _ = await queue.results(SPLIT)
    failures = await queue.dead_letters(max(1, len(staged)))
    return EnvCheck(sorted(trajectories, key=lambda one: one.task_id), failures, player.cut)


async def _play(
    job: WorkerJob, queue: MemoryTransferQueue, count: int, patience_s: float, on_ended: Callable[[int], None]
) -> None:
    worker = asyncio.create_task(run_worker(job), name="rehearsal")
    try:
        ended, since = 0, time.monotonic()
        while ended < count:
            await asyncio.wait({worker}, timeout=0.05)
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
    """Runs one episode of `loop` as a worker does.

    Args:
        task: its split is an evaluation's, any name but ``train``.
        model: folder or hub name of a tokenizer; no weights are loaded.
        says: the model's answers.
        recipe_dir: where files that `loop`, `tools` and `reward` name are looked for.
        sandbox: for tools that need one.
        agent: fields of `AgentConfig`; without `reward`, the loop's own reward counts.

    Raises:
        AgentError, SandboxError: as a worker does at its start.
        InfraFailure: the episode failed, with the cause.
    """
    folders = [folder / model for folder in search_folders(model, Path())]
    model = next((str(folder) for folder in folders if folder.is_dir()), model)
    queue, client = MemoryTransferQueue(), FakeClient(lambda context: [])
    run = RunContext(queue, model, recipe_dir=recipe_dir)
    job = WorkerJob("trial", run, AgentConfig(loop=loop, **agent), client, list(tools))
    boxes = make_sandbox(sandbox, "trial") if sandbox is not None else None
    try:
        await queue.create_run(Limits(group_size=1, groups_per_step=1, max_staleness=0, max_attempts=1), "trial: true")
        services = build_services(job, boxes)
        turns = itertools.count()

        def reply(context: list[int]) -> list[int]:
            text = says(services.chat.decode(context)) if callable(says) else says[min(next(turns), len(says) - 1)]
            return [*services.chat.encode(text), services.chat.turn_end_id]

        client.reply = reply
        await queue.submit([task], cursor=DataCursor(0, 1))
        (lease,) = await queue.lease_episodes("trial", 1, 0)
        try:
            outcome = await Episode(services, lease).run()
        finally:
            await services.shared.close()
    finally:
        if boxes is not None:
            await boxes.close()
    if not outcome.may_carry_reward:
        raise InfraFailure(outcome.component or str(outcome.kind), outcome.reason)
    (trajectory,) = await queue.read([lease.episode_id])
    return trajectory
