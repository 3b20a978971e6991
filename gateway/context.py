"""What all recorded episodes of one rollout server share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.agent_loops import AgentConfig, ChatTokens, GenerateClient, Mismatches
from penstock.agent_loops.rewards import RewardFunction
from penstock.gateway.wire import TextOf, call_syntax, token_bytes_of
from penstock.transfer_queue import TransferQueue


@dataclass(frozen=True, slots=True)
class CaptureParts:
    worker: str
    """The rollout server's name, as leases have it."""
    config: AgentConfig
    queue: TransferQueue
    client: GenerateClient
    chat: ChatTokens
    text_of: TextOf
    model: str
    """What clients call it."""
    context_limit: Callable[[], int | None] = lambda: None
    """Most tokens of context and answer together; None where no engine has said so yet."""
    draining: Callable[[], bool] = lambda: False
    """This server goes: it takes no further episodes."""
    reward: RewardFunction | None = None
    mismatches: Mismatches = field(default_factory=Mismatches)


def text_of(chat: ChatTokens, parser: str) -> TextOf:
    """How this model's ids become what clients read."""
    return TextOf(
        decode=chat.decode,
        token_bytes=token_bytes_of(chat.tokenizer),
        end_ids=frozenset(chat.stop_token_ids),
        syntax=call_syntax(parser),
    )
