"""What an agent worker is told, and what its episodes share, checked before the first lease."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from penstock.agent_loops.chat import chat_of
from penstock.agent_loops.client import GenerateClient
from penstock.agent_loops.concurrency import Bounds
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.load import load_object
from penstock.agent_loops.metrics import WorkerMetrics
from penstock.agent_loops.neighbours import allow_imports_from
from penstock.agent_loops.parts import EpisodeParts
from penstock.agent_loops.registry import find_loop
from penstock.agent_loops.reward import load_reward
from penstock.sandbox import Sandbox, SandboxConfig
from penstock.tools import ToolConfig, configs_of, make_tools
from penstock.transfer_queue import TransferQueue

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """Everything one agent worker is told. The queue and the client stay their opener's to close."""

    name: str
    """Unique in the run; named in leases and logs."""
    config: AgentConfig
    queue: TransferQueue
    client: GenerateClient
    model: str
    """Folder or hub name of the tokenizer."""
    tools: list[ToolConfig] = field(default_factory=list)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    seed: int = 0
    """Of back-off jitter; sampling is seeded at the servers."""
    recipe_dir: Path = Path()
    """Where files named in the recipe are looked for first."""
    lease_ttl_s: float = 15.0
    sandbox_token: str | None = None
    """Bearer token of a remote sandbox server."""
    max_failures_in_a_row: int = 20
    server_slots: int = 0
    """Requests that a rollout server decodes together; 0: not known."""
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    """What the worker counts; served by its opener."""

    @property
    def bounds(self) -> Bounds:
        """Half of what a server may hold before it counts as loaded is decoded at once; the other half waits there."""
        given = self.config.server_requests
        requests = 2 * self.server_slots if given is None else given
        return Bounds(self.config.concurrency, requests, self.config.server_tokens)


def build_parts(job: WorkerJob, sandbox: Sandbox | None) -> EpisodeParts:
    """Template, tools, loop, reward. Raises `AgentError` naming what the recipe has wrong."""
    allow_imports_from(job.recipe_dir.resolve())
    tools = make_tools(job.tools, sandbox, partial(load_object, recipe_dir=job.recipe_dir))
    chat = chat_of(job.model, job.config)
    proof = chat.prove([tool.schema for tool in tools.values()])
    log.info(
        "chat template proven on %d conversations; %s", proof.conversations, proof.summary(job.config.thinking_history)
    )
    find = lru_cache(partial(find_loop, recipe_dir=job.recipe_dir))
    find(job.config.loop)
    return EpisodeParts(
        worker=job.name,
        config=job.config,
        queue=job.queue,
        client=job.client,
        chat=chat,
        tools=tools,
        tool_configs=configs_of(tools),
        find_loop=find,
        sandbox=sandbox,
        on_lost=job.sandbox.on_lost,
        reward=load_reward(job.config, job.recipe_dir, sandbox),
    )
