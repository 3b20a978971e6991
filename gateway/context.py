"""Objects that all recorded episodes of one rollout server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from penstock.agent_loops import AgentConfig, ChatTokens, GenerateClient, Mismatches, Teachers
from penstock.agent_loops.rewards import RewardFunction
from penstock.gateway.errors import UnknownModel
from penstock.gateway.wire.reader import CallSyntax, Detokenizer, token_bytes_of
from penstock.transfer_queue import TransferQueue

MAX_TOKENIZING = 2
"""Long requests that are tokenized at once: further ones wait, so that they cannot take every thread and core."""


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
    """Name of the model for clients, besides `AgentConfig.capture.model_aliases`."""
    context_limit: Callable[[], int | None] = lambda: None
    """Limit of context and answer together, in tokens; None until an engine is up."""
    longest_token: int | None = None
    """Characters that one token can hold, see `longest_token`; None: the length of a text is not checked."""
    draining: Callable[[], bool] = lambda: False
    """The server is stopping and leases no further episodes."""
    reward: RewardFunction | None = None
    teachers: Teachers | None = None
    routing_replay: bool = False
    """Same as `RunContext.routing_replay`."""
    mismatches: Mismatches = field(default_factory=Mismatches)
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_TOKENIZING))
    """Held for a long request while a thread tokenizes it."""

    @property
    def models(self) -> tuple[str, ...]:
        """All names of the model, its own first."""
        return (self.model, *(name for name in self.config.capture.model_aliases if name != self.model))

    def check_model(self, name: str) -> None:
        """Raises `UnknownModel`."""
        if name not in self.models:
            raise UnknownModel(
                f"the model {name!r} does not exist here; served: {', '.join(self.models)} "
                "(agent.capture.model_aliases adds names)"
            )


def longest_token(tokenizer: Any) -> int:
    """Characters of the longest token as the vocabulary spells it, byte for byte: no text of it is longer."""
    return max(map(len, tokenizer.get_vocab()))


@lru_cache(maxsize=4)
def detokenizer(chat: ChatTokens) -> Detokenizer:
    """Return the decoder of this model's token ids to text and tool calls. Making one reads the whole vocabulary."""
    return Detokenizer(
        decode=chat.decode,
        token_bytes=token_bytes_of(chat.tokenizer),
        end_ids=frozenset(chat.stop_token_ids),
        syntax=CallSyntax(chat.parser),
    )
