"""What a tool is, what a user asks, and a model that answers it in ids: for tests of exact tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from penstock.agent_loops import ChatTokens, SegmentBuilder
from penstock.rollout_server import FinishReason, Generation

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Adds.", "parameters": PARAMETERS}}]
USER = {"role": "user", "content": "What is 12+34?"}


def reply_of(ids: Sequence[int], text: str = "", reason: FinishReason = "stop", version: int = 0) -> Generation:
    """An answer of one version."""
    return Generation([*ids], [-0.1] * len(ids), [(version, 0, len(ids))], reason, text=text)


def say(segment: SegmentBuilder, ids: Sequence[int], reason: FinishReason = "stop", version: int = 0) -> None:
    """The model samples `ids`."""
    segment.append_sampled(reply_of(ids, reason=reason, version=version))


def answer(chat: ChatTokens, segment: SegmentBuilder, text: str = "46", *, by_letter: bool = False) -> Generation:
    """The model samples `text`, and the token that ends a reply."""
    ids = [token for piece in (text if by_letter else [text]) for token in chat.encode(piece)] + [chat.turn_end_id]
    say(segment, ids)
    return reply_of(ids, chat.decode(ids))


def split_anyhow(chat: ChatTokens, text: str, draw: Any) -> list[int]:
    """Ids that decode to `text`, cut at random characters outside special tokens: mostly not the tokenizer's choice."""
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12))
    inside = [match.span() for match in chat.continuation.special.finditer(text)]
    allowed = sorted(cut for cut in cuts if not any(start < cut < end for start, end in inside))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *allowed, len(text)])]
    return [token for piece in pieces for token in chat.encode(piece)]
