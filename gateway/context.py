"""Objects that all recorded episodes of one rollout server share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.agent_loops import AgentConfig, ChatTokens, GenerateClient, Mismatches
from penstock.agent_loops.rewards import RewardFunction
from penstock.gateway.wire import Detokenizer, call_syntax, token_bytes_of
from penstock.transfer_queue import TransferQueue


@dataclass(frozen=True, slots=True)
class GatewayContext:
    worker: str
    """The rollout server's name, the owner of its leases."""
    config: AgentConfig
    queue: TransferQueue
    client: GenerateClient
    chat: ChatTokens
    detokenizer: Detokenizer
    model: str
    """Name of the model for clients."""
    context_limit: Callable[[], int | None] = lambda: None
    """Limit of context and answer together, in tokens; None until an engine is up."""
    draining: Callable[[], bool] = lambda: False
    """The server is stopping and leases no further episodes."""
    reward: RewardFunction | None = None
    mismatches: Mismatches = field(default_factory=Mismatches)


def detokenizer(chat: ChatTokens, parser: str) -> Detokenizer:
    """How this model's token ids become text and tool calls."""
    return Detokenizer(
        decode=chat.decode,
        token_bytes=token_bytes_of(chat.tokenizer),
        end_ids=frozenset(chat.stop_token_ids),
        syntax=call_syntax(parser),
    )
