"""What all episodes of one worker share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.agent_loops.base import AgentLoopBase
from penstock.agent_loops.chat import ChatTokens
from penstock.agent_loops.client import GenerateClient
from penstock.agent_loops.config import AgentConfig
from penstock.agent_loops.reward import RewardFunction
from penstock.agent_loops.trace import OnSpan
from penstock.sandbox import Sandbox
from penstock.tools import BaseTool, ToolConfig
from penstock.transfer_queue import TransferQueue


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
    worker: str
    config: AgentConfig
    queue: TransferQueue
    client: GenerateClient
    chat: ChatTokens
    tools: Mapping[str, BaseTool]
    tool_configs: Mapping[str, ToolConfig]
    find_loop: Callable[[str], type[AgentLoopBase]]
    sandbox: Sandbox | None = None
    on_lost: Literal["replay", "restart"] = "replay"
    reward: RewardFunction | None = None
    mismatches: Mismatches = field(default_factory=Mismatches)
    on_span: OnSpan | None = None
    """Told each span of each episode when it ends."""
